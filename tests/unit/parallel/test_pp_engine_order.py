"""Our rows are the rows of torch's own schedules where it has them, and our lowering is its lowering, action by action."""

from __future__ import annotations

import pytest

from headrace.parallel import build_schedule, lower, schedules

engine = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch is an extra")

CASES = [
    ("interleaved-1f1b", "ScheduleInterleaved1F1B", (2, 3)),
    ("looped-bfs", "ScheduleLoopedBFS", (1, 2)),
    ("zb-1p", "ScheduleInterleavedZeroBubble", (2, 3)),
    ("zbv", "ScheduleZBVZeroBubble", (None,)),
    ("dualpipe-v", "ScheduleDualPipeV", (None,)),
]


def their_rows(cls, ranks, microbatches, chunks):
    """Ask a schedule class for its rows without stages or processes; it only reads these few numbers."""
    rows = []
    for rank in range(ranks):
        schedule = object.__new__(cls)
        schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = ranks, chunks, microbatches
        schedule._num_stages = schedule.num_stages = ranks * chunks
        schedule._stages = [None] * chunks
        rounds = max(1, microbatches // ranks)
        schedule.number_of_rounds, schedule.microbatches_per_round = rounds, microbatches // rounds
        rows.append([str(a) for a in schedule._calculate_single_rank_operations(rank) if a is not None])
    return rows


@pytest.mark.parametrize(("name", "cls", "chunks"), CASES)
def test_same_rows(name, cls, chunks):
    compared = 0
    for ranks in (2, 3, 4, 5):
        for microbatches in (ranks, 2 * ranks, 2 * ranks + 1, 3 * ranks):
            if name == "dualpipe-v" and microbatches < 2 * ranks:
                continue
            if name in ("interleaved-1f1b", "zb-1p") and microbatches % max(1, microbatches // ranks):
                continue
            for v in chunks:
                ours = build_schedule(name, ranks, microbatches, chunks=v)
                theirs = their_rows(getattr(engine, cls), ranks, microbatches, v or 2)
                assert [[str(a) for a in row] for row in ours.rows] == theirs, (ranks, microbatches, v)
                compared += 1
    assert compared >= 12


@pytest.mark.parametrize("name", schedules())
@pytest.mark.parametrize("order", ["asap", "deferred"])
def test_same_lowering(name, order):
    for ranks in (1, 2, 3, 4):
        for microbatches in (1, ranks, 2 * ranks + 1):
            schedule = build_schedule(name, ranks, microbatches)
            rows = {r: [engine._Action.from_str(str(a)) for a in row] for r, row in enumerate(schedule.rows)}
            rows = {
                r: engine._add_reduce_grad(engine._add_unshard_reshard(row), microbatches) for r, row in rows.items()
            }
            rows = engine._add_send_recv(rows, lambda s: schedule.stage_to_rank[s], schedule.num_stages)  # noqa: B023
            if order == "deferred":
                rows = engine._defer_recv_ops(rows, lambda s: schedule.stage_to_rank[s])  # noqa: B023
            ours = lower(schedule, order=order).rows
            assert [[str(a) for a in row] for row in ours] == [[str(a) for a in rows[r]] for r in range(ranks)]


def test_every_text_is_read_alike():
    for name in schedules():
        for row in lower(build_schedule(name, 3, 6)).rows:
            for action in row:
                theirs = engine._Action.from_str(str(action))
                assert str(theirs) == str(action)
                assert theirs.computation_type.value == action.kind.value

"""What the proof accepts, runs; what would go wrong, it refuses."""

from __future__ import annotations

import random
from collections import deque

import pytest

from headrace.errors import ScheduleError
from headrace.parallel import Kind, Schedule, build_schedule, lower, prove, schedules
from headrace.parallel.action import RECEIVES, SENDS
from headrace.parallel.builders import recipe
from headrace.parallel.lower import need_of, peer
from headrace.parallel.transport import TRANSPORTS, WaitGraph, deadlock

SMALL = [(n, m) for n in (1, 2, 3, 4) for m in (1, 2, 5, 8)]


@pytest.mark.parametrize("name", schedules())
def test_every_builder_is_proved_for_any_number_of_microbatches(name):
    for ranks, microbatches in SMALL:
        schedule = build_schedule(name, ranks, microbatches)
        proof = prove(schedule)
        assert proof.lowered.compute_only() == schedule
        assert prove(schedule.forward_only()).num_computations == schedule.num_stages * microbatches


@pytest.mark.parametrize("name", schedules())
def test_csv_round_trip(name):
    for ranks, microbatches in SMALL:
        for schedule in (build_schedule(name, ranks, microbatches), lower(build_schedule(name, ranks, microbatches))):
            assert Schedule.from_csv(schedule.to_csv(), schedule.name) == schedule


def loop_cases():
    """261 cases: three schedules with several stages a rank, N in 2, 4, 8, v in 2, 3, 4, M from 2 to 12."""
    for name in ("interleaved-1f1b", "looped-bfs", "zb-1p"):
        for ranks in (2, 4, 8):
            for chunks in (2, 3, 4):
                for microbatches in range(2, 13):
                    if name == "looped-bfs" or microbatches % max(1, microbatches // ranks) == 0:
                        yield name, ranks, chunks, microbatches


def test_baseline_of_261_cases():
    """The default order passes all on every transport; deferred receives fail 195 on a queue for each pair of ranks."""
    passed = failed = total = 0
    for name, ranks, chunks, microbatches in loop_cases():
        total += 1
        schedule = build_schedule(name, ranks, microbatches, chunks=chunks)
        passed += prove(schedule).transports == TRANSPORTS
        failed += bool(WaitGraph(lower(schedule, order="deferred", sharding=False), "per-peer").stuck())
    assert (total, passed, failed) == (261, 261, 195)


def test_default_order_is_free_of_deadlock_by_the_exact_search_too():
    """The quick proof (one witness order) and the search for cycles agree."""
    for name in schedules():
        for ranks, microbatches in SMALL:
            lowered = lower(build_schedule(name, ranks, microbatches))
            for transport in (*TRANSPORTS, "per-direction", "blocking"):
                assert deadlock(lowered, transport) == []


def test_deferred_receives_name_the_minimal_cycle():
    lowered = lower(build_schedule("interleaved-1f1b", 2, 2, chunks=2), order="deferred")
    with pytest.raises(ScheduleError) as error:
        prove(lowered)
    text = str(error.value)
    assert "deadlocks on a per-peer transport" in text
    assert "message 2SEND_F1 of rank 0 to 3RECV_F1 of rank 1" in text
    assert "message 3SEND_B0 of rank 1 to 2RECV_B0 of rank 0" in text
    assert text.count("waits for") == 2, "two messages wait for each other: the shortest cycle there is"
    assert "rank 0:" in text
    assert "rank 1:" in text


def test_even_ranks_send_first_odd_ranks_receive_first():
    """With sends that block, neighbours that both send first deadlock; by parity they do not."""
    for ranks in range(1, 8):
        for microbatches in range(1, 12):
            schedule = build_schedule("1f1b", ranks, microbatches)
            parity = lower(schedule, order="even-odd")
            assert deadlock(parity, "blocking") == []
            assert prove(parity).transports == TRANSPORTS
            late = lower(schedule, order="late")
            assert bool(deadlock(late, "blocking")) == (ranks > 1 and microbatches > 1)
    gpipe = lower(build_schedule("gpipe", 5, 7), order="even-odd")
    assert deadlock(gpipe, "blocking") == []


def interpret(schedule: Schedule) -> bool:
    """Run the rows over untagged first-in-first-out channels; whether all finish and every input is the right one.

    Nothing here is shared with the proof: tensors are names, and a computation looks at the name it was handed.
    """
    channels: dict[tuple[int, int], deque] = {}
    inbox: dict[tuple[int, object], object] = {}
    local: list[set] = [set() for _ in schedule.rows]
    position = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while position[rank] < len(row):
                action = row[position[rank]]
                if action.kind in SENDS:
                    way = "F" if action.kind is Kind.SEND_F else "B"
                    tensor = (action.stage, way, action.microbatch)
                    if tensor not in local[rank]:
                        return False
                    channels.setdefault((rank, peer(schedule, action)), deque()).append(tensor)
                elif action.kind in RECEIVES:
                    channel = channels.setdefault((peer(schedule, action), rank), deque())
                    if not channel:
                        break
                    inbox[rank, action] = channel.popleft()
                elif action.is_compute:
                    for leaf in action.leaves():
                        need = need_of(schedule, leaf)
                        if need is not None and schedule.stage_to_rank[need[0]] != rank:
                            kind = Kind.RECV_F if leaf.kind is Kind.F else Kind.RECV_B
                            got = inbox.get((rank, leaf._replace(kind=kind)))
                            if got != need:
                                return False
                        elif need is not None and need not in local[rank]:
                            return False
                        if leaf.kind is not Kind.W:
                            local[rank].add((leaf.stage, "F" if leaf.kind is Kind.F else "B", leaf.microbatch))
                position[rank] += 1
                moved = True
    return all(position[rank] == len(row) for rank, row in enumerate(schedule.rows))


def test_what_is_proved_computes_with_the_right_tensors():
    """Rows shaken at random: whatever the proof still accepts, an independent interpreter runs without a wrong tensor."""
    rng = random.Random(5)
    accepted = refused = wrong = 0
    for _ in range(600):
        name = rng.choice(schedules())
        lowered = lower(build_schedule(name, rng.randint(2, 4), rng.randint(2, 5)), sharding=False)
        rows = [list(row) for row in lowered.rows]
        for _ in range(rng.randint(1, 2)):
            row = rng.choice(rows)
            i = rng.randrange(len(row) - 1)
            j = min(len(row) - 1, i + rng.randint(1, 2))
            row[i], row[j] = row[j], row[i]
        shaken = Schedule.from_rows(name, rows, lowered.num_microbatches)
        fine = interpret(shaken)
        wrong += not fine
        try:
            prove(shaken)
        except ScheduleError:
            refused += 1
        else:
            accepted += 1
            assert fine, shaken.to_csv()
    assert min(accepted, refused, wrong) > 50


def test_a_swapped_pair_of_receives_is_refused_and_named():
    """The engine would run this without an error and with wrong gradients."""
    lowered = lower(build_schedule("gpipe", 2, 3), sharding=False)
    row = list(lowered.rows[1])
    i, j = (row.index(a) for a in row if str(a) in ("1RECV_F0", "1RECV_F1"))
    row[i], row[j] = row[j], row[i]
    # Both before their use, so nothing hangs: only the order is wrong.
    row.sort(key=lambda a: 0 if a.kind is Kind.RECV_F else 1)
    with pytest.raises(ScheduleError, match="would corrupt gradients") as error:
        prove(Schedule.from_rows("swapped", [lowered.rows[0], row]))
    assert "0SEND_F0 of rank 0 meets 1RECV_F1 of rank 1, not 1RECV_F0" in str(error.value)


def test_recipes_say_whether_they_split_the_backward():
    for name in schedules():
        assert build_schedule(name, 3, 6).splits_backward == recipe(name).splits_backward

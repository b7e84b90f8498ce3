"""Errors of the proof: each names stage, rank and microbatch, and says what to change."""

from __future__ import annotations

import pytest

from headrace.errors import ScheduleError
from headrace.parallel import Action, Schedule, build_schedule, lower, prove
from headrace.parallel.transport import TRANSPORTS


def refused(schedule, **options):
    with pytest.raises(ScheduleError) as error:
        prove(schedule if isinstance(schedule, Schedule) else Schedule.from_csv(schedule), **options)
    return str(error.value)


def lowered(name="1f1b", ranks=2, microbatches=2, **options):
    return lower(build_schedule(name, ranks, microbatches), **options).to_csv()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", ["stage 0", "rank 0", "microbatch 1", "lacks a backward", "add 0B1"]),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1B1\n", ["rank 1", "1B1 comes before 1F1", "run 1F1 first"]),
        ("0F0,0B0,0B1,0F1\n", ["position 2", "0B1 comes before 0F1"]),
        ("0F0,0I0\n1F0,1B0\n", ["stage 0", "lacks 0W0", "after 0I0"]),
        ("0F0,0W0,0I0\n", ["0W0 comes before 0I0"]),
        ("0F0,0B0,0I0,0W0\n", ["stage 0", "a full backward and a split one"]),
        ("0F0,0F0,0B0\n", ["position 1", "already run at position 0", "remove"]),
        ("0F0,0B0\n1F0,1B0,1F1,1B1\n", ["stage 0", "rank 0", "microbatch 1", "lacks 0F1"]),
    ],
)
def test_incomplete_or_disordered(text, words):
    message = refused(text)
    assert all(word in message for word in words), message


def test_a_microbatch_that_the_step_does_not_have():
    message = refused(Schedule.from_csv("0F0,0B0,0F1,0B1\n", num_microbatches=1))
    assert "0F1 is of microbatch 1, but the step has 1" in message
    assert "no microbatches" in refused(Schedule.from_csv("0UNSHARD\n", num_microbatches=0))


def test_a_cycle_among_computations_is_shown_whole():
    message = refused("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert "deadlocks on any transport" in message
    assert "shortest cycle" in message
    assert "rank 0 at 0B0" in message
    assert "rank 1 at 1F1" in message
    assert message.count("\n  rank ") == 2, "both rows are shown"


@pytest.mark.parametrize(("name", "order"), [("1f1b", "late"), ("zb-1p", "deferred"), ("interleaved-1f1b", "deferred")])
def test_the_cycle_of_a_large_schedule_is_short_and_soon_found(name, order):
    """Two messages that wait for each other are named, out of thousands that wait behind them."""
    message = refused(lower(build_schedule(name, 8, 64), order=order))
    assert message.count("waits for message") == 2
    assert message.count("\n  rank ") == 2


def test_a_rank_without_work_does_not_confuse_the_search():
    rows = list(lower(build_schedule("1f1b", 2, 3), order="late", sharding=False).rows)
    message = refused(Schedule.from_rows("gap", [rows[0], (), rows[1]]))
    assert "of rank 0 to 1RECV_F1 of rank 2" in message


def test_communication_missing_or_doubled():
    text = lowered()
    assert "0SEND_F1" in refused(text.replace("0SEND_F1,", ""))
    assert "moves a tensor twice" in refused(text.replace("0SEND_F1,", "0SEND_F1,0SEND_F1,"))
    assert "uses what 1RECV_F0 brings" in refused(text.replace("1RECV_F0,", ""))
    early = text.replace("0F0,0SEND_F0", "0SEND_F0,0F0")
    assert "not made yet" in refused(early)


def test_a_tensor_that_stays_on_its_rank_needs_no_message():
    rows = [list(row) for row in lower(build_schedule("zbv", 2, 3), sharding=False).rows]
    rows[1].insert(2, Action.parse("1SEND_F0"))
    assert "stays on its rank" in refused(Schedule.from_rows("zbv", rows))


def test_sharding_actions_must_fit():
    text = lowered()
    assert "drops parameters that are not gathered" in refused(text.replace("0UNSHARD,", ""))
    assert "never reduces the gradients of stage 1" in refused(text.replace(",1REDUCE_GRAD", ""))
    assert "once, after the last backward" in refused(text.replace("0F1", "0REDUCE_GRAD,0F1"))


def test_use_while_sharded():
    text = lowered()
    moved = text.replace("0UNSHARD,0F0", "0F0,0UNSHARD")
    assert "uses stage 0 while it is sharded; put 0UNSHARD before it" in refused(moved)


def test_cap():
    schedule = build_schedule("1f1b", 4, 8)
    assert prove(schedule, cap=4).in_flight == (4, 3, 2, 1)
    assert prove(schedule, cap=[4, 3, 2, 1]).transports == TRANSPORTS
    message = refused(schedule, cap=3)
    assert "rank 0 holds 4 microbatches in flight, its cap is 3" in message
    assert "1f1b, v-half, v-min" in message
    assert "2 caps for 4 ranks" in refused(schedule, cap=[4, 4])


def test_a_stage_of_a_v_may_not_turn_too_early():
    """Two stages of one rank hand tensors over without a message, so only the order of the row protects them."""
    rows = [list(row) for row in lower(build_schedule("zbv", 2, 3), sharding=False).rows]
    row = rows[1]
    i, j = row.index(Action.parse("1F0")), row.index(Action.parse("2F0"))
    row[i], row[j] = row[j], row[i]
    message = refused(Schedule.from_rows("zbv", rows))
    assert "2F0 uses what 1F0 on the same rank makes, which comes later" in message


def test_lowering_refuses_what_it_cannot_order():
    with pytest.raises(ScheduleError, match="cannot be lowered"):
        lower(Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"))
    with pytest.raises(ScheduleError, match="holds communication already"):
        lower(lower(build_schedule("1f1b", 2, 2)))
    with pytest.raises(ScheduleError, match="one stage a rank"):
        lower(build_schedule("interleaved-1f1b", 2, 4), order="even-odd")


def test_large_schedules_are_proved():
    proof = prove(build_schedule("1f1b", 16, 64))
    assert proof.num_messages == 2 * 15 * 64
    assert "no deadlock     on buffered, per-peer, single transport" in str(proof)

"""Autotune moves one worker at a time, keeps the total, and only when it pays."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.run.tune import EVERY_S, Tuner, rebalance

STAGES = st.integers(2, 5)


@given(st.data(), STAGES)
def test_the_total_stays_and_nobody_is_left_without(data: st.DataObject, n: int) -> None:
    allotment = data.draw(st.lists(st.integers(1, 8), min_size=n, max_size=n))
    busy = data.draw(st.lists(st.floats(0, 8), min_size=n, max_size=n))
    after = rebalance(allotment, busy, 1.0)
    assert sum(after) == sum(allotment) and min(after) >= 1
    assert sum(abs(a - b) for a, b in zip(after, allotment, strict=True)) in (0, 2)


def test_balanced_stages_are_left_alone() -> None:
    assert rebalance([2, 2], [1.0, 1.2], 1.0) == [2, 2]
    assert rebalance([4], [4.0], 1.0) == [4]


def test_the_tuner_looks_now_and_then_and_says_what_it_did() -> None:
    now, busy, moves = [0.0], {0: 0, 1: 0}, []
    tuner = Tuner({0: 3, 1: 1}, lambda i: busy[i], lambda stage, n: moves.append((stage, n)), lambda: now[0])
    busy[1] = int(1e9)
    tuner.look()
    assert not moves
    now[0] = EVERY_S * 4
    tuner.look()
    assert moves == [(0, 2), (1, 2)] and tuner.allotment == {0: 2, 1: 2}

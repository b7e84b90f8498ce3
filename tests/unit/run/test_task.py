"""A slice whose supervisor takes the count away ends before the next item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.run.task import RUNNING, STARTED, Function, new_work, run_slice
from headrace.steps.chain import Chain, Step


def plain(step: Callable[[int], int]) -> Any:
    return step


def in_many(step: Callable[[int], int]) -> Any:
    return Chain((Step("step", step, False), Step("twice", lambda x: [x, x], True)))


def in_one_loop(step: Callable[[int], int]) -> Any:
    chain = Chain((Step("step", step, False),))
    for _ in range(3):
        chain.report()  # of the fourth slice no times are taken
    assert chain.through is not None
    return chain


@pytest.mark.parametrize("make", [plain, in_many, in_one_loop])
def test_a_slice_without_its_count_ends_before_the_next_item(make: Any) -> None:
    words, taken = [0, 0], list[int]()

    def step(x: int) -> int:
        if x == 3:
            taken.append(words.pop())
        return x

    function = Function(lambda: make(step))
    work = new_work(function)
    done = run_slice(function, range(10), (0, 10), 0, words, work)
    outputs = [x for x in range(4) for _ in range(1 + (make is in_many))]
    assert (done.begin, done.end, done.values, done.failure) == (0, 4, outputs, None)
    assert work[0] == outputs and (work[1] is None or len(work[1]) == 4)
    assert taken == [4] and len(words) == STARTED and words[RUNNING] == 0
    again = run_slice(function, range(10), (4, 10), 0, words)
    assert (again.begin, again.end, again.values, again.failure) == (4, 4, [], None)

"""Steps in threads: each thread has its own copy of a step with set-up, and one that is left behind does nothing more."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from step_functions import HANG

from headrace.steps import Pipeline


class SetUpAtWork:
    """The second thread empties and fills its table while the first one works."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.second, self.worked = threading.Event(), threading.Event()

    def setup(self) -> None:
        self.begun.append(1)
        self.table: dict[int, str] = {}
        if len(self.begun) == 2:
            self.second.set()
            assert self.worked.wait(HANG)
        self.table.update({k: str(k) for k in range(100)})

    def __call__(self, x: int) -> str | None:
        assert self.second.wait(HANG)
        found = self.table.get(x)
        self.worked.set()
        return found


@pytest.mark.parametrize("seed", [None, 7])
def test_a_thread_sets_up_while_another_works(seed: int | None) -> None:
    step = SetUpAtWork()
    with Pipeline([step], runner="threads", num_workers=2, seed=seed) as pipeline:
        assert list(pipeline.map(range(100))) == [str(k) for k in range(100)]
    assert len(step.begun) == 2 and not hasattr(step, "table")


class TornDown:
    """Item 0 is late; while item 2 is in work, its thread leaves."""

    def __init__(self) -> None:
        self.leave, self.left = threading.Event(), threading.Event()

    def setup(self) -> None:
        self.table = {k: str(k) for k in range(100)}

    def __call__(self, x: int) -> str | None:
        if x == 0:
            assert self.leave.wait(HANG)
        if x == 2:
            self.leave.set()
            assert self.left.wait(HANG)
        return self.table.get(x)

    def teardown(self) -> None:
        self.table.clear()
        self.left.set()


def test_a_thread_that_was_left_behind_tears_down_what_is_its_own() -> None:
    with Pipeline([TornDown()], runner="threads", num_workers=1, timeout=2.0, on_error="skip") as pipeline:
        assert list(pipeline.map(range(100))) == [str(k) for k in range(1, 100)]


class Late:
    """Item 500 is late; while item 600 is in work, it is let go on."""

    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()
        self.leave = threading.Event()
        self.thread: threading.Thread | None = None

    def __call__(self, x: int) -> int:
        self.seen[x] += 1
        if x == 500:
            self.thread = threading.current_thread()
            assert self.leave.wait(HANG)
        if x == 600:
            self.end()
        return x

    def end(self) -> None:
        assert self.thread is not None
        self.leave.set()
        self.thread.join(HANG)
        assert not self.thread.is_alive()


def twice(x: int) -> Any:
    yield x
    yield -x


@pytest.mark.parametrize("many", [False, True])
def test_nothing_runs_twice_when_a_thread_is_left_behind(many: bool) -> None:
    step = Late()
    steps = [step, twice] if many else [step]
    wanted = [y for x in range(1000) if x != 500 for y in ((x, -x) if many else (x,))]
    with Pipeline(steps, runner="threads", num_workers=1, timeout=2.0, on_error="skip") as pipeline:
        assert list(pipeline.map(range(1000))) == wanted
        stats = pipeline.statistics()
        assert (stats.finished, stats.skipped, stats.steps[-1].produced) == (1000, 1, len(wanted))
    assert len(step.seen) == 1000 and set(step.seen.values()) == {1}


def test_nothing_runs_twice_with_keys_either() -> None:
    step, got = Late(), list[int]()
    with Pipeline([step], runner="threads", num_workers=1, timeout=1.0, assign=bool, on_error="skip") as pipeline:
        with pytest.raises(TimeoutError, match=r"item 500 took longer than 1\.0 s"):
            got.extend(pipeline.map(range(1000)))
        step.end()
    assert got == list(range(500)) and set(step.seen.values()) == {1}

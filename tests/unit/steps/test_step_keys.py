"""`assign=`: a key function that raises, and state that is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from step_functions import PerKey, every_runner

from headrace.errors import ConfigError, WorkerDied
from headrace.steps import Failed, Pipeline, emit


def key(item: dict[str, int]) -> int:
    return item["k"]


def value(item: dict[str, int]) -> int:
    return item["n"]


def given(number: int, *bad: int) -> list[dict[str, int]]:
    return [{"n": n} if n in bad else {"n": n, "k": n % 3} for n in range(number)]


@every_runner
def test_a_key_function_that_raises_is_an_error_at_its_items_place(runner: Any) -> None:
    got: list[int] = []
    with Pipeline([value], num_workers=2, runner=runner, assign=key) as pipeline:
        with pytest.raises(KeyError, match="k") as caught:
            got.extend(pipeline.map(given(300, 250)))
        note = "\n".join(caught.value.__notes__)
        assert got == list(range(250)) and "function of assign=" in note and "item 250" in note and "{'n': 250}" in note
        assert list(pipeline.map(given(3))) == [0, 1, 2]


@every_runner
@pytest.mark.parametrize("bad", [(250,), tuple(range(300))])
def test_an_item_without_a_key_is_skipped_or_returned(runner: Any, bad: tuple[int, ...]) -> None:
    with Pipeline([value], num_workers=2, runner=runner, assign=key, on_error="skip") as pipeline:
        assert list(pipeline.map(given(300, *bad))) == [n for n in range(300) if n not in bad]
        stats = pipeline.statistics()
        assert (stats.received, stats.finished, stats.skipped, stats.in_flight) == (300, 300, len(bad), 0)
        assert stats.errors[0].startswith("the function of assign=: KeyError('k'), item ")
    with Pipeline([value], num_workers=2, runner=runner, assign=key, on_error="return") as pipeline:
        outputs = list(pipeline.map(given(300, *bad)))
        assert [n for n, out in enumerate(outputs) if isinstance(out, Failed)] == list(bad) and len(outputs) == 300


@every_runner
def test_a_key_of_another_type_is_an_error_of_its_item(runner: Any) -> None:
    items = [("a", 1), (1.5, 2), ("a", 3)]
    with Pipeline([PerKey()], num_workers=1, runner=runner, assign=lambda item: item[0]) as pipeline:
        outputs: Iterator[Any] = pipeline.map(items)
        assert next(outputs) == ("a", 1, 1)
        with pytest.raises(ConfigError, match="a key of assign= must be"):
            next(outputs)
    with Pipeline([PerKey()], runner=runner, num_workers=1, assign=lambda item: item[0], on_error="skip") as pipeline:
        assert list(pipeline.map(items)) == [("a", 1, 1), ("a", 3, 2)]


@every_runner
def test_an_emitters_item_without_a_key_is_skipped(runner: Any) -> None:
    with Pipeline([value], num_workers=2, runner=runner, assign=key, on_error="skip") as pipeline:
        emit([given(300, 7, 299)], pipeline)
        assert list(pipeline) == [n for n in range(300) if n not in (7, 299)]


class SlowPerKey(PerKey):
    def __call__(self, item: tuple[str, int]) -> tuple[str, int, int]:
        if item[1] == 40:
            time.sleep(3.0)
        return super().__call__(item)


@pytest.mark.parametrize("runner", ["threads", "process"])
@pytest.mark.parametrize("policy", ["skip", "return"])
def test_a_late_item_is_an_error_for_the_state_of_its_worker_is_gone(runner: Any, policy: Any) -> None:
    got: list[Any] = []
    items = [("a", n) for n in range(80)]
    with Pipeline(
        [SlowPerKey()], num_workers=1, runner=runner, timeout=0.5, on_error=policy, assign=lambda item: item[0]
    ) as pipeline:
        with pytest.raises(TimeoutError, match=r"item \('a', 40\) took longer than 0\.5 s") as caught:
            got.extend(pipeline.map(items))
        assert got == [("a", n, n + 1) for n in range(len(got))]  # what a process has not reported is gone with it
        assert len(got) == 40 if runner == "threads" else len(got) <= 40
        assert f"item {len(got)}" in caught.value.__notes__[0]
        assert list(pipeline.map([("b", 1)])) == [("b", 1, 1)]


def pid_of(item: str) -> int:
    del item
    return os.getpid()


def test_a_worker_that_dies_between_items_is_an_error_once() -> None:
    with Pipeline([pid_of], num_workers=1, assign=lambda item: item, on_error="skip") as pipeline:
        (pid,) = pipeline.map("a")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            list(pipeline.map("a"))
        assert list(pipeline.map("a")) != [pid]

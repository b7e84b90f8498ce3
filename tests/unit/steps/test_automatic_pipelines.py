"""Pipelines with `num_workers="auto"`: where their items run, and that nobody sees it in the outputs."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from functools import partial
from itertools import chain, repeat
from typing import Any

import pytest
from step_functions import PerKey, add_1, draw, sleep_at

from headrace.errors import ConfigError
from headrace.run.executor import WorkerStatistics
from headrace.steps import Pipeline
from headrace.steps.auto import Stretches
from headrace.steps.statistics import Ledger


@pytest.mark.slow  # it measures: only a quiet machine gives the answer
def test_automatic_workers_stay_home_for_cheap_steps_and_go_out_for_dear_ones() -> None:
    cheap = Pipeline([add_1])
    assert list(cheap.map(range(5000))) == list(range(1, 5001))
    assert "in this process" in cheap.explain() and cheap.statistics().workers.deaths == 0
    dear = Pipeline([partial(sleep_at, -1, 0.0), busy])
    assert list(dear.map(range(60))) == list(range(60))
    assert "in worker processes" in dear.explain()
    assert dear.statistics().received == dear.statistics().finished == 60


def busy(x: int, seconds: float = 0.004) -> int:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return x


def test_automatic_workers_change_their_mind() -> None:
    pipeline = Pipeline([slower_later])
    items = [*range(2000), *([-1] * 600)]
    assert list(pipeline.map(items)) == items
    assert "in worker processes" in pipeline.explain()


def test_automatic_workers_share_out_slow_items_that_were_pulled_already() -> None:
    pipeline = Pipeline([with_pid])
    outputs = list(pipeline.map([*range(1000), *([-1] * 60)]))
    assert [x for x, _ in outputs] == [*range(1000), *([-1] * 60)]
    assert len({pid for x, pid in outputs if x < 0}) > 1
    stats = pipeline.statistics()
    assert (stats.received, stats.finished, stats.delivered) == (1060, 1060, 1060)


def with_pid(x: int) -> tuple[int, int]:
    time.sleep(0.05 if x < 0 else 0)
    return x, os.getpid()


def slower_later(x: int) -> int:
    return busy(x, 0.001) if x < 0 else x


def test_what_cannot_be_pickled_stays_home_by_itself() -> None:
    pipeline = Pipeline([make_lock])
    assert len(list(pipeline.map(range(300)))) == 300
    assert "cannot be pickled" in pipeline.explain()


def make_lock(_: int) -> Any:
    busy(0)
    return threading.Lock()


def test_automatic_workers_keep_the_state_of_keys_in_one_place() -> None:
    with Pipeline([PerKey()], assign=lambda item: item[0]) as pipeline:
        outputs = list(pipeline.map((f"key{k % 3}", k) for k in range(300)))
    assert [seen for key, _, seen in outputs if key == "key1"] == list(range(1, 101))


def test_automatic_workers_watch_the_clock_from_the_first_item_on() -> None:
    with Pipeline([partial(sleep_at, 0, 600.0)], timeout=0.2, on_error="skip") as pipeline:
        assert list(pipeline.map(range(10))) == list(range(1, 10))


def test_seeded_items_are_the_same_at_home_and_in_workers() -> None:
    def run(**options: Any) -> list[float]:
        return list(Pipeline([draw_slowly], seed=4, **options).map([0.0] * 150))

    assert run() == run(runner="inline") == run(num_workers=2, assign=lambda x: 1)


def draw_slowly(x: float) -> float:
    busy(0, 0.001)
    return draw(x)


def keep(x: Any) -> Any:
    return x


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_seeded_items_are_the_same_after_several_changes_at_home(mode: Any) -> None:
    def run(**options: Any) -> list[float]:
        return list(Pipeline([keep, draw], seed=1, mode=mode, **options).map([0.0] * 1500))

    assert run() == run(runner="inline")


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_the_work_that_decides_is_that_of_all_stages(mode: Any) -> None:
    """And of inputs: three stages of one item count as one."""
    pipeline = Pipeline([busy, busy, busy], mode=mode)
    assert list(pipeline.map(range(40))) == list(range(40))
    work = re.search(r"work ([\d.]+) ms an item", pipeline.explain())
    assert work is not None and float(work[1]) >= 12.0


def ended(stages: int, looks: list[tuple[int, float]]) -> list[float | None]:
    """What stretches end at these looks: (inputs that the first stage has done, seconds of work of all stages)."""
    ledger, workers = Ledger([["step"]] * stages, finished=10), WorkerStatistics(busy=100.0)
    stretches = Stretches(ledger, workers)
    costs: list[float | None] = []
    for inputs, seconds in looks:
        ledger.finished, workers.busy = 10 + inputs, 100.0 + seconds
        costs.append(stretches.ended())
    return [*costs, stretches.rest()]


def test_a_stretch_ends_with_its_slice_or_with_what_later_stages_make_of_it() -> None:
    assert ended(1, [(0, 0.0), (1, 2.0), (1, 2.0), (5, 6.0)]) == [None, 2.0, None, 1.0, None]
    one_by_one = [(1, 2.0), (1, 5.0), (5, 13.0), (5, 20.0), (5, 25.0), (6, 27.0), (6, 30.0)]
    assert ended(2, [(0, 0.0), *one_by_one]) == [None, None, None, 5.0, None, None, 5.0, None, 5.0]
    assert ended(2, [(0, 0.0)]) == [None, None]


class Counted:
    """How often it was set up and torn down in this process."""

    def __init__(self) -> None:
        self.setups = self.teardowns = 0

    def setup(self) -> None:
        self.setups += 1

    def teardown(self) -> None:
        self.teardowns += 1

    def __call__(self, x: int) -> int:
        assert self.setups > self.teardowns
        return x


def test_steps_that_stay_home_are_set_up_once_for_a_run_and_once_in_a_block() -> None:
    step = Counted()
    pipeline = Pipeline([step])
    assert list(pipeline.map(range(3000))) == list(range(3000))
    assert "in this process" in pipeline.explain() and (step.setups, step.teardowns) == (1, 1)
    assert list(pipeline.map(range(100))) == list(range(100))
    assert (step.setups, step.teardowns) == (2, 2)
    with pipeline:
        for _ in range(3):
            assert list(pipeline.map(range(100))) == list(range(100))
        assert (step.setups, step.teardowns) == (3, 2)
    assert (step.setups, step.teardowns) == (3, 3)


def test_steps_that_go_out_are_torn_down_at_home_when_workers_have_taken_over() -> None:
    step = Counted()
    with Pipeline([step, slower_later]) as pipeline:
        for _ in pipeline.map(chain(range(2000), repeat(-1))):
            if step.teardowns:
                break
        assert "in worker processes" in pipeline.explain()
        assert list(pipeline.map(range(5))) == list(range(5))
    assert (step.setups, step.teardowns) == (1, 1)


def test_iterations_at_home_that_take_turns_share_the_steps_and_lose_nothing() -> None:
    step = Counted()
    pipeline = Pipeline([step, slower_later])
    first, second = [*range(900), *([-1] * 300)], [*range(2000)]
    left, right = pipeline.map(first), pipeline.map(second)
    pairs = [(next(left), next(right)) for _ in range(1200)]
    assert ([x for x, _ in pairs], [y for _, y in pairs]) == (first, second[:1200])
    assert list(left) == [] and list(right) == second[1200:]
    assert (step.setups, step.teardowns) == (1, 1)


def test_an_iteration_left_early_at_home_leaves_the_others_alone() -> None:
    with Pipeline([keep]) as pipeline:
        left, right = iter(pipeline.map(range(3000))), iter(pipeline.map(range(3000)))
        assert [next(left) for _ in range(700)] == [next(right) for _ in range(700)]
        left.close()  # type: ignore[attr-defined]
        assert list(right) == list(range(700, 3000))


def test_an_iteration_at_home_does_not_set_up_the_steps_of_a_closed_pipeline_again() -> None:
    step = Counted()
    with Pipeline([step]) as pipeline:
        next(outputs := iter(pipeline.map(range(5000))))
    with contextlib.suppress(ConfigError):
        list(outputs)
    assert (step.setups, step.teardowns) == (1, 1)

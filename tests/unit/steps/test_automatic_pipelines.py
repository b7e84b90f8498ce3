"""Pipelines with `num_workers="auto"`: where their items run, and that nobody sees it in the outputs."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from typing import Any

import pytest
from step_functions import PerKey, add_1, draw, sleep_at

from headrace.steps import Pipeline


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

"""Closing a run whose lanes are shared with other groups: it does not compute their batches, and its last checkpoint is exact."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

import pytest

from headrace import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.io import InMemoryShard

STUCK = 4.0  # seconds


class Slow:
    """Takes long once it is told to."""

    seconds = 0.0

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(self.seconds)
        return row


def build(group: int, fn: Any = None, **options: Any) -> Pipeline:
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"x": i} for i in range(200)])})
    source = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"toy": 1.0}), chunk_size=16, seed=3)
    pipeline = Pipeline(source)
    if fn is not None:
        pipeline.map_transform(fn, parallelism=1)
    pipeline.batch(4)
    fixed = {"canonical_replicas": 1, "uneven": "keep", "auto_validation": "off", "micro_batch": 1, "cut_every": 8}
    return pipeline.options(dp_degree=2, dp_group_id=group, **fixed, **options)


def rows(batch: Any) -> list[int]:
    return [record.payload["x"] for record in batch.records]


def delivered(states: Any, group: int, count: int) -> list[list[int]]:
    pipeline = build(group, Slow(), runner="inline")
    pipeline.restore(states)
    with_rest = iter(pipeline)
    got = [rows(batch) for batch in islice(with_rest, count)]
    pipeline.close()
    return got


@pytest.mark.parametrize("runner", ["inline", "threads"])
def test_batches_of_other_groups_are_not_waited_for(runner: str) -> None:
    slow = Slow()
    pipeline = build(0, slow, runner=runner, prefetch_batches=1)
    iterator = iter(pipeline)
    for _ in range(3):
        next(iterator)
    slow.seconds = STUCK
    began = time.monotonic()
    pipeline.close()
    assert time.monotonic() - began < 2.9
    slow.seconds = 0.0
    state = pipeline.checkpoint()
    assert state["position"] == 6

    whole = iter(build(0, Slow(), runner="inline"))
    expected = [rows(batch) for batch in islice(whole, 8)][3:]
    whole.close()  # type: ignore[attr-defined]
    assert delivered(state, 0, 5) == expected


@pytest.mark.parametrize("order", [1, -1])
def test_what_was_not_waited_for_fits_the_state_of_the_other_group(order: int) -> None:
    """Whichever of them comes first."""
    states = []
    for group in range(2):
        pipeline = build(group, Slow(), runner="inline")
        iterator = iter(pipeline)
        for _ in range(5):
            next(iterator)
        pipeline.close()
        states.append(pipeline.checkpoint())
    for group in range(2):
        whole = iter(build(group, Slow(), runner="inline"))
        expected = [rows(batch) for batch in islice(whole, 9)][5:]
        whole.close()  # type: ignore[attr-defined]
        assert delivered(states[::order], group, 4) == expected


@pytest.mark.parametrize("runner", ["inline", "threads"])
def test_where_it_takes_no_time_the_last_checkpoint_is_the_same_on_all(runner: str) -> None:
    states = []
    for group in range(2):
        pipeline = build(group, runner=runner)
        for _ in islice(pipeline, 5):
            pass
        pipeline.close()
        states.append(pipeline.checkpoint())
    assert states[0] == states[1]

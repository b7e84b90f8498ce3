"""A checkpoint between two batches of this rank knows nothing of what the rank saw on its way to the next one.

Groups that do not divide the lanes compute batches of other groups too. Whether a rank stands still because an operator has
failed or because it waits, its checkpoint is that of its last delivered batch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.errors import OperatorError

LANES, GROUPS = 3, 2
Row = dict[str, Any]


def run(group: int, look: Callable[[Row], Row], runner: str = "inline", **more: Any) -> Pipeline:
    data = Dataset.from_dict("d", {0: InMemoryShard([{"n": i} for i in range(120)])})
    source = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"d": 1.0}), chunk_size=4)

    def step(row: Row) -> Row:
        return look(row)

    topology = {"canonical_replicas": LANES, "dp_degree": GROUPS, "dp_group_id": group, "uneven": "keep"} | more
    pipeline = Pipeline(source).map_transform(step).batch(2)
    return pipeline.options(runner=runner, auto_validation="off", **topology)


def numbers(batch: Any) -> list[int]:
    return [record.payload["n"] for record in batch.records]


def resumed(group: int, state: Any) -> list[list[int]]:
    pipeline = run(group, dict)
    pipeline.restore(state)
    return [numbers(batch) for batch in pipeline]


@pytest.mark.parametrize("group", range(GROUPS))
def test_after_an_operator_has_failed(group: int) -> None:
    whole = [numbers(batch) for batch in run(group, dict)]
    for bad in range(0, 120, 3):

        def fails(row: Row, bad: int = bad) -> Row:
            if row["n"] == bad:
                raise ValueError("broken on purpose")
            return row

        pipeline = run(group, fails)
        taken: list[list[int]] = []
        with contextlib.suppress(OperatorError):  # there is none where only lanes of the other group hold the record
            taken.extend(map(numbers, pipeline))
        assert taken == whole[: len(taken)]
        assert resumed(group, pipeline.checkpoint()) == whole[len(taken) :]


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("runner", ["inline", "threads"])
def test_while_another_thread_waits_for_a_batch(group: int, runner: str) -> None:
    whole = [numbers(batch) for batch in run(group, dict)]
    for at in range(0, 120, 9):
        reached, go_on = threading.Event(), threading.Event()

        def waits(row: Row, at: int = at, reached: threading.Event = reached, go_on: threading.Event = go_on) -> Row:
            if row["n"] == at:
                reached.set()
                assert go_on.wait(60)
            return row

        pipeline = run(group, waits, runner)
        iterator = iter(pipeline)
        taken: list[list[int]] = []
        loop = threading.Thread(target=lambda: taken.extend(map(numbers, iterator)))  # noqa: B023  joined below
        loop.start()
        assert reached.wait(60)
        before = len(taken)
        try:
            state = pipeline.checkpoint()
            after = len(taken)
        finally:
            go_on.set()
        loop.join(60)
        assert taken == whole
        assert resumed(group, state) in [whole[n:] for n in range(before, after + 2)]


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_the_engine_in_a_process_of_its_own_makes_no_difference(group: int, uneven: str) -> None:
    def states(**options: Any) -> list[Any]:
        pipeline = run(group, dict, uneven=uneven, cut_every=7, **options)
        out = [(None, pipeline.checkpoint(as_bytes=True))]
        out += [(None if b.is_masked else numbers(b), pipeline.checkpoint(as_bytes=True)) for b in pipeline]
        return [*out, (None, pipeline.checkpoint(as_bytes=True))]

    here = states()
    assert states(mtp_mode=True) == here
    assert states(runner="threads", prefetch_batches=1) == here


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_checkpoint_goes_on_with_what_follows_masked_batches_included(group: int) -> None:
    def batches(pipeline: Pipeline, states: list[Any]) -> list[Any]:
        out = []
        for batch in pipeline:
            out.append(None if batch.is_masked else numbers(batch))
            states.append(pipeline.checkpoint())
        return out

    pad: dict[str, Any] = {"uneven": "pad", "batches_per_step": 4 * GROUPS}
    states: list[Any] = []
    whole = batches(run(group, dict, **pad), states)
    assert None in whole
    for number, state in enumerate(states, 1):
        pipeline, later = run(group, dict, **pad), []
        pipeline.restore(state)
        assert batches(pipeline, later) == whole[number:]
        assert later == states[number:]

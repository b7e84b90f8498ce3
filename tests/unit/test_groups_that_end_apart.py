"""uneven="keep" with more lanes than groups: near the end groups pass over lanes that have ended, and stand at different places.

Their checkpoints of one step still join, and every batch that is left is delivered once, on any number of groups.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.core.entries import from_entries, to_entries
from headrace.errors import CheckpointError
from headrace.run.aggregate import Aggregation
from headrace.run.board import FolderBoard

Batch = tuple[int, ...]


def group(lanes: int, groups: int, number: int, rows: int = 100, **options: Any) -> Pipeline:
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"x": i} for i in range(rows)])})
    source = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"toy": 1.0}), chunk_size=16, seed=1)
    place = {"dp_degree": groups, "dp_group_id": number, "canonical_replicas": lanes}
    return Pipeline(source).batch(4).options(runner="inline", **({"uneven": "keep"} | place | options))


def numbers(batch: Any) -> Batch:
    return tuple(record.payload["x"] for record in batch.records)


def steps(lanes: int, groups: int, rows: int = 100) -> tuple[list[list[dict[str, Any]]], list[list[Batch]]]:
    """States of all groups after every step that all of them have, and what each group delivers."""
    pipelines = [group(lanes, groups, number, rows) for number in range(groups)]
    iterators = [iter(pipeline) for pipeline in pipelines]
    got: list[list[Batch]] = [[] for _ in range(groups)]
    states = []
    while True:
        states.append([pipeline.checkpoint() for pipeline in pipelines])
        for batches, iterator in zip(got, iterators, strict=True):
            batches += map(numbers, islice(iterator, 1))
        if min(map(len, got)) < len(states):
            for batches, iterator in zip(got, iterators, strict=True):
                batches += map(numbers, iterator)
            return states, got


def restored(state: Any, lanes: int, groups: int, number: int, **options: Any) -> Pipeline:
    pipeline = group(lanes, groups, number, **options)
    pipeline.restore(state)
    return pipeline


@pytest.mark.parametrize(("lanes", "groups", "rows"), [(4, 2, 100), (6, 2, 156), (6, 3, 136), (8, 2, 100), (8, 4, 108)])
def test_states_of_one_step_join_wherever_the_groups_stand(lanes: int, groups: int, rows: int) -> None:
    states, got = steps(lanes, groups, rows)
    positions = {tuple(state["position"] for state in step) for step in states}
    assert any(len(set(places)) > 1 for places in positions)
    for n, step in enumerate(states):
        left = [batches[n:] for batches in got]
        for state in (lambda _, step=step: step, step.__getitem__):
            parts = [restored(state(number), lanes, groups, number, rows=rows) for number in range(groups)]
            assert [[*map(numbers, part)] for part in parts] == left
        for others in {1, 2, lanes, lanes + 1}:
            delivered = [
                numbers(b) for number in range(others) for b in restored(step, lanes, others, number, rows=rows)
            ]
            assert Counter(delivered) == Counter(batch for batches in left for batch in batches)


@pytest.mark.parametrize("uneven", ["keep", None])
def test_one_group_goes_on_in_global_order_and_its_checkpoints_hold_the_rest(uneven: str | None) -> None:
    whole = [numbers(batch) for batch in group(4, 1, 0)]
    states, got = steps(4, 2)
    for n, step in enumerate(states):
        left = {batch for batches in got for batch in batches[n:]}
        alone = restored(step, 4, 1, 0, uneven=uneven)
        iterator = iter(alone)
        rest = [batch for batch in whole if batch in left]
        for taken in range(len(rest) + 1):
            state = alone.checkpoint()
            assert [numbers(b) for b in restored(state, 4, 1, 0)] == rest[taken:]
            two = [numbers(b) for number in range(2) for b in restored(state, 4, 2, number)]
            assert Counter(two) == Counter(rest[taken:])
            assert [numbers(b) for b in islice(iterator, 1)] == rest[taken : taken + 1]


def test_every_way_of_joining_takes_them(tmp_path: Any) -> None:
    states, _ = steps(4, 2)
    for step in states:
        for ordered in (step, step[::-1]):
            joined = from_entries({name: entry for state in ordered for name, entry in to_entries(state).items()})
            leader = Aggregation(FolderBoard(str(tmp_path)), 0, 2, timeout_s=5)
            answers = {rank: {"world": 2, "state": state} for rank, state in enumerate(ordered)}
            for merged in (joined, leader._merge(answers)):
                for groups in (1, 2):
                    for number in range(groups):
                        expected = restored(step, 4, groups, number)
                        assert list(map(numbers, restored(merged, 4, groups, number))) == list(map(numbers, expected))


def test_a_resumed_rank_has_the_checkpoints_of_one_that_never_stopped() -> None:
    states, _ = steps(4, 2)
    for n in range(len(states) - 1):
        for number in range(2):
            pipeline = restored(states[n], 4, 2, number)
            iterator = iter(pipeline)
            for later in states[n:]:
                assert pipeline.checkpoint() == later[number]
                list(islice(iterator, 1))


def test_states_of_different_steps_are_still_refused() -> None:
    states, _ = steps(4, 2)
    for n, m in ((0, 1), (5, 7), (8, 9), (9, 8)):
        with pytest.raises(
            CheckpointError, match=r"position is \d+ and \d+; restore states that were saved at the same step"
        ):
            group(4, 2, 0).restore([states[n][0], states[m][1]])
        entries = {**to_entries(states[m][1]), **to_entries(states[n][0])}
        with pytest.raises(CheckpointError, match="different steps"):
            from_entries(entries)


def test_groups_that_share_lanes_say_why_their_states_cannot_join() -> None:
    states, got = steps(3, 2, 112)
    refused = 0
    for n, step in enumerate(states):
        for number in range(2):
            assert list(map(numbers, restored(step[number], 3, 2, number, rows=112))) == got[number][n:]
        try:
            delivered = [numbers(b) for number in range(2) for b in restored(step, 3, 2, number, rows=112)]
        except CheckpointError as error:
            refused += 1
            assert "about lane" in str(error) and "Restore each rank's own checkpoint" in str(error)
        else:
            assert Counter(delivered) == Counter(batch for batches in got for batch in batches[n:])
    assert refused


def test_groups_that_must_end_together_cannot_begin_apart() -> None:
    states, _ = steps(4, 2)
    apart = next(step for step in states if len({state["position"] for state in step}) > 1)
    for uneven in ("drop", "pad"):
        with pytest.raises(CheckpointError, match="continue with uneven='keep'"):
            iter(restored(apart, 4, 2, 0, uneven=uneven))

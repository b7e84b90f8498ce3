"""A rank shared out over loader workers, without the loader: the same batches in the same order, saved and resized at will."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.core.block import Ragged
from headrace.core.lanes import Topology
from headrace.core.part import PartState, first_batch, join, split
from headrace.errors import CheckpointError, ConfigError

LAW = settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))


def tokens(columns: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": Ragged.from_rows([np.arange(n % 9, dtype=np.int32) + 100 * n for n in columns["x"]])}


def build(lanes: int, groups: int = 1, group: int = 0, **source: Any) -> Pipeline:
    data = Dataset.from_dict("a", {i: InMemoryShard([{"x": 10 * i + k} for k in range(10)]) for i in range(7)})
    settings = {"chunk_size": 8, "stop_after_passes": None, **source}
    work = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"a": 1.0}), **settings)
    chain = Pipeline(work).map_block(tokens, reads=["x"]).shuffle(10).pack_flat(12, algorithm="wrap").batch(2)
    return chain.options(
        canonical_replicas=lanes,
        dp_degree=groups,
        dp_group_id=group,
        runner="inline",
        auto_validation="off",
        cut_every=16,
    )


def ids(batch: Any) -> Any:
    return [np.asarray(record.payload["input_ids"]).tolist() for record in batch.records]


def through_workers(make: Any, state: Any, workers: int, count: int) -> tuple[list[Any], Any]:
    """What a loader with `workers` workers receives from here, and the rank's checkpoint after it."""
    base = make()
    if state is not None:
        base.restore(state)
    topology, start = base.topology, base.starts_at
    parts = [(worker + first_batch(start, topology)) % workers for worker in range(workers)]
    pipelines = [base.part(part, workers) for part in parts]
    iterators = [iter(pipeline) for pipeline in pipelines]
    got = [ids(next(iterators[i % workers])) for i in range(count)]
    states = [PartState(p, workers, start, pipe.checkpoint()) for p, pipe in zip(parts, pipelines, strict=True)]
    for iterator in iterators:
        iterator.close()
    return got, join(states, topology)


@LAW
@given(
    st.integers(1, 8),
    st.integers(1, 4).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d - 1))),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4),
)
def test_any_sequence_of_worker_counts_gives_the_ranks_own_stream(
    lanes: int, place: tuple[int, int], legs: list[tuple[int, int]]
) -> None:
    groups, group = place
    alone = iter(build(lanes, groups, group))
    expected = [ids(batch) for batch in islice(alone, sum(count for _, count in legs))]
    alone.close()
    got: list[Any] = []
    state: Any = None
    for workers, count in legs:
        more, state = through_workers(lambda: build(lanes, groups, group), state, workers, count)
        got += more
    assert got == expected


@LAW
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.integers(1, 4), st.integers(1, 3))
def test_ranks_with_workers_resize_to_other_ranks(
    lanes: int, before: int, workers: int, steps: int, after: int, further: int
) -> None:
    alone = iter(build(lanes))
    expected = [ids(batch) for batch in islice(alone, before * steps + after * further)]
    alone.close()
    states = [
        through_workers(lambda g=group: build(lanes, before, g), None, workers, steps)[1] for group in range(before)
    ]
    got: dict[int, Any] = {}
    position = before * steps
    for group in range(after):
        more, _ = through_workers(lambda g=group: build(lanes, after, g), states, workers, further)
        for step, batch in enumerate(more):
            got[position + step * after + (group - position) % after] = batch
    assert [got[j] for j in sorted(got)] == expected[position:]


@LAW
@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 60))
def test_at_the_end_of_finite_data_nothing_is_lost_or_doubled(lanes: int, workers: int, taken: int) -> None:
    """Where lanes end apart, the last batches may come in another order than without workers; the set is the same."""
    finite = {"stop_after_passes": 2}
    expected = sorted(map(str, (ids(batch) for batch in build(lanes, **finite))))
    got = []
    for part in range(workers):
        got += [str(ids(batch)) for batch in build(lanes, **finite).part(part, workers)]
    assert sorted(got) == expected


def test_a_split_topology_is_a_finer_one_with_the_positions_of_the_whole() -> None:
    place = split(Topology(12, 2, 1), 2, 3)
    assert (place.groups, place.group, place.rank_groups) == (6, 5, 2)
    mine = [j for j, turn in zip(range(5, 24, 6), place.turns(0), strict=False) if turn.mine]
    assert mine == [5, 11, 17, 23][: len(mine)]
    turn = next(turn for turn in place.turns(0) if turn.mine)
    assert place.number(turn) == 5 and place.after(0, turn) == 6
    with pytest.raises(ConfigError, match="num_workers=0"):
        split(Topology(4, 2, 0, "contiguous"), 0, 2)


def test_states_that_do_not_make_up_a_rank_are_refused() -> None:
    state = build(4).checkpoint()
    with pytest.raises(CheckpointError, match=r"parts \[0, 0\] of 2"):
        join([PartState(0, 2, 0, state), PartState(0, 2, 0, state)], Topology(4))
    torn = {**state, "position": 5}
    with pytest.raises(CheckpointError, match="no longer take turns"):
        join([PartState(0, 2, 0, torn), PartState(1, 2, 0, state)], Topology(3))

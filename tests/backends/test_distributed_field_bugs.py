"""Reports of the field about ranks, kept as tests: overlapping shards, uneven splits, work done N times, saves to be joined."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource, verify
from headrace.errors import CheckpointError, ConfigError


def build(rows: list[int], seen: list[int] | None = None, **options: Any) -> Pipeline:
    """Shards of these sizes, with all seeds at their defaults; `seen` collects what a rank's map function is called with."""
    firsts = [sum(rows[:i]) for i in range(len(rows))]
    shards = {
        i: InMemoryShard([{"x": first + k} for k in range(n)])
        for i, (first, n) in enumerate(zip(firsts, rows, strict=True))
    }
    source = {"chunk_size": 16, "shuffle_within_shard": True, **options.pop("source", {})}
    work = StaticMixtureWorkSource(datasets=[Dataset.from_dict("a", shards)], mixture=MixtureSpec({"a": 1.0}), **source)
    pipeline = Pipeline(work).options(runner="inline", auto_validation="off", prefetch_batches=1, **options)
    if seen is not None:

        def note(columns: dict[str, Any]) -> dict[str, Any]:
            seen.extend(list(columns["x"]))
            return columns

        pipeline.map_block(note, reads=["x"])
    return pipeline.batch(2)


def values(batches: Any) -> list[int]:
    return [record.payload["x"] for batch in batches for record in batch.records]


def test_ranks_with_default_seeds_share_one_permutation() -> None:
    """One pass: nothing twice, nothing left out, whoever reads it."""
    for world in (1, 2, 4):
        got: list[int] = []
        for rank in range(world):
            options = {"canonical_replicas": 4, "world_size": world, "global_rank": rank}
            iterator = iter(build([20] * 8, source={"stop_after_passes": None}, **options))
            got += values(islice(iterator, 64 // world))
            iterator.close()
        if world == 1:
            alone = got
        assert sorted(got) == sorted(alone) and len(set(got)) == len(got) == 128


@pytest.mark.parametrize("shards", [1, 3, 7, 64, 63])
def test_rows_are_what_is_split_not_files(shards: int) -> None:
    """Every rank has its share, from one shard as from many, and together they read each row once."""
    rows = [768 // shards + (i < 768 % shards) for i in range(shards)]
    counts: list[int] = []
    everything: list[int] = []
    for rank in range(8):
        iterator = iter(
            build(rows, source={"stop_after_passes": None}, canonical_replicas=8, world_size=8, global_rank=rank)
        )
        got = values(islice(iterator, 40))
        iterator.close()
        counts.append(len(got))
        everything += got
    assert counts == [80] * 8
    assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("shards", [64, 63])
def test_a_rank_does_its_own_share_of_the_work(shards: int) -> None:
    """Records that a rank's function sees, over those that it delivers, do not grow with the number of ranks."""
    rows = [32] * shards
    for world in (1, 8):
        seen: list[int] = []
        options = {"canonical_replicas": 8, "world_size": world, "global_rank": world - 1, "micro_batch": 16}
        iterator = iter(build(rows, seen, source={"stop_after_passes": None}, **options))
        got = values(islice(iterator, 512 // world // 2))
        iterator.close()
        assert len(seen) <= len(got) + 8 * 16, (world, len(seen), len(got))


def test_a_bad_fit_names_its_factor() -> None:
    text = build(
        [32] * 8, canonical_replicas=8, dp_degree=3, dp_group_id=0, source={"stop_after_passes": None}
    ).explain()
    assert "3 groups do not divide 8 lanes" in text and "3.0 times" in text


def test_one_rank_saves_alone_and_the_others_later() -> None:
    """No call waits for another rank; states that were taken at different steps are refused together, not mixed."""

    def run(rank: int, steps: int) -> Any:
        pipeline = build(
            [40] * 4, source={"stop_after_passes": None}, canonical_replicas=4, world_size=2, global_rank=rank
        )
        iterator = iter(pipeline)
        list(islice(iterator, steps))
        state = pipeline.checkpoint()
        iterator.close()
        return state

    first, second, late = run(0, 3), run(1, 3), run(1, 4)
    fresh = build([40] * 4, source={"stop_after_passes": None}, canonical_replicas=4)
    with pytest.raises(CheckpointError, match=r"lanes \[1, 3\] are in none"):
        fresh.restore(first)
    with pytest.raises(CheckpointError, match="position is 6 and 8"):
        fresh.restore([first, late])
    fresh.restore([second, first])
    assert fresh.starts_at == 6


def test_growing_beyond_the_first_run_is_no_dead_end() -> None:
    """Lanes default to the first run's groups; more groups than lanes still resume, exactly, at a cost that is said."""
    options = {"source": {"stop_after_passes": None}}
    alone = iter(build([40] * 8, canonical_replicas=4, **options))
    expected = [values([batch]) for batch in islice(alone, 8 + 16)]
    alone.close()
    states = []
    for rank in range(4):
        pipeline = build([40] * 8, world_size=4, global_rank=rank, **options)
        iterator = iter(pipeline)
        list(islice(iterator, 2))
        states.append(pipeline.checkpoint())
        iterator.close()
    got: dict[int, Any] = {}
    for rank in range(8):
        pipeline = build([40] * 8, world_size=8, global_rank=rank, **options)
        pipeline.restore(states)
        assert "each group computes 2.0 times what it delivers" in pipeline.explain()
        iterator = iter(pipeline)
        for step, batch in enumerate(islice(iterator, 2)):
            got[8 + 8 * step + rank] = values([batch])
        iterator.close()
    assert [got[j] for j in range(8, 24)] == expected[8:]


def test_peers_are_checked_by_their_digests(tmp_path: Path) -> None:
    """Tensor-parallel peers have one place and one stream; a peer that is placed wrongly is found in its first batch."""

    def log(name: str, group: int) -> str:
        path = str(tmp_path / name)
        options = {"dp_degree": 2, "dp_group_id": group, "canonical_replicas": 4, "digest": True, "digest_log": path}
        iterator = iter(build([40] * 4, source={"stop_after_passes": None}, **options))
        list(islice(iterator, 10))
        iterator.close()
        return path

    first, peer, wrong = log("0", 0), log("1", 0), log("2", 1)
    assert verify.diff(first, peer) is None
    assert verify.summary([first, peer]) == verify.summary(first)
    assert verify.summary(first) != verify.summary(wrong)
    assert verify.summary([first, wrong]).batches == 20


def test_the_listing_order_of_lanes_and_states_does_not_matter() -> None:
    states = []
    for rank in range(3):
        pipeline = build(
            [40] * 4, source={"stop_after_passes": None}, canonical_replicas=6, world_size=3, global_rank=rank
        )
        states.append(pipeline.state_dict())
    merged = {name: entry for state in reversed(states) for name, entry in reversed(state.items())}
    fresh = build([40] * 4, source={"stop_after_passes": None}, canonical_replicas=6)
    fresh.load_state_dict(merged)
    assert Counter(fresh.state_dict()) == Counter(merged)


def test_identities_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks count from 0"):
        build([4], world_size=2, global_rank=2)
    with pytest.raises(ConfigError, match="groups count from 0"):
        build([4], dp_degree=2, dp_group_id=2)
    with pytest.raises(ConfigError, match="no rank would be left"):
        build([4], world_size=2, global_rank=0, dp_degree=4, dp_group_id=0)


@pytest.mark.parametrize("rank", [3, 5])
def test_ranks_that_share_groups_must_say_which(rank: int) -> None:
    message = f"dp_degree=4 with world_size=8: .* rank {rank} belongs to: dp_group_id=..., 0 to 3"
    with pytest.raises(ConfigError, match=message):
        build([4], world_size=8, global_rank=rank, dp_degree=4)

"""What goes wrong in the field with several ranks, tried on whole pipelines: each row once, peers alike, nobody waits."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from headrace.verify import summary


def source(shards: int = 7, rows: int = 12, **settings: Any) -> StaticMixtureWorkSource:
    data = {s: InMemoryShard([{"x": s * rows + i} for i in range(rows)]) for s in range(shards)}
    return StaticMixtureWorkSource([Dataset.from_dict("d", data)], {"d": 1}, **{"chunk_size": 5, **settings})


def rank(world: int, number: int, work: StaticMixtureWorkSource | None = None, **options: Any) -> Pipeline:
    pipeline = Pipeline(source() if work is None else work).shuffle(6).batch(2, drop_last=False)
    return pipeline.options(world_size=world, global_rank=number, uneven="keep", **options)


def values(items: Any) -> list[int]:
    return [record.payload["x"] for batch in items for record in batch.records]


def test_b082_ranks_split_one_order_whatever_the_seed() -> None:
    for settings in ({}, {"seed": 5}, {"shuffle_within_shard": True, "shuffle_block_size": "global"}):
        seen = [values(rank(4, number, source(**settings))) for number in range(4)]
        assert sorted(x for one in seen for x in one) == list(range(84))
        assert len({tuple(one) for one in seen}) == 4


def test_b083_peers_of_a_group_see_the_same_and_no_global_randomness_is_touched(tmp_path: Path) -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist())
    logs: list[str] = []
    for number in range(4):
        log = str(tmp_path / "{rank}.log")
        pipeline = rank(4, number, dp_degree=2, dp_group_id=number // 2, digest=True, digest_log=log)
        list(pipeline)
        logs.append(summary(tmp_path / f"{number}.log").digest)
    assert logs[0] == logs[1] != logs[2] == logs[3]
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("shards", [1, 3, 7, 33])
def test_b086_rows_and_not_files_are_shared_out(shards: int) -> None:
    seen = [values(rank(4, number, source(shards, 12, chunk_size=1))) for number in range(4)]
    assert sorted(x for one in seen for x in one) == list(range(12 * shards))
    assert max(map(len, seen)) - min(map(len, seen)) <= 1


@pytest.mark.parametrize("shards", [64, 63])
def test_b087_a_rank_reads_its_own_share_only(shards: int) -> None:
    calls: Counter[int] = Counter()

    def count(payload: dict[str, Any]) -> dict[str, Any]:
        calls[payload["x"]] += 1
        return payload

    work = source(shards, 8, chunk_size=4)
    pipeline = Pipeline(work).map_transform(count).batch(4, drop_last=False).options(auto_validation="off")
    delivered = values(pipeline.options(world_size=8, global_rank=3, uneven="keep", runner="inline"))
    assert abs(len(delivered) - shards) <= 4  # a chunk more or less
    assert set(calls) == set(delivered) and set(calls.values()) == {1}
    costly = rank(8, 3, work, canonical_replicas=12).explain()
    assert "8 groups do not divide 12 lanes: each group computes 2.0 times what it delivers" in costly


@pytest.mark.parametrize("parts", [1, 2, 16])
@pytest.mark.parametrize("world", [1, 2])
def test_b089_an_epoch_has_one_length(parts: int, world: int) -> None:
    seen: list[int] = []
    for number in range(world):
        pipeline = rank(world, number)
        for _ in range(2):  # and again, from the beginning
            one = [x for part in range(parts) for x in values(pipeline.part(part, parts))]
        seen += one
    assert sorted(seen) == list(range(84))


def test_b090_a_rank_saves_alone_and_any_number_of_ranks_goes_on() -> None:
    states, seen = [], []
    for number in range(4):
        pipeline = rank(4, number)
        seen += values(islice(running := iter(pipeline), 3))
        states.append(pipeline.checkpoint())  # no other rank takes part, or is there
        running.close()
    for number in range(2):
        pipeline = rank(2, number, canonical_replicas=4)
        pipeline.restore(states)
        seen += values(pipeline)
    assert sorted(seen) == list(range(84))


@pytest.mark.parametrize("group", [100, 4000])
def test_b024_memory_of_reading_parquet_does_not_grow(tmp_path: Path, group: int) -> None:
    text = pa.array([f"{i:06d}" * 200 for i in range(8000)])
    for shard in range(3):
        pq.write_table(pa.table({"text": text}), tmp_path / f"{shard}.parquet", row_group_size=group)
    work = StaticMixtureWorkSource([Dataset.from_path("d", tmp_path)], {"d": 1}, chunk_size=500)
    del text
    held = []
    for number, _ in enumerate(Pipeline(work).batch(50).options(runner="inline", cut_every=500)):
        if number % 20 == 10:
            held.append(pa.total_allocated_bytes())
    one_group = group * 1200
    assert len(held) == 24 and max(held) <= 4 * one_group + (4 << 20)
    assert max(held[12:]) <= max(held[:12]) + one_group

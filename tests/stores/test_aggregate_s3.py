"""The collective checkpoint over a real S3 server, through the pipeline's own options."""

from __future__ import annotations

import threading
from itertools import islice
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource

pytestmark = pytest.mark.slow


def test_ranks_gather_on_a_prefix(bucket: S3Store) -> None:
    folder = f"s3://{bucket.config['bucket']}/checkpoints"
    results: list[Any] = [None] * 3

    def rank(number: int) -> None:
        data = Dataset.from_dict("a", {0: InMemoryShard([{"x": i} for i in range(60)])})
        work = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"a": 1.0}), stop_after_passes=None)
        identity = {"world_size": 3, "global_rank": number, "canonical_replicas": 6}
        pipeline = (
            Pipeline(work).batch(2).options(runner="inline", aggregate_dir=folder, aggregate_timeout_s=60.0, **identity)
        )
        iterator = iter(pipeline)
        states = []
        for _ in range(2):
            list(islice(iterator, 2))
            states.append(pipeline.checkpoint())
        iterator.close()
        results[number] = states

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results[0] is not None and results[0] == results[1] == results[2]
    assert [state["position"] for state in results[0]] == [6, 12] and len(results[0][1]["lanes"]) == 6
    left = [meta["path"].rpartition("/")[2] for batch in obstore.list(bucket, "checkpoints/") for meta in batch]
    assert sorted(left) == ["call", "merged", "rank-1", "rank-2"]

"""`prefetch_bytes` bounds what waits, whatever the payload is."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from headrace import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.io import InMemoryShard

MIB = 1 << 20


def source(count: int) -> StaticMixtureWorkSource:
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"x": i} for i in range(count)])})
    return StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"toy": 1.0}), chunk_size=512)


def of_bytes(row: dict[str, Any]) -> dict[str, Any]:
    return {"t": bytes(MIB)}


def of_arrays(row: dict[str, Any]) -> dict[str, Any]:
    return {"parts": [np.zeros(MIB // 2, np.uint8), np.zeros(MIB // 2, np.uint8)]}


def to_items(batch: Any) -> Any:
    return {"images": [bytes(MIB) for _ in range(len(batch))]}


@pytest.mark.parametrize("payload", ["bytes", "arrays", "items"])
def test_at_most_half_the_bound_waits_and_a_batch(payload: str) -> None:
    """Batches of 4 MiB, and half of 16 MiB for the buffer: two wait."""
    pipeline = Pipeline(source(400))
    if payload == "items":
        pipeline.batch(4).map_batch(to_items)
    else:
        pipeline.map_transform(of_bytes if payload == "bytes" else of_arrays).batch(4)
    pipeline.options(prefetch_bytes=16 * MIB, micro_batch=4, runner="threads", auto_validation="off")
    iterator: Any = iter(pipeline)
    next(iterator)
    engine = iterator.consumer.producer
    before, most, until = -1, 0, time.monotonic() + 10
    while before != engine.buffer.full_ns or len(engine.buffer) < 2:  # until nothing moves any more
        before, most = engine.buffer.full_ns, max(most, len(engine.buffer))
        assert time.monotonic() < until
        time.sleep(0.3)
    assert max(most, len(engine.buffer)) == 2
    iterator.close()

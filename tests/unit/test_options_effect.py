"""Every option does something, or says that it does not."""

from __future__ import annotations

import ast
import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.options import _WITHOUT_EFFECT, RuntimeOptions

SOURCES = Path(headrace.__file__).parent


def attributes_read() -> set[str]:
    """Names that the library reads as attributes; of options.py itself, only what its properties read."""
    found: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        tree: Any = ast.parse(path.read_text(encoding="utf-8"))
        parts = [tree]
        if path == SOURCES / "options.py":
            parts = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.decorator_list]
        found |= {n.attr for part in parts for n in ast.walk(part) if isinstance(n, ast.Attribute)}
    return found


def test_an_option_is_read_somewhere_or_listed_as_without_effect() -> None:
    read, names = attributes_read(), {field.name for field in fields(RuntimeOptions)}
    assert names - read - _WITHOUT_EFFECT == {"metrics_sink_config"}, "which is refused"
    assert not _WITHOUT_EFFECT & read and names >= _WITHOUT_EFFECT
    listed = (RuntimeOptions.__doc__ or "").partition("without effect")[2]
    assert all(name in listed for name in _WITHOUT_EFFECT)


def source(rows: int) -> StaticMixtureWorkSource:
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"x": np.full(40_000, k, np.int32)} for k in range(rows)])})
    return StaticMixtureWorkSource([data], MixtureSpec({"toy": 1.0}))


def toy(rows: int) -> Pipeline:
    return Pipeline(source(rows)).batch(4)


def test_what_has_no_effect_is_said_once_where_it_is_set(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = toy(4)
    with caplog.at_level(logging.INFO, logger="headrace"):
        pipeline.options(op_queue_capacity=None, shutdown_mode="graceful", mtp_auto_checkpoint=True)
        assert not caplog.messages
        pipeline.options(op_queue_capacity=3, runner="inline", ipc_transport="pipe")
        assert caplog.messages == ["accepted, and without effect: options(op_queue_capacity=3, ipc_transport='pipe')"]
        list(pipeline.options(micro_batch=3))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("mode", [{"mtp_mode": True}, {"runner": "process", "max_workers": 1}])
def test_arrays_go_through_shared_memory_unless_that_is_switched_off(mode: dict[str, Any], enabled: bool) -> None:
    pipeline = Pipeline(source(16)).map_transform(dict).batch(4)
    iterator: Any = iter(pipeline.options(shm_enabled=enabled, prefetch_batches=1, **mode))
    first = next(iterator)
    producer = iterator.consumer.producer
    executor = producer._executor if "mtp_mode" in mode else producer._pools._executors[1]
    assert [child.arena.pages > 0 for child in executor._children] == [enabled]
    assert [int(record.payload["x"][-1]) for b in (first, *iterator) for record in b.records] == list(range(16))
    pipeline.close()


def with_pid(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": int(row["x"][0]), "pid": os.getpid()}


def pid_of_batch(batch: Any) -> tuple[list[Any], int]:
    return [(record.payload["x"], record.payload["pid"]) for record in batch.records], os.getpid()


def test_stages_run_in_processes_where_they_are_asked_to() -> None:
    chain = Pipeline(source(16)).map_transform(with_pid).batch(4).map_batch(pid_of_batch)
    chain.options(runner="threads", per_stage_runner={0: "process", 2: "process"}, max_workers=2)
    shown = chain.explain()
    assert "Stage[0] runner=process workers=1 ops=['fetch@p1', 'map_transform@p1']" in shown
    assert "Stage[2] runner=process workers=1 ops=['map_batch@p1']" in shown
    batches: list[Any] = list(chain)
    assert [x for rows, _ in batches for x, _ in rows] == list(range(16))
    pids = {pid for rows, of_batch in batches for pid in (of_batch, *(p for _, p in rows))}
    assert len(pids) == 2 and os.getpid() not in pids


def test_the_buffer_of_the_engine_s_process_has_the_size_asked_for() -> None:
    for options, capacity in (({"mtp_buffer": 3}, 3), ({"prefetch_batches": 5}, 5), ({"mtp_buffer_bytes": 1}, None)):
        pipeline = toy(32).options(mtp_mode=True, runner="threads", **options)
        assert len(list(pipeline)) == 8
        stats = pipeline.mtp_queue_stats()
        assert stats is not None and stats.capacity == (capacity or pipeline.plan().prefetch)

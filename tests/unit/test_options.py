"""Options are checked where they are born."""

import multiprocessing
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigError, UnknownOptionError
from headrace.options import RuntimeOptions


def test_an_unknown_name_says_the_nearest() -> None:
    with pytest.raises(TypeError, match="'canonical_replica'; did you mean 'canonical_replicas'"):
        RuntimeOptions().updated(canonical_replica=4)
    with pytest.raises(UnknownOptionError, match="unknown option 'sede'"):
        RuntimeOptions().updated(sede=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("runner", "thread"),
        ("max_workers", 0),
        ("max_workers", True),
        ("prefetch_batches", -1),
        ("deterministic", "yes"),
        ("flush_every_k_chunks", -2),
        ("on_error", "ignore"),
        ("per_stage_runner", {0: "fork"}),
        ("mapping_strategy", "random"),
        ("aggregate_timeout_s", 0.0),
        ("on_error", "quarantine"),
        ("global_rank", 1),
        ("dp_group_id", 3),
    ],
)
def test_a_value_that_cannot_work_names_option_and_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name.split("[")[0]):
        RuntimeOptions().updated(**{name: value})


FREE = {"mixture_config", "io_options", "execution_tracking"}
OPTIONS = [field.name for field in fields(RuntimeOptions) if field.name not in FREE]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("value", [object(), [], {"a": 1}, b"", "", 2.5, float("nan"), -1, np.array([1, 2])])
def test_no_option_takes_a_value_of_another_kind(name: str, value: object) -> None:
    if name == "aggregate_timeout_s" and isinstance(value, float) and value > 0:
        return
    with pytest.raises(ConfigError, match=f"option {name}"):
        RuntimeOptions().updated(**{name: value})


@pytest.mark.parametrize("value", [{0: 2.5}, {0: True}, {0: 0}, {"a": 1}, {-1: 1}, {0: None}])
@pytest.mark.parametrize("name", ["per_stage_prefetch", "per_stage_runner"])
def test_options_of_stages_are_checked_one_by_one(name: str, value: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError, match=f"option {name}"):
        RuntimeOptions().updated(**{name: value})


def test_numpy_integers_and_paths_are_made_plain() -> None:
    options = RuntimeOptions(
        micro_batch=np.int32(7),  # type: ignore[arg-type]
        flush_every_k_chunks=np.int64(3),  # type: ignore[arg-type]
        per_stage_prefetch={np.int64(1): np.int64(2)},  # type: ignore[dict-item]
        aggregate_dir=Path("/a/b"),  # type: ignore[arg-type]
        quarantine_path=Path("bad.jsonl"),  # type: ignore[arg-type]
    )
    assert type(options.micro_batch) is int and type(options.flush_every_k_chunks) is int
    assert options.per_stage_prefetch == {1: 2} and [type(v) for v in options.per_stage_prefetch.values()] == [int]
    assert (options.aggregate_dir, options.quarantine_path) == ("/a/b", "bad.jsonl")


def test_topology_defaults_follow_the_ranks() -> None:
    options = RuntimeOptions(world_size=4, global_rank=3)
    assert (options.groups, options.group, options.lanes) == (4, 3, 4)
    options = RuntimeOptions(world_size=4, global_rank=3, dp_degree=2, dp_group_id=1, canonical_replicas=8)
    assert (options.groups, options.group, options.lanes) == (2, 1, 8)


def test_fork_is_refused() -> None:
    for fork in ("fork", multiprocessing.get_context("fork")):
        with pytest.raises(ConfigError, match="option mp_context='fork': forking a process that has threads deadlocks"):
            RuntimeOptions(mp_context=fork)
    with pytest.raises(ConfigError, match="option mp_context='forks': choose one of"):
        RuntimeOptions(mp_context="forks")
    assert RuntimeOptions().start_method == "forkserver"
    assert RuntimeOptions(mp_context=multiprocessing.get_context("spawn")).start_method == "spawn"

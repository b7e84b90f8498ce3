"""Options are checked where they are born."""

import pytest

from headrace.errors import ConfigError, UnknownOptionError
from headrace.options import RuntimeOptions, start_context


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


def test_topology_defaults_follow_the_ranks() -> None:
    options = RuntimeOptions(world_size=4, global_rank=3)
    assert (options.groups, options.group, options.lanes) == (4, 3, 4)
    options = RuntimeOptions(world_size=4, global_rank=3, dp_degree=2, dp_group_id=1, canonical_replicas=8)
    assert (options.groups, options.group, options.lanes) == (2, 1, 8)


def test_fork_is_refused() -> None:
    with pytest.raises(ConfigError, match="fork"):
        start_context(RuntimeOptions(mp_context="fork"))
    assert start_context(RuntimeOptions()).get_start_method() == "spawn"

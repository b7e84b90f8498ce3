"""Identity from a device mesh: the same data for peers, other data for other groups, on every layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.errors import ConfigError
from headrace.integrations import options_from_mesh
from headrace.options import RuntimeOptions


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """A process group in which nothing is ever sent."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def places(shape: tuple[int, ...], names: tuple[str, ...], dp: Any) -> list[tuple[int, int]]:
    world = 1
    for size in shape:
        world *= size
    found = []
    for rank in range(world):
        with rank_of(rank, world):
            options = options_from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names), dp)
            assert (options["world_size"], options["global_rank"]) == (world, rank)
            RuntimeOptions(**options)  # fits
            found.append((options["dp_degree"], options["dp_group_id"]))
    return found


def test_replicas_times_shards_and_peers_share() -> None:
    found = places((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), ("dp_replicate", "dp_shard"))
    assert found == [(4, 0), (4, 0), (4, 1), (4, 1), (4, 2), (4, 2), (4, 3), (4, 3)]


def test_one_name_and_any_place_in_the_mesh() -> None:
    assert places((2, 3), ("pp", "dp"), "dp") == [(3, 0), (3, 1), (3, 2)] * 2
    assert places((2, 2), ("tp", "dp"), ["dp"]) == [(2, 0), (2, 1), (2, 0), (2, 1)]


def test_flattened_dimensions() -> None:
    with rank_of(5, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        flat = mesh["dp_replicate", "dp_shard"]._flatten("dp")
        assert options_from_mesh(flat, "dp") == options_from_mesh(mesh)


def test_names_that_are_not_there() -> None:
    with rank_of(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
        with pytest.raises(ConfigError, match="no dimension 'dp_replicate'; it has 'data', 'tp'"):
            options_from_mesh(mesh)
        with pytest.raises(ConfigError, match="at least one"):
            options_from_mesh(mesh, ())
        with pytest.raises(ConfigError, match="give mesh_dim_names"):
            options_from_mesh(init_device_mesh("cpu", (4,)), "dp")

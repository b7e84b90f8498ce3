"""A rank's place in a run from a torch `DeviceMesh`.

    mesh = init_device_mesh("cuda", (2, 4, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    pipeline.options(**options_from_mesh(mesh, dp=("dp_replicate", "dp_shard")), canonical_replicas=64)

Ranks that differ only in the other dimensions (tensor, pipeline, context parallel) have the same place and receive the same
batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from headrace.errors import ConfigError


def options_from_mesh(mesh: Any, dp: str | Sequence[str] = ("dp_replicate", "dp_shard")) -> dict[str, int]:
    """`world_size`, `global_rank`, `dp_degree` and `dp_group_id` for `Pipeline.options()`.

    `dp` names the dimensions over which data differs, the slowest first. Several count as one: replica index times shards plus
    shard index. `mesh` may also be a part of the whole mesh, flattened or not. Nothing is sent between ranks.
    """
    names = (dp,) if isinstance(dp, str) else tuple(dp)
    if not names:
        raise ConfigError("options_from_mesh(dp=()): name at least one dimension of the mesh")
    known = mesh.mesh_dim_names or ()
    degree, group = 1, 0
    for name in names:
        try:
            dimension = mesh[name]
        except (KeyError, RuntimeError) as error:
            raise ConfigError(
                f"the mesh has no dimension {name!r}; it has {', '.join(map(repr, known)) or 'no names (give mesh_dim_names)'}"
            ) from error
        degree, group = degree * dimension.size(), group * dimension.size() + dimension.get_local_rank()
    return {
        "world_size": dist.get_world_size(),
        "global_rank": dist.get_rank(),
        "dp_degree": degree,
        "dp_group_id": group,
    }

"""Data pipelines on six real ranks: sharded checkpoints that reshard, collective ones, peers of a mesh, digests.

Usage: torchrun --nproc-per-node=6 dist_checkpoint.py OUT
"""

from __future__ import annotations

import json
import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource, verify
from headrace.core.block import Ragged
from headrace.errors import CheckpointError
from headrace.integrations import options_from_mesh

LANES = 12
STEPS = 5


def tokens(columns: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": Ragged.from_rows([np.arange(n % 9, dtype=np.int32) + 100 * n for n in columns["x"]])}


def build(**options: Any) -> Pipeline:
    data = [
        Dataset.from_dict(name, {i: InMemoryShard([{"x": base + 10 * i + k} for k in range(10)]) for i in range(5)})
        for name, base in (("a", 0), ("b", 500))
    ]
    mixture = MixtureSpec({"a": 0.7, "b": 0.3})
    work = StaticMixtureWorkSource(datasets=data, mixture=mixture, chunk_size=8, stop_after_passes=None)
    chain = Pipeline(work).map_block(tokens, reads=["x"]).shuffle(10).pack_flat(12, algorithm="wrap").batch(2)
    settings = {"canonical_replicas": LANES, "auto_validation": "off", "runner": "inline", "cut_every": 16}
    return chain.options(**{**settings, **options})


def ids(batch: Any) -> Any:
    return [np.asarray(record.payload["input_ids"]).tolist() for record in batch.records]


def take(pipeline: Pipeline, count: int) -> list[Any]:
    """The next batches; the pipeline stands after them."""
    iterator = iter(pipeline)
    got = [ids(batch) for batch in islice(iterator, count)]
    iterator.close()
    return got


def global_stream(per_rank: list[Any], position: int) -> list[Any]:
    """Batches of ranks, put together as the global stream from `position` on."""
    groups = len(per_rank)
    placed = {
        position + step * groups + (group - position) % groups: batch
        for group, batches in enumerate(per_rank)
        for step, batch in enumerate(batches)
    }
    return [placed[j] for j in sorted(placed)]


def gather(value: Any, group: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out


def reshard(rank: int, groups: dict[int, Any], out: Path, expected: list[Any]) -> dict[str, bool]:
    """Save on 4 ranks with torch.distributed.checkpoint, beside a tensor; load on 1, 2, 3 and 6."""
    found: dict[str, bool] = {}
    path = str(out / "dcp")
    if rank < 4:
        pipeline = build(world_size=4, global_rank=rank)
        stream = global_stream(gather(take(pipeline, STEPS), groups[4]), 0)
        dcp.save({"model": torch.arange(3), "data": pipeline}, checkpoint_id=path, process_group=groups[4])
        found["before"] = stream == expected[: 4 * STEPS]
    dist.barrier()
    for world in (1, 2, 3, 6):
        if rank < world:
            pipeline = build(world_size=world, global_rank=rank)
            model = torch.zeros(3, dtype=torch.int64)
            dcp.load({"model": model, "data": pipeline}, checkpoint_id=path, process_group=groups[world])
            position = pipeline.checkpoint()["position"]
            stream = global_stream(gather(take(pipeline, 3), groups[world]), position)
            exact = stream == expected[position : position + 3 * world]
            found[f"on {world}"] = exact and position == 4 * STEPS and model.tolist() == [0, 1, 2]
        dist.barrier()
    return found


def plain_entries(rank: int, group: Any, out: Path, expected: list[Any]) -> dict[str, bool]:
    """The entries themselves in the state: `dcp.load` fills the dict in place, each rank asking for its own lanes."""
    path = str(out / "entries")
    pipeline = build(world_size=6, global_rank=rank)
    take(pipeline, 2)
    dcp.save(pipeline.state_dict(), checkpoint_id=path)
    dist.barrier()
    half = build(world_size=6, global_rank=rank, dp_degree=3, dp_group_id=rank % 3)
    wanted = half.state_dict()
    names = sorted(wanted)
    dcp.load(wanted, checkpoint_id=path)
    half.load_state_dict(wanted)
    stream = global_stream(gather(take(half, 2), group)[:3], 12)
    return {"in place": sorted(wanted) == names and len(names) == 5 and stream == expected[12:18]}


def lanes_asked_wrongly(rank: int, out: Path) -> dict[str, bool]:
    """Without `canonical_replicas` a smaller run asks for lanes that are others: refused with the setting to use."""
    pipeline = build(world_size=2, global_rank=rank % 2, canonical_replicas=None)
    try:
        dcp.load({"data": pipeline}, checkpoint_id=str(out / "dcp"))
    except CheckpointError as error:
        return {"lanes": "canonical_replicas=12" in str(error)}
    return {"lanes": False}


def torn(rank: int, out: Path) -> dict[str, bool]:
    """Ranks that save at different steps: the store keeps what it is given; who needs a lane of the other step refuses it."""
    pipeline = build(world_size=6, global_rank=rank)
    take(pipeline, 1 + (rank == 4))
    dcp.save({"data": pipeline}, checkpoint_id=str(out / "torn"))
    dist.barrier()
    alone = build(world_size=2, global_rank=rank % 2)
    try:
        dcp.load({"data": alone}, checkpoint_id=str(out / "torn"))
    except CheckpointError as error:
        return {"torn": rank % 2 == 0 and "at different steps" in str(error)}  # lanes 4 and 10 are of the other step
    return {"torn": rank % 2 == 1}


def collective(rank: int, world: int, out: Path) -> dict[str, bool]:
    """The documented collective, over a folder and over the launcher's store: the same merged state everywhere, in both."""
    states = []
    for where in ({"aggregate_dir": str(out / "shared")}, {"aggregate_store": "torch://"}):
        pipeline = build(world_size=world, global_rank=rank, run_id="six", aggregate_timeout_s=60.0, **where)
        iterator = iter(pipeline)
        for _ in islice(iterator, 2):
            pass
        first = pipeline.checkpoint()
        for _ in islice(iterator, 1):
            pass
        states.append((first, pipeline.checkpoint()))
        iterator.close()
    everyone = gather(states, None)
    same = all(state == everyone[0] for state in everyone) and states[0] == states[1]
    return {"collective": same and len(states[0][1]["lanes"]) == LANES and states[0][1]["position"] == 18}


def mesh_peers(rank: int, out: Path, expected: list[Any]) -> dict[str, bool]:
    """A mesh of 3 data groups by 2 tensor peers: equal batches and digests among peers, another stream between groups."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    place = options_from_mesh(mesh, "dp")
    log = str(out / "mesh-{rank}.jsonl")
    pipeline = build(**place, digest=True, digest_log=log)
    batches = gather(take(pipeline, 4), None)
    peers = [batches[2 * g] == batches[2 * g + 1] for g in range(3)]
    stream = global_stream(batches[::2], 0)
    logs = [log.replace("{rank}", str(r)) for r in range(6)]
    agree = verify.diff(logs[0], logs[1]) is None and verify.diff(logs[::2], logs[1::2]) is None
    return {"mesh": all(peers) and stream == expected[:12] and agree and verify.summary(logs).batches == 12}


def main() -> None:
    warnings.simplefilter("ignore")
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = {n: dist.new_group(list(range(n))) for n in (1, 2, 3, 4, 6)}
    expected = take(build(), 60)
    found = {
        **reshard(rank, groups, out, expected),
        **plain_entries(rank, groups[6], out, expected),
        **lanes_asked_wrongly(rank, out),
        **torn(rank, out),
        **collective(rank, world, out),
        **mesh_peers(rank, out, expected),
    }
    (out / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

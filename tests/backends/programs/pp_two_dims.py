"""Pipeline x data parallel, 2 x 2: each stage on two replicas, each with its half of the batch. Writes JSON.

Usage: torchrun --nproc-per-node=4 pp_two_dims.py OUT CHECKPOINT [schedule ...]
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_models import blocks, cut, full_batch_gradients, language_model, relative_error, token_loss
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from headrace.parallel import schedules
from headrace.parallel.builders.registry import recipe
from headrace.parallel.torch_checkpoint import load_checkpoint, save_checkpoint
from headrace.parallel.torch_distributed import DistributedPipeline, RunOptions
from headrace.parallel.torch_stage import PipelineStage

MSE = nn.functional.mse_loss
OUT, CHECKPOINT = Path(sys.argv[1]), sys.argv[2]


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def case(schedule: str, how: str, recompute: bool = False, tied: bool = False) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    dp, pp = mesh["dp"], mesh["pp"]
    num_stages = 2 * recipe(schedule).chunks
    torch.manual_seed(4)
    if tied:
        model: nn.Sequential = language_model(2 * num_stages - 2, tied=True)
        batch, target, loss_fn = torch.randint(0, 17, (16, 5)), torch.randint(0, 17, (16, 5)), token_loss
    else:
        model, loss_fn = blocks(2 * num_stages), MSE
        batch, target = torch.randn(16, 8, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64)
    named = dict(model.named_parameters(remove_duplicate=False))
    unique = dict(model.named_parameters())
    loss, grads = full_batch_gradients(model, unique, batch, target, loss_fn)
    by_id = {id(p): grads[n] for n, p in unique.items()}
    wanted = {n: by_id[id(p)] for n, p in named.items()}
    norm = torch.nn.utils.get_total_norm(list(grads.values()))

    def wrap(stage: PipelineStage) -> nn.Module:
        if how == "fsdp":
            return fully_shard(stage, mesh=dp)
        if how == "nested":  # blocks by themselves, and the rest of the stage
            for name in stage.module.names:  # type: ignore[union-attr]
                fully_shard(stage.get_submodule(f"module.{name}"), mesh=dp)
            return fully_shard(stage, mesh=dp)
        if how == "replicate":
            return replicate(stage, mesh=dp)
        return DistributedDataParallel(stage, process_group=dp.get_group())

    stages = cut(model, [2] * num_stages, recompute=recompute)
    options = RunOptions(group=pp.get_group(), wrap=wrap, watchdog=False)
    pipeline = DistributedPipeline(stages, 4, schedule, loss_fn, options)
    half = slice(0, 8) if dp.get_local_rank() == 0 else slice(8, 16)
    result = pipeline.step(batch[half], target[half])
    assert result.loss is not None
    total = result.loss.clone()
    dist.all_reduce(total, group=dp.get_group())

    def name(full: str) -> str:
        return full.removeprefix("module.").removeprefix("module.")

    found = {
        "gradient": max(
            relative_error(whole(p.grad), wanted[name(n)])
            for m in pipeline.modules.values()
            for n, p in m.named_parameters()
        ),
        "loss": relative_error(total / 2, loss),
        "norm": relative_error(pipeline.clip_grad_norm_(1e9), norm),
    }
    evaluated = pipeline.eval(batch, target)  # of another size than the training batches
    assert evaluated.loss is not None
    found["eval"] = relative_error(evaluated.loss, loss)
    return found


def checkpoint() -> dict[str, Any]:
    """Sharded parameters are saved whole, and load into other values."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    found = {}
    for mode in ("save", "load"):
        model = blocks(4, seed=0 if mode == "save" else 1)
        options = RunOptions(
            group=mesh["pp"].get_group(), wrap=lambda stage: fully_shard(stage, mesh=mesh["dp"]), watchdog=False
        )
        counts = [1, 3] if mode == "save" else [3, 1]
        pipeline = DistributedPipeline(cut(model, counts), 2, "1f1b", MSE, options)
        if mode == "save":
            save_checkpoint(CHECKPOINT, pipeline)
        else:
            load_checkpoint(CHECKPOINT, pipeline)
            wanted = dict(blocks(4, seed=0).named_parameters())
            found["weights"] = max(
                relative_error(whole(p), wanted[n.removeprefix("module.")])
                for m in pipeline.modules.values()
                for n, p in m.named_parameters()
            )
    return found


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    for schedule in sys.argv[3:] or schedules():
        for how in ("fsdp", "nested", "replicate"):
            found[f"{schedule}/{how}"] = case(schedule, how)
        if not recipe(schedule).splits_backward:
            found[f"{schedule}/ddp"] = case(schedule, "ddp")
        found[f"{schedule}/recompute"] = case(schedule, "fsdp", recompute=True)
        found[f"{schedule}/tied"] = case(schedule, "fsdp", tied=True)
    found["checkpoint"] = checkpoint()
    (OUT / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

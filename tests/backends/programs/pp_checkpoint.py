"""Train on one cut, save; load on another, and go on. Writes what each rank found as JSON.

Usage: torchrun --nproc-per-node=N pp_checkpoint.py OUT CHECKPOINT save|load SCHEDULE
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_models import language_model, relative_error, token_loss

from headrace.errors import HeadraceError
from headrace.parallel.builders.registry import recipe
from headrace.parallel.torch_checkpoint import load_checkpoint, load_extra, save_checkpoint
from headrace.parallel.torch_distributed import DistributedPipeline, RunOptions
from headrace.parallel.torch_stage import PipelineStage, split_model

OUT, CHECKPOINT, MODE, SCHEDULE = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 17, (8, 5), generator=generator), torch.randint(0, 17, (8, 5), generator=generator)


def reference(steps: int) -> tuple[torch.nn.Sequential, list[float]]:
    """The same training in one process, without a pipeline."""
    model = language_model(6, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses: list[float] = []
    for step in range(steps):
        loss = token_loss(model(data(step)[0]), data(step)[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def train(pipeline: DistributedPipeline, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses: list[float] = []
    for step in steps:
        optimizer.zero_grad()
        result = pipeline.step(*data(step))
        optimizer.step()
        assert result.loss is not None
        losses.append(result.loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = recipe(SCHEDULE).chunks
    model = language_model(6, tied=True)
    if MODE == "load":  # other values than those saved
        torch.manual_seed(99)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()
    stages = split_model(model, num_stages=world * chunks)
    pipeline = DistributedPipeline(stages, 4, SCHEDULE, token_loss, RunOptions(watchdog=False))
    optimizer = torch.optim.AdamW(pipeline.parameters(), 1e-2)
    _, losses = reference(5)
    found: dict[str, Any] = {}
    if MODE == "save":
        ours = train(pipeline, optimizer, range(3))
        save_checkpoint(CHECKPOINT, pipeline, optimizer, {"step": 3} if pipeline.is_first else None)
        found["losses"] = max(abs(a - b) for a, b in zip(ours, losses[:3], strict=True))
        clash = [PipelineStage(torch.nn.Sequential(torch.nn.Linear(2, 2))) for _ in range(world)]
        other = DistributedPipeline(clash, 2, "1f1b", None, RunOptions(watchdog=False))
        try:
            save_checkpoint(CHECKPOINT + "-clash", other)
        except HeadraceError as error:
            found["clash"] = str(error)
    else:
        found["extra"] = load_checkpoint(CHECKPOINT, pipeline, optimizer)
        assert load_extra(CHECKPOINT) == found["extra"]
        three, _ = reference(3)
        names = dict(three.named_parameters(remove_duplicate=False))
        found["weights"] = max(
            relative_error(p, names[n.removeprefix("module.")])
            for m in pipeline.modules.values()
            for n, p in m.named_parameters()
        )
        evaluated = pipeline.eval(*data(7))
        if pipeline.is_last:
            found["outputs"] = relative_error(evaluated.outputs, three(data(7)[0]))
        found["losses"] = max(
            abs(a - b) for a, b in zip(train(pipeline, optimizer, range(3, 5)), losses[3:], strict=True)
        )
    (OUT / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

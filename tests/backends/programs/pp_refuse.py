"""One step that must not work: every rank gets an error, soon, and the right one. Writes JSON.

Usage: pp_refuse.py OUT CASE
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_models import blocks, cut
from torch import nn

from headrace.errors import HeadraceError
from headrace.parallel.torch_distributed import DistributedPipeline
from headrace.parallel.torch_stage import PipelineStage

OUT, CASE = Path(sys.argv[1]), sys.argv[2]


def attempt() -> None:
    batch, target = torch.ones(4, 8, dtype=torch.float64), torch.ones(4, 8, dtype=torch.float64)
    stages = cut(blocks(2), [1, 1])
    loss_fn = nn.functional.mse_loss
    if CASE == "wrong shape":
        stages = [PipelineStage(nn.Linear(8, 6).double()), PipelineStage(nn.Linear(8, 8).double())]
    if CASE == "late shape":  # shapes fit, yet the module refuses the values
        stages = [PipelineStage(nn.Linear(8, 8).double()), PipelineStage(Picky())]
    pipeline = DistributedPipeline(stages, 2, "1f1b", None if CASE == "no loss" else loss_fn)
    if CASE == "not divisible":
        batch = batch[:3]
    if CASE == "target not divisible":
        target = target[:3]
    if CASE == "target of fewer rows":
        target = target[:2]
    if CASE == "changed shape":
        pipeline.step(batch, target)
        batch, target = batch.repeat(2, 1), target.repeat(2, 1)
    pipeline.step(None if CASE == "no batch" else batch, None if CASE == "no target" else target)


class Picky(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            raise IndexError("a value out of range")
        return x


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    began = time.monotonic()
    text = ""
    try:
        attempt()
    except HeadraceError as error:
        text = f"{type(error).__name__}: {error}"
    path = OUT / f"rank{dist.get_rank()}.json"
    path.write_text(json.dumps({"text": text, "seconds": time.monotonic() - began}))
    time.sleep(0.3)
    os._exit(0)


if __name__ == "__main__":
    main()

"""Feed a pipeline of three ranks from iterables of dicts; the rank between builds no data. Writes JSON.

Usage: torchrun --nproc-per-node=3 pp_feed.py OUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pipeline_models import cut, language_model, token_loss

from headrace.errors import HeadraceError
from headrace.parallel.torch_distributed import DistributedPipeline, RunOptions
from headrace.parallel.torch_feed import feed


class Data:
    """Batches as a data pipeline gives them: dicts of arrays, the same on every rank that asks."""

    built = 0

    def __init__(self, steps: int, rows: int = 4) -> None:
        Data.built += 1
        self.steps, self.rows = steps, rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        generator = np.random.default_rng(3)
        for _ in range(self.steps):
            yield {name: generator.integers(0, 17, (self.rows, 5)) for name in ("input_ids", "labels", "loss_mask")}


def error_of(pipeline: DistributedPipeline, **options: Any) -> str:
    make = options.pop("make", lambda: Data(2))
    try:
        for batch, target in feed(pipeline, make, **options):
            pipeline.step(batch, target)
    except HeadraceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    model = language_model(4, tied=False)
    pipeline = DistributedPipeline(cut(model, [2, 2, 2]), 2, "1f1b", token_loss, RunOptions(watchdog=False))
    losses, wanted, seen = [], [], []
    for batch, target in feed(pipeline, lambda: Data(3), microbatch_size=2):
        seen.append([batch is not None, target is not None])
        loss = pipeline.step(batch, target).loss
        assert loss is not None
        losses.append(loss.item())
    for row in Data(3):
        with torch.no_grad():
            wanted.append(token_loss(model(torch.as_tensor(row["input_ids"])), torch.as_tensor(row["labels"])).item())
    found = {
        "built": Data.built - 1,
        "seen": seen,
        "difference": max(abs(a - b) for a, b in zip(losses, wanted, strict=True)),
        "uneven": error_of(pipeline, make=lambda: Data(2 if rank == 0 else 1)),
        "rows": error_of(pipeline, microbatch_size=3),
        "column": error_of(pipeline, inputs="tokens", targets="targets"),
    }
    Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Rank 1 ends between two steps; rank 0 writes down what it learned from the call in which it waits for it.

Usage: pp_kill_outside.py OUT WHERE, with WHERE one of clip, feed, timeline, save, load, close.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_models import blocks, cut
from torch import Tensor, nn

from headrace.parallel.torch_checkpoint import load_checkpoint, save_checkpoint
from headrace.parallel.torch_distributed import DistributedPipeline
from headrace.parallel.torch_feed import feed

OUT, WHERE = Path(sys.argv[1]), sys.argv[2]
BATCH = torch.ones(4, 8, dtype=torch.float64)


def batches() -> Iterator[dict[str, Tensor]]:
    if dist.get_rank() == 1:
        os._exit(9)
    yield {"input_ids": BATCH, "labels": BATCH}


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    pipeline = DistributedPipeline(cut(blocks(2), [1, 1]), 2, "1f1b", nn.functional.mse_loss)
    pipeline.step(BATCH, BATCH)
    calls: dict[str, Callable[[], object]] = {
        "clip": lambda: pipeline.clip_grad_norm_(1.0),
        "feed": lambda: list(feed(pipeline, batches)),
        "timeline": pipeline.timeline,
        "save": lambda: save_checkpoint(OUT / "c", pipeline),
        "load": lambda: load_checkpoint(OUT / "c", pipeline),
        "close": pipeline.close,
    }
    if WHERE == "load":
        save_checkpoint(OUT / "c", pipeline)
    if dist.get_rank() == 1 and WHERE != "feed":
        os._exit(9)
    try:
        calls[WHERE]()
    except Exception as error:  # noqa: BLE001 - the test reads what it was
        again = ""
        try:
            pipeline.step(BATCH, BATCH)
        except Exception as second:  # noqa: BLE001 - the same
            again = str(second)
        (OUT / "rank0.json").write_text(json.dumps({"type": type(error).__name__, "text": str(error), "again": again}))
    os._exit(0)


if __name__ == "__main__":
    main()

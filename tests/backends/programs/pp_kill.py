"""One rank fails in the middle of a step; the others write down what they learned, and when.

Usage: pp_kill.py OUT RANK HOW SCHEDULE [2d], with HOW one of kill, raise, stop, exit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headrace.errors import HeadraceError
from headrace.parallel.builders.registry import recipe
from headrace.parallel.torch_distributed import DistributedPipeline, RunOptions
from headrace.parallel.torch_stage import PipelineStage

OUT, VICTIM, HOW, SCHEDULE = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
TWO_DIMENSIONS = len(sys.argv) > 5


class Fragile(nn.Module):
    """A slow layer that fails at its sixth forward, on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            time.sleep(0.02)
            self.calls += 1
            if self.calls == 6 and dist.get_rank() == VICTIM:
                self.fail()
        return self.inner(x)

    def fail(self) -> None:
        (OUT / "failed_at").write_text(str(time.time()))
        if HOW == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if HOW == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if HOW == "exit":
            os._exit(0)
        raise ArithmeticError("the stage ran into trouble")


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    silence = 1.0 if HOW == "stop" else 15.0
    options = RunOptions(silence=silence)
    ranks = world
    if TWO_DIMENSIONS:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "pp"))
        ranks = world // 2
        options = RunOptions(
            group=mesh["pp"].get_group(), wrap=lambda stage: fully_shard(stage, mesh=mesh["dp"]), silence=silence
        )
    stages = [PipelineStage(Fragile()) for _ in range(ranks * recipe(SCHEDULE).chunks)]
    pipeline = DistributedPipeline(stages, 4, SCHEDULE, nn.functional.mse_loss, options)
    try:
        for _ in range(3):
            pipeline.step(torch.ones(4, 4), torch.zeros(4, 4))
    except Exception as error:  # noqa: BLE001 - the test reads what it was
        again = ""
        try:
            pipeline.step(torch.ones(4, 4), torch.zeros(4, 4))
        except HeadraceError as second:
            again = str(second)
        report = {"at": time.time(), "type": type(error).__name__, "text": str(error), "again": again}
        (OUT / f"rank{rank}.json").write_text(json.dumps(report))
        time.sleep(0.5)
        if HOW == "stop" and (OUT / "pid").exists():
            os.kill(int((OUT / "pid").read_text()), signal.SIGKILL)
        os._exit(3)


if __name__ == "__main__":
    if int(os.environ["RANK"]) == VICTIM:
        (OUT / "pid").write_text(str(os.getpid()))
    main()

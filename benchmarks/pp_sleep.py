"""Stages that sleep, and the launch of benchmarks over several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.parallel.torch_defer import DeferredGradients

ROOT = Path(__file__).parent.parent


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Sleeper) -> Tensor:
        ctx.layer = layer
        if not x.is_meta:
            time.sleep(layer.times[0])
        return x + 0 * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        layer: Sleeper = ctx.layer
        time.sleep(layer.times[1])
        if layer.store is not None and layer.store.deferring:
            layer.store.add(lambda: time.sleep(layer.times[2]))
        else:
            time.sleep(layer.times[2])
        return grads[0], torch.zeros(1), None


class Sleeper(nn.Module):
    """A stage that computes nothing, in a known time; it defers its weight gradient where the schedule asks for it."""

    def __init__(self, times: tuple[float, float, float]) -> None:
        super().__init__()
        self.times = times
        self.weight = nn.Parameter(torch.zeros(1))
        self.store: DeferredGradients | None = None

    def use_deferred_gradients(self, store: DeferredGradients | None) -> None:
        self.store = store

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, self)  # type: ignore[return-value]


def environment() -> dict[str, str]:
    """One thread a process, and this repository importable."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def launch(program: str, arguments: list[str], ranks: int, seconds: float = 600) -> list[dict[str, Any]]:
    """Start the workers with torchrun, and read what they found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [program, "--worker", "--out", str(out), *arguments]
        subprocess.run(command, check=True, timeout=seconds, env=environment())
        return json.loads(out.read_text())

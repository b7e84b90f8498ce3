"""Activation checkpointing, measured: what it saves in memory and what it costs in time, side by side."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.parallel.costs import StageCosts
from headrace.parallel.torch_batch import Batch, LossFunction
from headrace.parallel.torch_pipeline import Pipeline
from headrace.parallel.torch_stage import Layers, split_model


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside it, and the most that were alive at once. Any device.

    It sees what a saved-tensor hook does not: stage inputs, gradients on their way, a layer being recomputed.
    """

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and look at what it made; views of its inputs, and inputs changed in place, are not new."""
        out = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in given:
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._alive and self._alive[key]() is storage:
            return
        size = storage.nbytes()

        def gone(_: object) -> None:
            self._alive.pop(key, None)
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True)
class RecomputeReport:
    """A step without and with activation checkpointing. Bytes: the most alive at once, beyond parameters and batch."""

    schedule: str
    num_microbatches: int
    bytes_kept: int
    bytes_recomputed: int
    seconds_kept: float
    seconds_recomputed: float

    @property
    def saved(self) -> float:
        """Share of the memory that goes away."""
        return 1 - self.bytes_recomputed / self.bytes_kept

    @property
    def slower(self) -> float:
        """How much longer a step takes: 0.3 is thirty per cent."""
        return self.seconds_recomputed / self.seconds_kept - 1

    def explain(self) -> str:
        """The two side by side."""
        rows = (
            ("", "peak bytes", "step seconds"),
            ("activations kept", f"{self.bytes_kept:,}", f"{self.seconds_kept:.4f}"),
            ("recomputed", f"{self.bytes_recomputed:,}", f"{self.seconds_recomputed:.4f}"),
            ("change", f"{-self.saved:+.1%}", f"{self.slower:+.1%}"),
        )
        head = f"{self.schedule}, {self.num_microbatches} microbatches, all stages in one process"
        return "\n".join([head, *(f"{a:<18}{b:>16}{c:>14}" for a, b, c in rows)])


def compare_recompute(
    model: Layers,
    num_layers_per_stage: list[int],
    make_batch: Callable[[], tuple[Batch, Batch]],
    loss_fn: LossFunction,
    *,
    num_microbatches: int = 8,
    schedule: str = "1f1b",
    repeats: int = 3,
) -> RecomputeReport:
    """Run the same step both ways, in this process, and measure. `make_batch()` gives a batch and its target.

    Gradients accumulate in the model as in any step; clear them afterwards.
    """
    found: list[tuple[int, float]] = []
    for recompute in (False, True):
        stages = split_model(model, num_layers_per_stage, recompute=recompute)
        # Costs, so that the order of actions, and with it the peak, does not depend on how fast this machine is today.
        costs = StageCosts.uniform(len(stages))
        pipeline = Pipeline(stages, num_microbatches, schedule, loss_fn, costs=costs, keep_outputs=False)
        batch, target = make_batch()
        pipeline.step(batch, target)  # makes the gradients, so that they are not counted below, and warms up
        seconds: list[float] = []
        for _ in range(repeats):
            began = time.perf_counter()
            pipeline.step(batch, target)
            seconds.append(time.perf_counter() - began)
        with LiveBytes() as live:
            pipeline.step(batch, target)
        found.append((live.peak, median(seconds)))
    (kept, fast), (less, slow) = found
    return RecomputeReport(schedule, num_microbatches, kept, less, fast, slow)

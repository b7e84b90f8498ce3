"""Measure a model layer by layer on the hardware at hand, and plan with what was measured.

Each layer runs alone, forward, input gradient and weight gradient apart, several times after a warm-up; the median
counts. The weight gradient is timed as the engine runs it: what `torch_defer` can put off. Layers that cannot defer have
all of their backward in the input gradient.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.parallel.layers import Hardware, LayerCost
from headrace.parallel.planner import Plan, plan_layers
from headrace.parallel.torch_batch import Batch, LossFunction
from headrace.parallel.torch_defer import DeferredGradients, defer_weight_gradients, restore_forwards
from headrace.parallel.torch_stage import Layers, as_tuple, named_layers


@dataclass(frozen=True)
class Repeats:
    """How often a layer runs: first to warm up, then to be timed."""

    warmup: int = 2
    timed: int = 7

    def __post_init__(self) -> None:
        """A median needs a value."""
        if self.warmup < 0 or self.timed < 1:
            raise ConfigError(f"warmup is at least 0 and timed at least 1; got {self.warmup} and {self.timed}")


def profile_layers(
    model: Layers,
    sample: Batch,
    target: Batch | None = None,
    loss_fn: LossFunction | None = None,
    repeats: Repeats | None = None,
) -> tuple[LayerCost, ...]:
    """The cost of each layer for one microbatch like `sample`, on the device and in the precision that it has.

    With `loss_fn(output, target)` the last layer carries the cost of the loss as well. Gradients, buffers and the random
    state are as before afterwards.
    """
    layers = named_layers(model)
    repeats = repeats or Repeats()
    modules = [layer for _, layer in layers]
    costs: list[LayerCost] = []
    ties = _ties(layers)
    flow = (sample,) if isinstance(sample, Tensor) else tuple(sample)
    targets = () if target is None else (target,) if isinstance(target, Tensor) else tuple(target)
    saved = SavedBytes(modules)
    with _left_alone(modules, flow[0].device):
        for index, (name, layer) in enumerate(layers):
            last = index == len(layers) - 1
            loss = (lambda out: loss_fn(out, *targets)) if last and loss_fn is not None else None
            inputs = tuple(t.detach().requires_grad_(t.requires_grad) for t in flow)
            try:
                times = _times(layer, inputs, loss, repeats)
                with saved:
                    value = layer(*inputs)
                    _ = None if loss is None else loss(value)
            except Exception as error:  # whatever the layer raises: we add which one
                shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs)
                raise ConfigError(
                    f"layer {index} ({name!r}) failed on {shapes}: {type(error).__name__}: {error}; give a sample that "
                    "the first layer accepts, of one microbatch"
                ) from error
            outputs = as_tuple(value)
            travels = all(isinstance(cast(object, t), Tensor) for t in outputs)
            if not travels and not last:
                raise ConfigError(
                    f"layer {index} ({name!r}) returns something other than tensors; join it with the next layer, since "
                    "only tensors go from layer to layer"
                )
            size = sum(t.numel() * t.element_size() for t in outputs) if travels else 0
            own = sum(p.numel() * p.element_size() for p in layer.parameters())
            costs.append(LayerCost(name, *times, saved.take(), size, own, ties.get(name)))
            flow = tuple(t.detach().requires_grad_(t.requires_grad) for t in outputs) if travels else ()
    return tuple(costs)


def plan(
    model: Layers,
    sample: Batch,
    ranks: int,
    *,
    num_microbatches: int,
    memory: float = float("inf"),
    hardware: Hardware | None = None,
    target: Batch | None = None,
    loss_fn: LossFunction | None = None,
    schedules: Sequence[str] | None = None,
) -> Plan:
    """Measure the model on one microbatch (`sample`) and choose schedule and cut for `ranks` ranks.

    The result's `explain()` lists every candidate; `schedule`, `num_layers_per_stage` and `recompute` are what to run:

        plan = headrace.parallel.plan(model, sample, ranks=4, num_microbatches=16, memory=6 * 2**30)
        stages = split_model(model, plan.num_layers_per_stage, recompute=plan.recompute)
        pipeline = DistributedPipeline(stages, 16, plan.schedule, loss_fn)
    """
    layers = profile_layers(model, sample, target, loss_fn)
    return plan_layers(layers, ranks, num_microbatches, memory=memory, hardware=hardware, names=schedules)


class SavedBytes:
    """Counts the bytes that autograd saves for the backward; a storage counts for the layer that saves it first.

    Parameters and buffers are there anyway and do not count.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Know what is not an activation."""
        self._known = {t.untyped_storage().data_ptr() for m in modules for t in (*m.parameters(), *m.buffers())}
        self._seen: dict[int, Tensor] = {}  # holds what it has seen, so that no address comes twice
        self._bytes = 0
        self._hooks: Any = None

    def __enter__(self) -> None:
        """Start to count."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        """Stop to count."""
        self._hooks.__exit__(*_)

    def _pack(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._known and address not in self._seen:
            self._seen[address] = tensor.detach()
            self._bytes += tensor.untyped_storage().nbytes()
        return tensor

    def take(self) -> int:
        """The bytes since the last call."""
        found, self._bytes = self._bytes, 0
        return found


def _times(
    layer: nn.Module, inputs: tuple[Tensor, ...], loss: Callable[[Any], Tensor] | None, repeats: Repeats
) -> tuple[float, float, float]:
    """Median seconds of forward, input gradient and weight gradient."""
    store = DeferredGradients()
    defer_weight_gradients(layer, store)
    try:
        rows = [_once(layer, inputs, loss, store) for _ in range(repeats.warmup + repeats.timed)]
    finally:
        restore_forwards(layer)
    forward, grad_input, grad_weight = zip(*rows[repeats.warmup :], strict=True)
    return median(forward), median(grad_input), median(grad_weight)


def _once(
    layer: nn.Module, inputs: tuple[Tensor, ...], loss: Callable[[Any], Tensor] | None, store: DeferredGradients
) -> tuple[float, float, float]:
    device = inputs[0].device
    began = _now(device)
    value = layer(*inputs)
    ends = (value if loss is None else loss(value),)
    ends = as_tuple(ends[0])
    forward = _now(device)
    wanted = [t for t in ends if isinstance(cast(object, t), Tensor) and t.requires_grad]
    store.deferring = True
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(t) for t in wanted])
    store.deferring = False
    backward = _now(device)
    store.take()()
    done = _now(device)
    for tensor in inputs:
        tensor.grad = None
    return forward - began, backward - forward, done - backward


def _now(device: torch.device) -> float:
    """Seconds, after everything given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _left_alone(modules: Sequence[nn.Module], device: torch.device) -> Generator[None]:
    """Restore gradients, buffers and the random state afterwards."""
    parameters = list({id(p): p for m in modules for p in m.parameters()}.values())
    grads = [p.grad for p in parameters]
    buffers = [(b, b.clone()) for m in modules for b in m.buffers()]
    for parameter in parameters:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _ties(layers: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    """Layers whose largest parameter another layer has too (an embedding and its head), with the name of the first."""
    first: dict[int, str] = {}
    where: dict[str, str] = {}
    for name, layer in layers:
        largest = max(layer.parameters(), key=lambda p: p.numel(), default=None)
        if largest is None:
            continue
        other = first.setdefault(id(largest), name)
        if other != name:
            where[name] = where[other] = other
    return where

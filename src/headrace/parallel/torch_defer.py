"""Weight gradients that can wait: the `W` of schedules that split the backward.

A schedule such as ZB-H1 runs the input gradient `I` of a microbatch at once, since the stage before waits for it, and
puts its weight gradient `W` where the rank would idle. Autograd does not offer this split: asking it twice for two sets
of gradients keeps the whole graph alive and, with activation checkpointing, computes each block again once per parameter
group. Here the layer itself defers. Its backward computes the gradient of its input, and hands a closure that computes
the gradient of its weight to a `DeferredGradients`; `W` runs the closures.

So the graph is freed at `I`, only the layer's input and output gradient stay, and a checkpointed block is computed
again exactly once. `nn.Linear`, `nn.Embedding` and `nn.Conv1d/2d/3d` defer; every other parameter (norms, biases of your
own) gets its gradient in `I`, which is right too, only earlier. So does a parameter with hooks (`register_hook`,
`register_post_accumulate_grad_hook`, `register_multi_grad_hook`). Hooks on autograd's own node of a parameter cannot be
seen from here: they are called in `I`, before the gradient is there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError, InternalError

WeightGradient = Callable[[], None]


class DeferredGradients:
    """The weight gradients of one stage that wait for their `W`.

    `deferring` is true while an `I` runs; a plain `B` leaves it false, and the layers then do what they always do.
    """

    def __init__(self) -> None:
        """Start with nothing waiting."""
        self.deferring = False
        self._waiting: list[WeightGradient] = []

    def add(self, work: WeightGradient) -> None:
        """Keep one weight gradient for later."""
        self._waiting.append(work)

    def take(self) -> Callable[[], None]:
        """Everything that waits, as one call: the `W` of the microbatch whose `I` has just run."""
        work, self._waiting = self._waiting, []

        def run() -> None:
            with torch.no_grad():
                while work:  # pop, so that each saved input is freed as soon as it is used
                    work.pop()()

        return run


def defer_weight_gradients(module: nn.Module, store: DeferredGradients) -> int:
    """Teach every layer below `module` that can defer to use `store`; returns how many can.

    Only layers whose class is exactly one of the known ones change (a subclass may do anything), and their forward
    computes the same numbers as before. A layer of your own defers if it has a method `use_deferred_gradients(store)`:
    it gets the store, and None when it is over.
    """
    if any(hasattr(layer, "_orig_mod") for layer in module.modules()):
        raise ConfigError(
            "a module compiled with torch.compile cannot put off its weight gradients; take a schedule with full backwards, "
            "such as 1f1b, or leave this stage uncompiled"
        )
    count = 0
    for layer in module.modules():
        own = getattr(layer, _OWN, None)
        if own is not None:
            own(store)
            count += 1
            continue
        forward = _FORWARDS.get(type(layer))
        if forward is not None and _can_defer(layer):
            object.__setattr__(layer, _STORE, store)
            object.__setattr__(layer, "forward", MethodType(forward, layer))
            count += 1
    return count


def restore_forwards(module: nn.Module) -> None:
    """Undo `defer_weight_gradients`."""
    for layer in module.modules():
        own = getattr(layer, _OWN, None)
        if own is not None:
            own(None)
        elif _STORE in layer.__dict__:
            object.__delattr__(layer, _STORE)
            object.__delattr__(layer, "forward")


_STORE = "_headrace_deferred_gradients"
_OWN = "use_deferred_gradients"


def _can_defer(layer: nn.Module) -> bool:
    """A forward that somebody replaced, or options that change the gradient's form, stay as they are."""
    if "forward" in layer.__dict__ and _STORE not in layer.__dict__:
        return False
    if isinstance(layer, nn.Embedding):
        return not layer.sparse and layer.max_norm is None
    return getattr(layer, "padding_mode", "zeros") == "zeros" and not isinstance(getattr(layer, "padding", 0), str)


def _deferrable(*parameters: Tensor | None) -> bool:
    """Only leaves take a gradient later; a weight that is computed (parametrized) takes autograd's way."""
    if not torch.is_grad_enabled():
        return False
    given = [p for p in parameters if p is not None]
    return any(p.requires_grad for p in given) and all(p.is_leaf for p in given)


def _accumulate(parameter: Tensor, gradient: Callable[[], Tensor]) -> None:
    """Add to `.grad`, as autograd would."""
    value = gradient().to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = value
    else:
        parameter.grad.add_(value)


class _Linear(torch.autograd.Function):
    """x: (*, in); weight: (out, in); bias: (out,) or None. Under autocast the gradient comes in the lower precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, store: DeferredGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.store, ctx.leaves = store, (weight, bias)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        rows = x.reshape(-1, x.shape[-1]).to(grad.dtype)
        grad_x = (grad @ weight.to(grad.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None

        def of_weight() -> Tensor:
            return flat.t() @ rows

        def of_bias() -> Tensor:
            return flat.sum(0)

        return (grad_x, *_now_or_later(ctx, of_weight, of_bias))


class _Embedding(torch.autograd.Function):
    """indices: (*) of integers; weight: (rows, width). There is no input gradient, so `I` costs nothing here."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, layer: nn.Embedding, store: DeferredGradients) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.store, ctx.leaves = store, (weight, None)
        ctx.padding = -1 if layer.padding_idx is None else layer.padding_idx
        ctx.by_frequency = layer.scale_grad_by_freq
        return nn.functional.embedding(indices, weight, layer.padding_idx, scale_grad_by_freq=layer.scale_grad_by_freq)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        (indices,) = ctx.saved_tensors
        rows, padding, by_frequency = ctx.leaves[0].shape[0], ctx.padding, ctx.by_frequency

        def of_weight() -> Tensor:
            return torch.ops.aten.embedding_dense_backward(grad, indices, rows, padding, by_frequency)

        return None, _now_or_later(ctx, of_weight, None)[0], None, None


class _Conv(torch.autograd.Function):
    """x: (batch, in, *space); weight: (out, in / groups, *kernel); bias: (out,) or None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any, store: DeferredGradients
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.store, ctx.leaves = store, (weight, bias)
        ctx.geometry = (list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups)
        return _CONVOLVE[len(layer.stride)](x, weight, bias, *ctx.geometry)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        sizes = None if ctx.leaves[1] is None else [weight.shape[0]]
        none = [0] * len(stride)

        def gradients(mask: list[bool]) -> Any:
            low = (grad, x.to(grad.dtype), weight.to(grad.dtype), sizes)
            return torch.ops.aten.convolution_backward(*low, stride, padding, dilation, False, none, groups, mask)

        def of_weight() -> Tensor:
            return gradients([False, True, False])[1]

        def of_bias() -> Tensor:
            return grad.sum([d for d in range(grad.dim()) if d != 1])

        grad_x = gradients([True, False, False])[0].to(x.dtype) if ctx.needs_input_grad[0] else None
        return (grad_x, *_now_or_later(ctx, of_weight, of_bias), None)


def _now_or_later(
    ctx: Any, of_weight: Callable[[], Tensor], of_bias: Callable[[], Tensor] | None
) -> tuple[Tensor | None, Tensor | None, None]:
    """The gradients of weight and bias: now for a full backward, as closures in the store for an `I`.

    The parameters come from `ctx.leaves`: under activation checkpointing the saved ones are detached copies.
    """
    weight, bias = ctx.leaves
    return _gradient(ctx.store, weight, of_weight), _gradient(ctx.store, bias, of_bias), None


def _gradient(
    store: DeferredGradients, parameter: Tensor | None, compute: Callable[[], Tensor] | None
) -> Tensor | None:
    """The gradient of one parameter for autograd, or None if it has none or if it waits."""
    if parameter is None or compute is None or not parameter.requires_grad:
        return None
    if store.deferring and not _has_hooks(parameter):
        store.add(lambda: _accumulate(parameter, compute))
        return None
    return compute().to(parameter.dtype)


def _has_hooks(parameter: Tensor) -> bool:
    """Whether somebody looks at the gradient on its way, or may change it: only autograd calls hooks, and it does so in `I`."""
    after = parameter._post_accumulate_grad_hooks  # pyright: ignore[reportPrivateUsage] - torch has no public way to ask
    return bool(parameter._backward_hooks or after)


def _linear_forward(self: Any, x: Tensor) -> Tensor:
    if not _deferrable(self.weight, self.bias):
        return nn.functional.linear(x, self.weight, self.bias)
    return _Linear.apply(x, self.weight, self.bias, _store_of(self))  # type: ignore[return-value]


def _embedding_forward(self: Any, indices: Tensor) -> Tensor:
    if not _deferrable(self.weight):
        return nn.Embedding.forward(self, indices)
    return _Embedding.apply(indices, self.weight, self, _store_of(self))  # type: ignore[return-value]


def _conv_forward(self: Any, x: Tensor) -> Tensor:
    batched = x.dim() == len(self.stride) + 2
    if not batched or not _deferrable(self.weight, self.bias):
        return type(self).forward(self, x)
    return _Conv.apply(x, self.weight, self.bias, self, _store_of(self))  # type: ignore[return-value]


def _store_of(layer: nn.Module) -> DeferredGradients:
    store = layer.__dict__.get(_STORE)
    if store is None:
        raise InternalError(f"a {type(layer).__name__} defers its gradient but has no store")
    return store


_CONVOLVE: dict[int, Callable[..., Tensor]] = {
    1: nn.functional.conv1d,
    2: nn.functional.conv2d,
    3: nn.functional.conv3d,
}
_FORWARDS: dict[type, Callable[..., Tensor]] = {
    nn.Linear: _linear_forward,
    nn.Embedding: _embedding_forward,
    nn.Conv1d: _conv_forward,
    nn.Conv2d: _conv_forward,
    nn.Conv3d: _conv_forward,
}

"""Hooks of parameters see with a split backward what they see with a full one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pipeline_models import cut, language_model, token_loss
from torch import Tensor, nn

from headrace.parallel.torch_pipeline import Pipeline

Install = Callable[[list[nn.Parameter], Callable[[Tensor], None]], object]


def changes(parameters: list[nn.Parameter], see: Callable[[Tensor], None]) -> None:
    """One that gives another gradient."""

    def hook(gradient: Tensor) -> Tensor:
        see(gradient)
        return gradient * 3

    for parameter in parameters:
        parameter.register_hook(hook)


def after_accumulation(parameters: list[nn.Parameter], see: Callable[[Tensor], None]) -> None:
    """One that takes the gradient away, as an optimizer in the backward does."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        see(parameter.grad)
        parameter.grad = parameter.grad / 2

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)


def all_together(parameters: list[nn.Parameter], see: Callable[[Tensor], None]) -> None:
    """One called once for several parameters."""

    def hook(gradients: object) -> None:
        for gradient in gradients:  # type: ignore[attr-defined]
            see(gradient)

    torch.autograd.graph.register_multi_grad_hook(parameters, hook)


@pytest.mark.parametrize("install", [changes, after_accumulation, all_together])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_split_backward_calls_hooks_as_a_full_one_does(install: Install, recompute: bool) -> None:
    """On an embedding, a linear's weight (its bias has none and still waits) and a norm."""
    found: list[tuple[list[float], list[Tensor]]] = []
    for schedule in ("1f1b", "zb-h1"):
        model = language_model(2, tied=False)
        block: nn.Module = model[1]
        seen: list[float] = []
        hooked = [model[0].weight, block.up.weight, block.norm.weight]  # type: ignore[union-attr]
        install(hooked, lambda gradient, seen=seen: seen.append(float(gradient.detach().norm())))  # type: ignore[arg-type]
        torch.manual_seed(7)
        tokens = torch.randint(0, 17, (8, 5))
        Pipeline(cut(model, [2, 2], recompute=recompute), 4, schedule, token_loss).step(tokens, tokens)
        found.append((sorted(seen), [p.grad for p in model.parameters()]))  # type: ignore[misc]
    (full, wanted), (split, gradients) = found
    assert len(full) == 12
    assert split == pytest.approx(full, rel=1e-12)
    for a, b in zip(gradients, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-15)


def test_a_removed_hook_is_none() -> None:
    """Its parameter waits for `W` again."""
    from headrace.parallel.torch_defer import DeferredGradients, defer_weight_gradients

    layer, store = nn.Linear(2, 2), DeferredGradients()
    defer_weight_gradients(layer, store)
    store.deferring = True
    handle = layer.weight.register_hook(lambda g: g)
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert layer.weight.grad is not None
    handle.remove()
    layer.weight.grad = None
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert layer.weight.grad is None

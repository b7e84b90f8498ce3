"""Gradients of every schedule equal the full batch's, whatever the stages are made of."""

from __future__ import annotations

import pytest
import torch
from pipeline_models import Block, blocks, cut, full_batch_gradients, language_model, relative_error, token_loss
from torch import nn

from headrace.parallel import schedules
from headrace.parallel.torch_pipeline import Pipeline

STAGES = dict.fromkeys(schedules(), 4)
EVEN, UNEVEN = [2, 2, 2, 2], [1, 4, 2, 1]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def errors(
    pipeline: Pipeline, model: nn.Module, batch: torch.Tensor, target: torch.Tensor, loss_fn: object
) -> list[float]:
    named = dict(model.named_parameters())
    loss, wanted = full_batch_gradients(model, named, batch, target, loss_fn)  # type: ignore[arg-type]
    result = pipeline.step(batch, target)
    assert result.loss is not None
    found = [relative_error(named[n].grad, g) for n, g in wanted.items()]  # type: ignore[arg-type]
    return [*found, relative_error(result.loss, loss)]


@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize("case", ["plain", "recompute", "uneven", "few", "uneven-recompute-few"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_blocks(schedule: str, case: str, dtype: torch.dtype) -> None:
    model = blocks(8, dtype=dtype)
    stages = cut(model, UNEVEN if "uneven" in case else EVEN, recompute="recompute" in case)
    num_microbatches = 3 if "few" in case else 8
    batch = torch.randn(24, 8, dtype=dtype)
    target = torch.randn(24, 8, dtype=dtype)
    pipeline = Pipeline(stages, num_microbatches, schedule, nn.functional.mse_loss)
    assert max(errors(pipeline, model, batch, target, nn.functional.mse_loss)) < TOLERANCE[dtype]


@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_tied_weights(schedule: str, recompute: bool, dtype: torch.dtype) -> None:
    model = language_model(6, tied=True, dtype=dtype)
    stages = cut(model, EVEN, recompute=recompute)
    tokens, labels = torch.randint(0, 17, (8, 5)), torch.randint(0, 17, (8, 5))
    pipeline = Pipeline(stages, 4, schedule, token_loss)
    assert max(errors(pipeline, model, tokens, labels, token_loss)) < TOLERANCE[dtype]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_accumulates_over_steps(schedule: str) -> None:
    """Two steps without clearing give the sum: nothing scales a gradient that is already there."""
    model = blocks(4)
    pipeline = Pipeline(cut(model, [1, 1, 1, 1]), 4, schedule, nn.functional.mse_loss)
    batch, target = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    _, wanted = full_batch_gradients(model, dict(model.named_parameters()), batch, target, nn.functional.mse_loss)
    pipeline.step(batch, target)
    pipeline.step(batch, target)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert relative_error(parameter.grad, 2 * wanted[name]) < 1e-12


@pytest.mark.parametrize("schedule", schedules())
def test_recompute_runs_each_block_once_more(schedule: str) -> None:
    """With activation checkpointing a block runs twice per microbatch, also where the backward is split."""
    model = blocks(4)
    pipeline = Pipeline(cut(model, [1, 1, 1, 1], recompute=True), 6, schedule, nn.functional.mse_loss)
    pipeline.step(torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64))
    assert [block.calls for block in model if isinstance(block, Block)] == [12, 12, 12, 12]


def test_split_backward_leaves_linear_weights_to_w() -> None:
    """After the last I and before the first W of a stage, its linears have no gradient, its norm has."""
    from headrace.parallel.torch_defer import DeferredGradients, defer_weight_gradients, restore_forwards

    block, store = Block().double(), DeferredGradients()
    assert defer_weight_gradients(block, store) == 2
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    out = block(x)
    store.deferring = True
    out.sum().backward()
    assert x.grad is not None
    assert block.up.weight.grad is None
    assert block.up.bias.grad is None
    assert block.norm.weight.grad is not None
    store.take()()
    assert block.up.weight.grad is not None
    assert block.up.bias.grad is not None
    restore_forwards(block)
    assert "forward" not in block.up.__dict__


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(4, 3), (2, 5, 4)),
        (lambda: nn.Linear(4, 3, bias=False), (4,)),
        (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9)),
        (lambda: nn.Conv2d(4, 6, 3, dilation=2), (2, 4, 9, 9)),
        (lambda: nn.Conv3d(2, 2, 2, bias=False), (1, 2, 4, 4, 4)),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_deferring_layers_compute_the_same(layer: object, shape: tuple[int, ...], split: bool) -> None:
    from headrace.parallel.torch_defer import DeferredGradients, defer_weight_gradients, restore_forwards

    torch.manual_seed(0)
    module: nn.Module = layer().double()  # type: ignore[operator]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    plain = module(x)
    weight = torch.randn_like(plain)
    wanted = torch.autograd.grad((plain * weight).sum(), [x, *module.parameters()])
    store = DeferredGradients()
    assert defer_weight_gradients(module, store) == 1
    store.deferring = split
    out = module(x)
    assert torch.equal(out, plain)
    (out * weight).sum().backward()
    store.take()()
    for found, right in zip([x, *module.parameters()], wanted, strict=True):
        assert found.grad is not None
        assert relative_error(found.grad, right) < 1e-12
    restore_forwards(module)


@pytest.mark.parametrize("split", [False, True])
def test_deferring_embedding(split: bool) -> None:
    from headrace.parallel.torch_defer import DeferredGradients, defer_weight_gradients

    layer = nn.Embedding(7, 3, padding_idx=0).double()
    ids = torch.tensor([[0, 1, 2], [2, 2, 6]])
    weight = torch.randn(2, 3, 3, dtype=torch.float64)
    (wanted,) = torch.autograd.grad((layer(ids) * weight).sum(), [layer.weight])
    store = DeferredGradients()
    defer_weight_gradients(layer, store)
    store.deferring = split
    (layer(ids) * weight).sum().backward()
    store.take()()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, wanted)


def test_deferring_under_autocast() -> None:
    """In lower precision the weight gradient stays in the weight's own type."""
    from headrace.parallel.torch_defer import DeferredGradients, defer_weight_gradients

    layer, store = nn.Linear(4, 4), DeferredGradients()
    x = torch.randn(8, 4, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        layer.zero_grad()
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
        assert out.dtype is torch.bfloat16
        out.sum().backward()
        store.take()()
        return [x.grad, layer.weight.grad, layer.bias.grad]  # type: ignore[list-item]

    plain = gradients()
    defer_weight_gradients(layer, store)
    store.deferring = True
    for found, wanted in zip(gradients(), plain, strict=True):
        assert found.dtype is torch.float32
        assert relative_error(found, wanted) < 1e-2

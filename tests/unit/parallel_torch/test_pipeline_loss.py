"""The loss of a step is the full batch's, whatever its mean averages over; targets that do not fit are refused."""

from __future__ import annotations

import pytest
import torch
from pipeline_models import blocks, cut, full_batch_gradients, language_model, relative_error, token_loss
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.parallel import schedules
from headrace.parallel.torch_batch import CountFunction, ScaledLoss, counted
from headrace.parallel.torch_pipeline import Pipeline

MSE = nn.functional.mse_loss


def check(pipeline: Pipeline, model: nn.Module, tokens: Tensor, labels: Tensor) -> None:
    """Loss and gradients of a step, and the loss of an evaluation, against the full batch."""
    named = dict(model.named_parameters())
    loss, wanted = full_batch_gradients(model, named, tokens, labels, token_loss)
    for result in (pipeline.eval(tokens, labels), pipeline.step(tokens, labels)):
        assert result.loss is not None
        assert result.loss.dtype == loss.dtype
        assert relative_error(result.loss, loss) < 1e-12
    for name, gradient in wanted.items():
        assert relative_error(named[name].grad, gradient) < 1e-12, name  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize("recompute", [False, True])
def test_ignored_labels(schedule: str, recompute: bool) -> None:
    """Microbatches with few, all and none of their labels ignored; and a stage of one layer that is only a head."""
    model = language_model(6, tied=False)
    tokens, labels = torch.randint(0, 17, (8, 5)), torch.randint(0, 17, (8, 5))
    labels[0, 1:] = -100
    labels[2:4] = -100
    check(Pipeline(cut(model, [3, 3, 1, 1], recompute=recompute), 4, schedule, token_loss), model, tokens, labels)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_batch_without_a_label(schedule: str) -> None:
    """What the loss says of nothing, it says of the batch: cross entropy is NaN, its gradients are zero."""
    model = language_model(2, tied=False)
    labels = torch.full((4, 5), -100)
    result = Pipeline(cut(model, [2, 2]), 2, schedule, token_loss).step(torch.zeros(4, 5, dtype=torch.long), labels)
    assert result.loss is not None
    assert result.loss.isnan()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_another_count() -> None:
    """A mean over what a second target says, weighted, with a microbatch of weight zero that the loss cannot take."""

    def weighted(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        assert weights.sum()
        each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (each * weights.flatten()).sum() / weights.sum()

    model = language_model(2, tied=False)
    tokens, labels = torch.randint(0, 17, (4, 5)), torch.randint(0, 17, (4, 5))
    weights = torch.rand(4, 5, dtype=torch.float64)
    weights[1] = 0
    wanted = weighted(model(tokens), labels, weights)
    grads = torch.autograd.grad(wanted, list(model.parameters()))
    pipeline = Pipeline(cut(model, [2, 2]), 4, "1f1b", weighted, count=lambda _, weights: weights.sum())
    result = pipeline.step(tokens, (labels, weights))
    assert result.loss is not None
    assert relative_error(result.loss, wanted) < 1e-12
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert relative_error(parameter.grad, grad) < 1e-12  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "number"),
    [
        (torch.tensor([[1, -100], [-100, -100]]), 1),
        (torch.tensor([156, 1], dtype=torch.uint8), 2),  # -100 as an unsigned byte
        (torch.tensor([True, False]), 2),
        (torch.tensor([[-100.0, 1.0]]), 2),
        (torch.tensor(3), 1),
    ],
)
def test_what_counts(target: Tensor, number: int) -> None:
    assert int(counted(target)) == number


@pytest.mark.parametrize("value", [-1, float("nan"), torch.tensor(float("inf"))])
def test_counts_that_are_none(value: float | Tensor) -> None:
    count: CountFunction = lambda _: value  # noqa: E731
    with pytest.raises(ConfigError, match="count gave"):
        Pipeline(cut(blocks(1), [1]), 1, "gpipe", MSE, count=count).step(torch.ones(1, 8).double(), torch.ones(1, 8))


def test_a_sum_has_no_count() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        ScaledLoss(MSE, "sum", counted)


def test_rows_of_batch_and_target_are_compared() -> None:
    """A loss would broadcast, where the full batch's raises."""
    pipeline = Pipeline(cut(blocks(2), [1, 1]), 4, "1f1b", MSE)
    batch, target = torch.ones(8, 8).double(), torch.zeros(4, 8).double()
    for run in (pipeline.step, pipeline.eval):
        with pytest.raises(ConfigError, match="the batch has 8 rows, the target 4"):
            run(batch, target)
    pipeline.step_microbatches(batch.split(2), [torch.zeros(2, 8).double()] * 4)


@pytest.mark.parametrize("loss_fn", [MSE, nn.MSELoss(), lambda output, target: (output - target).sum()])
def test_targets_that_the_loss_does_not_take(loss_fn: object) -> None:
    """Said before a stage has run."""
    model = blocks(2)
    pipeline = Pipeline(cut(model, [1, 1]), 2, "1f1b", loss_fn)  # type: ignore[arg-type]
    batch = torch.ones(4, 8).double()
    with pytest.raises(ConfigError, match=r"the output and no target: missing a required argument: 'target'; pass the"):
        pipeline.step(batch)
    with pytest.raises(ConfigError, match=r"no target"):
        pipeline.step_microbatches([batch] * 2)
    if loss_fn is not MSE:
        with pytest.raises(ConfigError, match=r"the output and 2 targets: too many positional arguments"):
            pipeline.step(batch, (batch, batch))
    assert [block.calls for block in model] == [0, 0]  # type: ignore[union-attr]
    assert pipeline.eval(batch).loss is None


def test_a_loss_of_the_output_alone() -> None:
    pipeline = Pipeline(cut(blocks(2), [1, 1]), 2, "1f1b", lambda output: output.mean())
    assert pipeline.step(torch.ones(4, 8).double()).loss is not None

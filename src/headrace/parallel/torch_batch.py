"""Batches into microbatches, and the loss that makes their gradients add up to the full batch's.

The rule of this library: *losses are scaled, gradients never*. With a loss that averages, the loss of each microbatch is
multiplied before its backward by its share of what the whole batch averages over (`counted`); with a loss that sums
(`reduction="sum"`), by one. Gradients then accumulate to the full-batch gradient in any order of microbatches, over any
number of steps, and also when microbatches differ in size or in how many labels they mask. Dividing gradients
afterwards, the usual way, goes wrong at the second step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.parallel.torch_stage import as_tuple

Batch = Tensor | Sequence[Tensor]
LossFunction = Callable[..., Tensor]
CountFunction = Callable[..., Tensor | float]
Reduction = Literal["mean", "sum"]

IGNORED = -100  # a label without loss: torch's default, and what SampleBatch.to_training writes


def split_batch(batch: Batch, num_microbatches: int, what: str) -> list[tuple[Tensor, ...]]:
    """Cut the rows (dimension 0) of one or several tensors into equal microbatches, as views.

    A batch that does not divide is an error: torch would cut it unevenly, and the peers, which wait for tensors of the
    first microbatch's shape, would hang or abort.
    """
    tensors = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    if not tensors:
        raise ConfigError(f"the {what} is empty; give a tensor, or a sequence of tensors with equal rows")
    rows = {_rows(tensor, what) for tensor in tensors}
    if len(rows) != 1:
        raise ConfigError(f"the tensors of the {what} have {sorted(rows)} rows; every tensor must have the same number")
    (total,) = rows
    if total == 0 or total % num_microbatches:
        short = total % num_microbatches
        raise ConfigError(
            f"the {what} has {total} rows, which do not divide into {num_microbatches} microbatches (microbatch "
            f"{num_microbatches - 1} would be {short or total} rows); use a multiple of {num_microbatches} rows, "
            "another num_microbatches, or pass the microbatches yourself with step_microbatches"
        )
    size = total // num_microbatches
    chunks = [tensor.split(size) for tensor in tensors]
    return [tuple(parts) for parts in zip(*chunks, strict=True)]


def given_microbatches(
    microbatches: Sequence[Batch] | None, num_microbatches: int, what: str
) -> list[tuple[Tensor, ...]] | None:
    """Microbatches that the caller made, one entry each, checked for their number."""
    if microbatches is None:
        return None
    if len(microbatches) != num_microbatches:
        raise ConfigError(
            f"got {len(microbatches)} microbatches of {what}, but num_microbatches is {num_microbatches}; pass exactly that many"
        )
    return [(m,) if isinstance(m, Tensor) else tuple(m) for m in microbatches]


def row_counts(shapes: Sequence[Sequence[int]]) -> list[int]:
    """The rows of each microbatch, from the shape of its first tensor."""
    return [shape[0] if shape else 1 for shape in shapes]


def check_same_rows(rows: Sequence[int], targets: Sequence[tuple[Tensor, ...]] | None) -> None:
    """Refuse a batch and a target that were cut into microbatches of different rows: a loss may broadcast one over the other."""
    if targets is None:
        return
    theirs = row_counts([target[0].shape for target in targets])
    if list(rows) != theirs:
        raise ConfigError(
            f"the batch has {sum(rows)} rows, the target {sum(theirs)}; give each row its target (labels of a token sequence as "
            "rows x tokens, not flattened), or pass the microbatches yourself with step_microbatches"
        )


def counted(target: Tensor, *_: Tensor) -> Tensor | float:
    """What a mean averages over, of one microbatch: the entries of the target, in one of integers those that are not -100.

    That is torch's own rule for its losses. Of several targets the first one counts.
    """
    integers = target.dtype.is_signed and not target.is_floating_point() and not target.is_complex()
    return (target != IGNORED).sum() if integers else target.numel()


class ScaledLoss:
    """`loss_fn`, made additive: its values over the microbatches sum to the loss of the whole batch.

    `loss_fn=None` means that the last stage returns the loss itself. `count` gives, from the targets of one microbatch, the
    number that its mean averages over.
    """

    def __init__(self, loss_fn: LossFunction | None, reduction: Reduction, count: CountFunction | None = None) -> None:
        """Check the reduction; `count` is `counted` unless given."""
        if reduction not in ("mean", "sum"):
            raise ConfigError(f'reduction is "mean" or "sum" (what loss_fn does over a microbatch); got {reduction!r}')
        if count is not None and reduction == "sum":
            raise ConfigError('count says what a mean averages over; with reduction="sum" leave it out')
        self.loss_fn = loss_fn
        self.reduction = reduction
        self.count = count or counted

    def check_arguments(self, targets: Sequence[tuple[Tensor, ...]] | None) -> None:
        """Refuse a missing target, or too many, before anything runs."""
        function = self.loss_fn.forward if isinstance(self.loss_fn, nn.Module) else self.loss_fn
        number = len(targets[0]) if targets else 0
        try:
            signature = None if function is None else inspect.signature(function)
        except ValueError:  # a function in C without a signature: it complains by itself
            return
        try:
            _ = signature and signature.bind(*[None] * (1 + number))
        except TypeError as error:
            name = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
            remedy = "give as many targets as it takes" if number else "pass the target of the batch"
            raise ConfigError(
                f"loss_fn {name!r} does not take the output and {number or 'no'} target{'s' * (number > 1)}: {error}; {remedy}"
            ) from None

    def shares(self, rows: Sequence[int], targets: Sequence[tuple[Tensor, ...]] | None) -> list[float]:
        """The factor of each microbatch's loss: its share of the batch's count; without targets, of its rows.

        If nothing counts in the whole batch, `loss_fn` has the word, as it would have over the full batch: the shares are those of
        the rows (and `cross_entropy` is NaN, with gradients of zero).
        """
        if self.reduction == "sum":
            return [1.0] * len(rows)
        counts: Sequence[float] = rows
        if targets and targets[0]:
            counts = _numbers([self.count(*target) for target in targets])
            if wrong := [c for c in counts if not (c >= 0 and math.isfinite(c))]:
                raise ConfigError(
                    f"count gave {wrong[0]} for a microbatch; what a mean averages over is a number, 0 or more"
                )
        if not sum(counts):
            counts = rows
        return [count / sum(counts) for count in counts]

    def __call__(self, outputs: Any, targets: tuple[Tensor, ...] | None, share: float, where: str) -> Tensor:
        """The scaled loss of one microbatch; `where` names it in errors.

        With a share of 0 `loss_fn` is not asked: it may divide by zero.
        """
        if share == 0:
            return _nothing(outputs)
        loss = outputs if self.loss_fn is None else self.loss_fn(outputs, *(targets or ()))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            remedy = (
                "give loss_fn=..., or let the last stage return a scalar loss"
                if self.loss_fn is None
                else "let loss_fn return one number"
            )
            raise ConfigError(f"{where}: there is no loss to differentiate, got {found}; {remedy}")
        if not loss.requires_grad and torch.is_grad_enabled():
            raise ConfigError(
                f"{where}: the loss depends on no parameter (requires_grad is False); check that no stage detaches its "
                "output and that some parameter is trainable"
            )
        return loss.reshape(()) * share


def merge_outputs(outputs: Sequence[Any]) -> Any:
    """The outputs of all microbatches as one batch: rows joined; of unequal shapes, or scalars, a tuple of them."""
    if not outputs:
        return None
    if isinstance(outputs[0], tuple):
        return tuple(merge_outputs(parts) for parts in zip(*outputs, strict=True))
    tensors = cast(Sequence[Tensor], outputs)
    joinable = all(t.dim() and t.shape[1:] == tensors[0].shape[1:] for t in tensors)
    return torch.cat(list(tensors)) if joinable else tuple(tensors)


def _nothing(outputs: Any) -> Tensor:
    """A loss of zero whose backward gives every output a gradient of zeros, so that every stage runs its backward."""
    ends = [tensor for tensor in as_tuple(outputs) if tensor.requires_grad]
    if not ends:
        return torch.zeros((), device=as_tuple(outputs)[0].device, requires_grad=torch.is_grad_enabled())
    return torch.stack([torch.atleast_1d(tensor)[:0].sum() for tensor in ends]).sum()


def _numbers(counts: Sequence[Tensor | float]) -> list[float]:
    """The counts of a step, with one transfer from the device."""
    tensors = [count.detach().reshape(()) for count in counts if isinstance(count, Tensor)]
    return torch.stack(tensors).tolist() if len(tensors) == len(counts) else [float(count) for count in counts]


def _rows(tensor: Any, what: str) -> int:
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"the {what} holds a {type(tensor).__name__}; give a tensor, or a sequence of tensors")
    if tensor.dim() == 0:
        raise ConfigError(f"the {what} holds a scalar; rows are dimension 0, so give it at least one dimension")
    return int(tensor.shape[0])

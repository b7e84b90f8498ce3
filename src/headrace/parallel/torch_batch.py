"""Batches into microbatches, and the loss that makes their gradients add up to the full batch's.

The rule of this library: *losses are scaled, gradients never*. With a loss that averages over rows, the loss of each
microbatch is multiplied by its share of the rows before its backward; with a loss that sums (`reduction="sum"`), by
one. Gradients then accumulate to the full-batch gradient in any order of microbatches, over any number of steps, and
also when microbatches differ in size. Dividing gradients afterwards, the usual way, goes wrong at the second step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from headrace.errors import ConfigError

Batch = Tensor | Sequence[Tensor]
LossFunction = Callable[..., Tensor]
Reduction = Literal["mean", "sum"]


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


def row_shares(microbatches: Sequence[tuple[Tensor, ...]]) -> list[float]:
    """Each microbatch's share of all rows; equal microbatches have 1/M each."""
    rows = [int(m[0].shape[0]) if m and m[0].dim() else 1 for m in microbatches]
    total = sum(rows)
    return [count / total for count in rows]


class ScaledLoss:
    """`loss_fn`, made additive: its values over the microbatches sum to the loss of the whole batch.

    `loss_fn=None` means that the last stage returns the loss itself.
    """

    def __init__(self, loss_fn: LossFunction | None, reduction: Reduction) -> None:
        """Check the reduction."""
        if reduction not in ("mean", "sum"):
            raise ConfigError(f'reduction is "mean" or "sum" (what loss_fn does over rows); got {reduction!r}')
        self.loss_fn = loss_fn
        self.reduction = reduction

    def __call__(self, outputs: Any, targets: tuple[Tensor, ...] | None, share: float, where: str) -> Tensor:
        """The scaled loss of one microbatch; `where` names it in errors."""
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
        return loss.reshape(()) * share if self.reduction == "mean" else loss.reshape(())


def merge_outputs(outputs: Sequence[Any]) -> Any:
    """The outputs of all microbatches as one batch: rows joined; of unequal shapes, or scalars, a tuple of them."""
    if not outputs:
        return None
    if isinstance(outputs[0], tuple):
        return tuple(merge_outputs(parts) for parts in zip(*outputs, strict=True))
    tensors = cast(Sequence[Tensor], outputs)
    joinable = all(t.dim() and t.shape[1:] == tensors[0].shape[1:] for t in tensors)
    return torch.cat(list(tensors)) if joinable else tuple(tensors)


def _rows(tensor: Any, what: str) -> int:
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"the {what} holds a {type(tensor).__name__}; give a tensor, or a sequence of tensors")
    if tensor.dim() == 0:
        raise ConfigError(f"the {what} holds a scalar; rows are dimension 0, so give it at least one dimension")
    return int(tensor.shape[0])

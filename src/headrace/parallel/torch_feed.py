"""From a data pipeline to a model pipeline: each rank gets what its stages need, and builds no more than that.

The first stage needs `input_ids`, the last one `labels`; the ranks between need neither, and make no data pipeline.
Whatever iterates over dicts of arrays or tensors can feed: the rows of one dict are one step's batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import ConfigError, DataError
from headrace.parallel.torch_distributed import DistributedPipeline
from headrace.parallel.torch_group import Group

Batches = Iterable[Mapping[str, Any]]


def feed(
    pipeline: DistributedPipeline,
    make_batches: Callable[[], Batches],
    *,
    inputs: str | Sequence[str] = "input_ids",
    targets: str | Sequence[str] = "labels",
    microbatch_size: int | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Yield `(batch, target)` for `pipeline.step`, the same number of times on every rank.

    `make_batches` is called on the ranks of the first and the last stage only; there it must give the same batches in
    the same order (the data pipeline's promise for ranks of one data-parallel group). `microbatch_size` checks that each
    batch has `num_microbatches x microbatch_size` rows, so that both pipelines read the numbers from one place.

        for batch, target in feed(pipeline, lambda: data.batches()):
            loss = pipeline.step(batch, target).loss
    """
    ours = _Columns(
        _names(inputs) if pipeline.is_first else [],
        _names(targets) if pipeline.is_last else [],
        None if microbatch_size is None else pipeline.num_microbatches * microbatch_size,
        next((p.device for p in pipeline.parameters()), torch.device("cpu")),
    )
    source = iter(make_batches()) if pipeline.is_first or pipeline.is_last else None
    step = 0
    while True:
        found: tuple[Any, Any] | None = None
        error: Exception | None = None
        try:
            row = None if source is None else next(source, None)
            found = None if row is None else ours.of(row, step)
        except Exception as caught:  # noqa: BLE001 - every rank must learn of it, before this one raises
            error = caught
        with pipeline.guarded():
            counts = _counts(pipeline.group, source is not None, found is not None, error)
        if not _all_have_one(counts, found is not None, pipeline.group.rank, error, step):
            return
        yield found or (None, None)
        step += 1


@dataclass(frozen=True)
class _Columns:
    """What a rank takes from each batch."""

    inputs: list[str]
    targets: list[str]
    rows: int | None
    device: torch.device

    def of(self, row: Mapping[str, Any], step: int) -> tuple[Any, Any]:
        """Inputs and targets as tensors: one alone, a tuple of several, or None."""
        return self._pick(row, self.inputs, step), self._pick(row, self.targets, step)

    def _pick(self, row: Mapping[str, Any], names: list[str], step: int) -> Any:
        for name in names:
            if name not in row:
                raise DataError(
                    f"the batch of step {step} has no {name!r}, only {', '.join(map(repr, row))}; name the columns with "
                    "inputs=... and targets=..."
                )
            if self.rows is not None and len(row[name]) != self.rows:
                raise ConfigError(
                    f"the batch of step {step} has {len(row[name])} rows of {name!r}; num_microbatches x microbatch_size is "
                    f"{self.rows}: set both pipelines from the same numbers"
                )
        tensors = tuple(_tensor(row[name]).to(self.device, non_blocking=True) for name in names)
        return tensors[0] if len(tensors) == 1 else tensors or None


def _counts(group: Group, feeds: bool, has: bool, error: Exception | None) -> tuple[int, int, int]:
    """How many ranks feed, have another batch, and could not read one."""
    counts = torch.tensor([int(feeds), int(has), int(error is not None)], device=group.device)
    dist.all_reduce(counts, group=group.handle)
    feeding, having, failing = (int(c) for c in counts)
    return feeding, having, failing


def _all_have_one(counts: tuple[int, int, int], has: bool, rank: int, error: Exception | None, step: int) -> bool:
    """Whether the feeding ranks have another batch; an error on every rank if only some have, or one could not read."""
    feeding, having, failing = counts
    if error is not None:
        raise error
    if failing:
        raise DataError(
            f"another rank of this pipeline could not read its batch of step {step}; its own error says why"
        )
    if 0 < having < feeding:
        raise DataError(
            f"at step {step} {having} of {feeding} feeding ranks have another batch (rank {rank} has "
            f"{'one' if has else 'none'}); the first and the last stage must read the same data: same recipe, same "
            "position, same data-parallel rank"
        )
    return having > 0


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _names(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)

"""`batch`: rows of a lane in groups of a fixed number.

A batch is a view where its rows lie in one block, and one concatenation where they do not. The partial batch is carried
over flushes (a flush is an internal event; it must not cost rows), so `batch` is the one operator that may hold rows
after a flush. With `drop_last=False` a short batch leaves at every flush instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from headrace.arguments import flag, whole_number
from headrace.core.block import Block, Drop, Ints, Origin, concat_blocks
from headrace.core.op import Fields
from headrace.core.tokens import count_tokens

_NAME: Final = "batch"


@dataclass(frozen=True, slots=True)
class Batch:
    """Group rows into blocks of exactly `microbatch_size`."""

    microbatch_size: int
    drop_last: bool = True

    def __post_init__(self) -> None:
        """Refuse sizes below one, and what is no flag."""
        size = whole_number("batch: microbatch_size", self.microbatch_size, 1)
        object.__setattr__(self, "microbatch_size", size)
        flag("batch: drop_last", self.drop_last)

    @property
    def name(self) -> str:
        """Shown by explain()."""
        return _NAME

    @property
    def reorders(self) -> bool:
        """Rows keep their order, so no flush is needed for its sake."""
        return False

    def describe(self) -> dict[str, Any]:
        """Parameters that decide data."""
        return {"microbatch_size": self.microbatch_size, "drop_last": self.drop_last}

    def needs(self, downstream: Fields) -> Fields:
        """Whatever is wanted of its output."""
        return downstream

    def accumulator(self, lane: int) -> BatchAccumulator:
        """The open batch of one lane."""
        return BatchAccumulator(self, lane)


class BatchAccumulator:
    """Rows that wait for their batch to fill; fewer than `microbatch_size`."""

    def __init__(self, spec: Batch, lane: int) -> None:
        """Hold nothing."""
        self._size, self._drop_last, self._lane = spec.microbatch_size, spec.drop_last, lane
        self._held: list[Block] = []
        self._count = 0

    def push(self, block: Block) -> list[Block]:
        """Batches that are full now."""
        size, total, at = self._size, len(block), 0
        out: list[Block] = []
        if self._count and self._count + total >= size:
            at = size - self._count
            out.append(concat_blocks([*self._held, block.slice(0, at)]))
            self._held, self._count = [], 0
        while total - at >= size:
            out.append(block.slice(at, at + size))
            at += size
        if at < total:
            self._held.append(block.slice(at, total) if at else _bare(block))
            self._count += total - at
        if block.drops:
            out[:1] = [(out[0] if out else block.slice(0, 0)).dropping(*block.drops)]
        return out

    def flush(self) -> list[Block]:
        """Nothing, or the short batch with `drop_last=False`."""
        return [] if self._drop_last else self._rest()

    def end(self) -> list[Block]:
        """The short batch, or word that its rows are dropped."""
        rest = self._rest()
        if not rest or not self._drop_last:
            return rest
        drop = Drop(_NAME, "last partial batch", _begun_in(rest[0].origin), count_tokens(rest[0]))
        return [rest[0].slice(0, 0).dropping(drop)]

    def held(self) -> Origin:
        """The open batch, in order."""
        return Origin.concat([block.origin for block in self._held]) if self._held else Origin.empty()

    def state(self) -> dict[str, Any]:
        """Nothing beside the held rows."""
        return {}

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """Hold these rows again."""
        self._held = [] if held is None or not len(held) else [_bare(held)]
        self._count = sum(map(len, self._held))

    def _rest(self) -> list[Block]:
        rest = [concat_blocks(self._held)] if self._held else []
        self._held, self._count = [], 0
        return rest


def _bare(block: Block) -> Block:
    """The same rows without their drops, which have been passed on."""
    return block.slice(0, len(block)) if block.drops else block


def _begun_in(origin: Origin) -> Ints:
    """Records that begin in these rows; a document continued from an earlier row was delivered there."""
    return origin.ids if origin.spans is None else origin.ids[origin.spans[:, 0] == 0]

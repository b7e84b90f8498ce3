"""`shuffle_strategy`: documents are put in another order, window by window, before they are packed.

A window is 1024 consecutive documents of the lane (or what there is of them at a flush). `"random"` permutes it;
`"length"` sorts it, longest first and equal lengths as they came. That fills bins better if there are about as many as a
window makes rows; with few bins it does harm, because long documents then meet no short ones.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from headrace.core import rng
from headrace.core.block import CHUNK, OFFSET, PIECE, Block, Ints, Origin, concat_blocks
from headrace.ops.pack.domains import Packer
from headrace.ops.pack.fields import lengths_of_documents

WINDOW: Final = 1024


class OrderedPacker:
    """A window of documents in front of a packer."""

    def __init__(self, packer: Packer, strategy: str, seed: int, tokens_field: str, lane: int) -> None:
        """Hold nothing."""
        self._packer, self._strategy, self._seed, self._field, self._lane = packer, strategy, seed, tokens_field, lane
        self._window: list[Block] = []
        self._count = 0

    def push(self, block: Block) -> list[Block]:
        """Pack every window that is full now."""
        out: list[Block] = []
        at, total = 0, len(block)
        while total - at >= (need := WINDOW - self._count):
            self._hold(block.slice(at, at + need))
            out += self._release()
            at += need
        if at < total:
            self._hold(block.slice(at, total))
        if block.drops:
            out = out or [block.slice(0, 0)]
            out[0] = out[0].dropping(*block.drops)
        return out

    def flush(self) -> list[Block]:
        """Pack what the window holds, then flush the packer."""
        return [*(self._release() if self._count else []), *self._packer.flush()]

    end = flush

    def held(self) -> Origin:
        """What the packer holds, then the window."""
        window = Origin.concat([block.origin for block in self._window]) if self._window else Origin.empty()
        return Origin.concat([self._packer.held(), window])

    def state(self) -> dict[str, Any]:
        """How many of the held documents are the packer's, and its state."""
        return {"packed": len(self._packer.held()), "packer": self._packer.state()}

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """Give each its documents back."""
        packed = int(state["packed"])
        self._packer.restore(state["packer"], held.slice(0, packed) if held is not None and packed else None)
        self._window, self._count = [], 0
        if held is not None and len(held) > packed:
            self._hold(held.slice(packed, len(held)))

    def begun(self) -> Ints:
        """Tokens of each held document that have left; the window holds whole ones."""
        return np.concatenate([self._packer.begun(), np.zeros(self._count, np.int64)])

    def adopt(self, documents: Block, begun: Ints) -> list[Block]:
        """Documents that were begun go to the packer at once, the others through the window."""
        first, others = (begun > 0).nonzero()[0], (begun == 0).nonzero()[0]
        return [*self._packer.adopt(documents.take(first), begun[first]), *self.push(documents.take(others))]

    def _hold(self, block: Block) -> None:
        self._window.append(block)
        self._count += len(block)

    def _release(self) -> list[Block]:
        block = concat_blocks(self._window)
        self._window, self._count = [], 0
        return self._packer.push(block.take(self._order(block)))

    def _order(self, block: Block) -> Ints:
        if self._strategy == "length":
            return np.argsort(-lengths_of_documents(block, self._field), kind="stable")
        place = [int(block.origin.ids[0, column]) for column in (CHUNK, OFFSET, PIECE)]
        key = rng.key(self._seed, "pack_flat", "window", self._lane, *place)
        return rng.shuffled(key, len(block))

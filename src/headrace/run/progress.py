"""The consumer's side of a lane: how far it has got, and so what a checkpoint holds.

A cut counts once the batch after it is delivered. So the state after `n` batches rests on the newest cut *before* batch `n`,
whatever else has arrived, and is the same in every run (law 4).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from headrace.core.block import CHUNK
from headrace.core.checkpoint import LaneState, Span
from headrace.core.message import Cut


class LaneProgress:
    """Cuts and deliveries of one lane, as the consumer sees them."""

    def __init__(
        self,
        start: LaneState,
        sources: dict[int, dict[str, Any]],
        released: dict[int, list[Span]],
        cut_every: int,
    ) -> None:
        self._start, self._sources, self._released, self._cut_every = start, sources, released, cut_every
        self._cut: Cut | None = None
        self._pending: Cut | None = None
        self._taken = start.taken

    def passed(self, cut: Cut) -> None:
        """A cut has arrived. One that operators passed before a change on purpose was complete is nothing to rest on."""
        if not self._start.changes or cut.position >= self._start.changes[-1].until:
            self._pending = cut

    def took(self) -> None:
        """A batch was delivered (or skipped, if another group delivers it)."""
        if self._pending is not None:
            self._cut, self._pending, self._taken = self._pending, None, 0
            needed = self._chunks_needed(self._cut)
            for chunk in [c for c in list(self._sources) if c < min(needed)]:
                del self._sources[chunk]
            for position in [p for p in list(self._released) if p < self._cut.position]:
                del self._released[position]
        self._taken += 1

    def _chunks_needed(self, cut: Cut | None) -> set[int]:
        if cut is None:
            return {self._start.chunk, *self._start.sources}
        held = [np.unique(op.held.ids[:, CHUNK]).tolist() for op in cut.states]
        return {cut.chunk, *(c for chunks in held for c in chunks)}

    def state(self, untold: int = 0) -> LaneState:
        """What a checkpoint holds of this lane. `untold`: further batches that were delivered elsewhere and not seen here."""
        cut, taken = self._cut, self._taken
        if untold and self._pending is not None:
            cut, taken = self._pending, 0
        taken += untold
        if cut is None:
            start = self._start
            order = self._order(start.position) or start.released
            until = start.until if taken == start.taken else self._next_cut(max(start.until, start.position + 1))
            return replace(start, taken=taken, released=order, until=until)
        sources = {chunk: self._sources[chunk] for chunk in self._chunks_needed(cut)}
        order, until = self._order(cut.position), self._next_cut(cut.position + 1)
        changed = self._start.ever_changed
        return LaneState(
            cut.chunk, cut.offset, cut.position, taken, sources, cut.states, order, until, ever_changed=changed
        )

    def _next_cut(self, position: int) -> int:
        """The first regular cut at this position or later."""
        return -(-position // self._cut_every) * self._cut_every

    def _order(self, position: int) -> tuple[Span, ...]:
        return tuple(self._released.get(position, ()))

    def incomplete_from(self) -> set[int]:
        """Chunks that may still have records on their way: those after the cut, and those that held records came from."""
        return self._chunks_needed(self._cut)

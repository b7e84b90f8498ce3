"""What a lane does, on the run's counters: each sample in the run that delivers or drops it, and in no other.

A restored lane begins at its cut, and first repeats the batches that were delivered since. So of what passes here

* samples of repeated batches, and samples dropped that lie before the newest of those, are not handed out, delivered or dropped by
  this run. They count as `replayed`, once all of them have come past;
* samples that operators held at the cut are handed out by this run as they leave it, delivered or dropped;
* everything else is handed out as it leaves the curriculum.

Then `delivered + dropped == handed out` for each run of a chain, and `delivered` adds up over the chain. A drop without samples
(tokens cut off) that comes up during the repetition belongs to the run before.

Where operators were changed on purpose, those that will begin anew are repeated for the sake of what they delivered alone: what
they drop meanwhile comes again, and is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from headrace.core.block import CHUNK, OFFSET, PIECE, Drop, Ints, Origin
from headrace.core.checkpoint import LaneState
from headrace.observe.counters import Counters
from headrace.run.stage import StageResult


class Account:
    """Of one lane, from its start on."""

    def __init__(self, counters: Counters, start: LaneState) -> None:
        """`start` says what is repeated, and where the cut lies."""
        self._counters = counters
        self._cut = _key(start.chunk, start.offset)
        self._left = start.taken_in_all
        self._handed: list[Ints] = []
        self._repeated: list[Origin] = []
        self._drops: list[Drop] = []
        self._refused: list[int] = []
        self.void_from: int | None = None
        """The first of the stages that will begin anew."""

    def hand_out(self, ids: Ints) -> None:
        """Pointers leave the curriculum."""
        if self._left:
            self._handed.append(ids)
        else:
            self._counters.hand_out(ids)

    def finished(self, result: StageResult, stage: int) -> None:
        """A stage's workers are done with a block: take over what it says of records that are not in it."""
        if self._void(stage):
            result.faults = []
        elif self._left:
            self._refused += [_keys(fault.ids[None])[0] for fault in result.faults]
        self.drop(result.block.drops, stage)
        result.block.drops = ()

    def drop(self, drops: Iterable[Drop], stage: int) -> None:
        """Samples end in a stage."""
        if self._void(stage):
            return
        for drop in drops:
            self._counters.tell(drop)
            if self._left:
                self._drops.append(drop)
            else:
                self._count(drop)

    def deliver(self, origin: Origin) -> None:
        """A batch or record leaves the lane."""
        if self._left:
            self._repeated.append(origin)
            self._left -= 1
            if not self._left:
                self.close()
        elif self._cut and len(origin.ids) and origin.ids[:, CHUNK].min() <= self._cut >> 32:
            self._hand_out_held(origin.begun())

    def close(self) -> None:
        """The repetition is over: count what came past meanwhile and is of this run."""
        self._left = 0
        newest = max((int(_keys(origin.ids).max()) for origin in self._repeated if len(origin.ids)), default=-1)
        gone = [origin.begun() for origin in self._repeated]
        for drop in self._drops:
            later = _keys(drop.ids) > newest
            gone.append(drop.ids[~later])
            if later.any() or newest < 0:
                self._count(drop._replace(ids=drop.ids[later]))
        replayed = _first_pieces(np.concatenate(gone)) if gone else _NOBODY
        for ids in self._handed:
            self._counters.hand_out(ids[~np.isin(_keys(ids), _keys(replayed))])
        if len(replayed):
            self._counters.replayed.add(replayed)
        self._counters.refused -= sum(key <= newest for key in self._refused)
        self._handed, self._repeated, self._drops, self._refused = [], [], [], []

    def _void(self, stage: int) -> bool:
        return self.void_from is not None and stage >= self.void_from

    def _count(self, drop: Drop) -> None:
        self._hand_out_held(drop.ids)
        self._counters.count(drop)

    def _hand_out_held(self, ids: Ints) -> None:
        """Of samples that leave: those that were handed out before the cut, and held there."""
        if self._cut and len(held := ids[_keys(ids) < self._cut]):
            self._counters.hand_out(held)


_NOBODY = Origin.empty().ids


def _key(chunk: int, offset: int) -> int:
    return (chunk << 32) | offset


def _keys(ids: Ints) -> Ints:
    """Place of each sample in its lane."""
    return (ids[:, CHUNK] << 32) | ids[:, OFFSET]


def _first_pieces(ids: Ints) -> Ints:
    return ids[ids[:, PIECE] == 0]

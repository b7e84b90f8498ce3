"""What a lane does, on the run's counters: each sample in the run that delivers or drops it, and in no other.

A restored lane begins at its cut, and first repeats the batches that were delivered since. So of what passes here

* samples of repeated batches, and what was dropped before the newest of those, are not handed out, delivered or dropped by this
  run. They count as `replayed`, once all of them have come past;
* samples that operators held at the cut are handed out by this run as they leave it, delivered or dropped;
* everything else is handed out as it leaves the curriculum.

Then `delivered + dropped == handed out` for each run of a chain, and `delivered` adds up over the chain.

What is dropped is read ahead of what is delivered, in blocks of any size. So a drop waits until a batch leaves that holds a sample
of its place in the lane or a later one, or a cut or the end passes, and counts then. A run that stopped there has counted just what
the run that goes on from there takes for repeated: samples, records refused and tokens cut off add up over the chain as well.
Two things are beyond that. A run has also counted what lies before batches that were finished and that nobody asked for (there
are none with runner "inline" and lanes that no groups share). And what is dropped behind an operator that reorders comes up in
the order of blocks, not of places, so that runs with unequal `micro_batch` differ by a few.

A batch, and what waited for it, belongs to the group that it is delivered to. Where groups share a lane, each computes all of it,
and counts its own.

Where operators were changed on purpose, those that will begin anew are repeated for the sake of what they delivered alone: what
they drop meanwhile comes again, and is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from headrace.core.block import CHUNK, OFFSET, PIECE, Drop, Ints, Origin
from headrace.core.checkpoint import LaneState
from headrace.core.message import Cut
from headrace.core.refusal import Refusal
from headrace.errors import RecordError
from headrace.observe.counters import SETTLE_EVERY, Counters
from headrace.run.stage import StageResult


class _Waiting(NamedTuple):
    """A drop that is not counted yet, and the places of its first and last record; -1 for one that names none."""

    first: int
    last: int
    drop: Drop


class _Refused(NamedTuple):
    """A record that an operator refused: `ids` is its row of `Origin.ids`."""

    operator: str
    ids: Ints
    refusal: Refusal

    @property
    def key(self) -> int:
        """Its place."""
        return _key(int(self.ids[CHUNK]), int(self.ids[OFFSET]))


class Account:
    """Of one lane, from its start on."""

    def __init__(self, counters: Counters, start: LaneState, groups: Iterator[int]) -> None:
        """`start` says what is repeated, and where the cut lies; `groups` to whom each batch behind that goes."""
        self._counters = counters
        self._cut = _key(start.chunk, start.offset)
        self._left = start.taken_in_all
        self._groups, self._group = groups, next(groups)
        self._handed: list[Ints] = []
        self._gone: list[Ints] = []
        self._waiting: list[_Waiting] = []
        self._refused: list[_Refused] = []
        self._due = self._due_refused = 0  # those of them that had come up when the last batch left
        self._newest = self._cut - 1
        self._passed: list[Ints] = []
        self.void_from: int | None = None
        """The first of the stages that will begin anew."""

    def hand_out(self, ids: Ints) -> None:
        """Pointers leave the curriculum."""
        if self._left:
            self._handed.append(ids)
        else:
            self._counters.hand_out(ids)

    def finished(self, result: StageResult, stage: int) -> None:
        """A stage's workers are done with a block: take over what it says of records that are not in it.

        One refused record too many is a failure behind those before it.
        """
        self.drop(result.block.drops, stage)
        result.block.drops = ()
        for fault in () if self._void(stage) else result.faults:
            try:
                self._refuse(_Refused(fault.operator, fault.ids, Refusal(fault.reason, fault.payload)))
            except RecordError as error:
                result.block, result.failure = result.block.slice(0, fault.before), error
                return

    def drop(self, drops: Iterable[Drop], stage: int) -> None:
        """Samples end in a stage."""
        if self._void(stage):
            return
        for drop in drops:
            if drop.refusal is not None:
                self._refuse(_Refused(drop.operator, drop.ids[0], drop.refusal))
            keys = _places(drop)
            first, last = (int(keys.min()), int(keys.max())) if len(keys) else (-1, -1)
            with self._counters.lock:
                self._waiting.append(_Waiting(first, last, drop))

    def deliver(self, origin: Origin) -> None:
        """A batch or record leaves the lane."""
        shared = self._counters.shared
        if self._left:
            self._gone.append(origin.begun())
        else:
            if self._cut and len(origin.ids) and origin.ids[:, CHUNK].min() <= self._cut >> 32:
                self._hand_out_held(origin.begun())
            if shared:
                self._counters.share(self._group).left.add(origin.ids, origin.spans)
        with self._counters.lock:
            self._passed.append(origin.ids)
            self._due = len(self._waiting)
            self._due_refused = len(self._refused)
            if shared or self._left == 1 or len(self._passed) >= SETTLE_EVERY:
                self._settle()
        if not self._left:
            if shared:
                self._group = next(self._groups)
        elif self._left == 1:
            self._caught_up()
        else:
            self._left -= 1

    def passed(self, cut: Cut) -> None:
        """A cut leaves the lane, and so has everything before it."""
        with self._counters.lock:
            self._end_at(_key(cut.chunk, cut.offset) - 1)

    def close(self) -> None:
        """The lane is over."""
        if self._left:
            self._caught_up()
        with self._counters.lock:
            self._end_at(_BEHIND_ALL)

    def settle(self) -> None:
        """Count what is due, on any thread."""
        with self._counters.lock:
            if not self._left:
                self._settle()

    def _caught_up(self) -> None:
        """The repetition is over: count what came past meanwhile and is of this run."""
        self._left = 0
        replayed = _first_pieces(np.concatenate(self._gone)) if self._gone else _NOBODY
        for ids in self._handed:
            self._counters.hand_out(ids[~np.isin(_keys(ids), _keys(replayed))])
        if len(replayed):
            self._counters.replayed.add(replayed)
        self._handed, self._gone = [], []
        for one in self._refused:
            self._tell(one)

    def _refuse(self, one: _Refused) -> None:
        """A record was refused. One that comes again was told of by the run before; which it is shows as batches are repeated."""
        with self._counters.lock:
            self._refused.append(one)
        if not self._left:
            self._tell(one)

    def _tell(self, one: _Refused) -> None:
        if self._counters.log is not None:
            self._counters.log(one.operator, one.ids.tolist(), one.refusal)

    def _end_at(self, place: int) -> None:
        self._newest = max(self._newest, place)
        self._due, self._due_refused = len(self._waiting), len(self._refused)
        self._settle()

    def _settle(self) -> None:
        """Count what had come up when the last batch left, up to the newest place that any has left from."""
        if self._passed:
            self._newest = max(self._newest, int(_keys(np.concatenate(self._passed)).max(initial=-1)))
            self._passed = []
        newest, due = self._newest, self._waiting[: self._due]
        waiting: list[_Waiting] = []
        for one in due:
            if one.first > newest:
                waiting.append(one)
            elif one.last <= newest:
                self._count(one.drop)
            else:
                before, behind = _parted(one.drop, newest)
                self._count(before)
                waiting.append(_Waiting(newest + 1, one.last, behind))
        if due:
            self._waiting[: self._due] = waiting
            self._due = len(waiting)
        if refused := self._refused[: self._due_refused]:
            left = [one for one in refused if one.key > newest]
            if not self._left:
                self._counters.share(self._group).refused += len(refused) - len(left)
            self._refused[: self._due_refused] = left
            self._due_refused = len(left)

    def _void(self, stage: int) -> bool:
        return self.void_from is not None and stage >= self.void_from

    def _count(self, drop: Drop) -> None:
        if self._left:
            self._gone.append(drop.ids)
        else:
            self._hand_out_held(drop.ids)
            self._counters.count(drop, self._group)

    def _hand_out_held(self, ids: Ints) -> None:
        """Of samples that leave: those that were handed out before the cut, and held there."""
        if self._cut and len(held := ids[_keys(ids) < self._cut]):
            self._counters.hand_out(held)


_NOBODY = Origin.empty().ids
_BEHIND_ALL = 1 << 62


def _parted(drop: Drop, newest: int) -> tuple[Drop, Drop]:
    """A drop up to a place, and behind it. Tokens that are not known by record are lost with the last one."""
    ids, tokens_of = drop.ids, drop.tokens_of
    later = _keys(ids) > newest
    if tokens_of is None:
        return drop._replace(ids=ids[~later], tokens=0), drop._replace(ids=ids[later])
    behind = _token_keys(tokens_of) > newest
    tokens = int(tokens_of[behind, 2].sum())
    return (
        drop._replace(ids=ids[~later], tokens=drop.tokens - tokens, tokens_of=tokens_of[~behind]),
        drop._replace(ids=ids[later], tokens=tokens, tokens_of=tokens_of[behind]),
    )


def _places(drop: Drop) -> Ints:
    """Places of the records that a drop names."""
    keys = _keys(drop.ids)
    return keys if drop.tokens_of is None else np.concatenate([keys, _token_keys(drop.tokens_of)])


def _key(chunk: int, offset: int) -> int:
    return (chunk << 32) | offset


def _keys(ids: Ints) -> Ints:
    """Place of each sample in its lane."""
    return (ids[:, CHUNK] << 32) | ids[:, OFFSET]


def _token_keys(tokens_of: Ints) -> Ints:
    return (tokens_of[:, 0] << 32) | tokens_of[:, 1]


def _first_pieces(ids: Ints) -> Ints:
    return ids[ids[:, PIECE] == 0]

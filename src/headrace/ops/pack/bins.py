"""`first_fit` and `best_fit`: whole documents into a fixed number of open rows.

A lane keeps `num_bins` bins. A document goes to the first bin with room (`first_fit`) or to the one it fills best
(`best_fit`); if none has room and all are in use, one is emitted (`flush_strategy`: the oldest, or the fullest) and a new
one is opened in its place. A bin also leaves when its room falls below `min_sequence_length` or it holds
`max_sequences_per_bin` documents. Which bin is decided by the algorithm, see `first_fit.py` and `best_fit.py`; this file
keeps the bins, and the documents in them as handles into a row pool, so that tokens are copied once, into their row.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.core.block import Block, Drop, Ints, Origin, Ragged
from headrace.errors import CheckpointError, RecordError
from headrace.ops.pack.fields import AlignedFields, TokenRows, left_of_begun, without_empty
from headrace.ops.pack.shape import RowShape, packed_block, pad_rows, padding_of
from headrace.ops.pool import RowPool

_NAME: Final = "pack_flat"


class Fitting(Protocol):
    """Where a document goes. Slots are numbered from 0; a slot not in use has all its room."""

    def find(self, length: int) -> int:
        """Slot of a bin in use with room for `length`, or -1."""
        ...

    def update(self, slot: int, room: int) -> None:
        """A bin in use has this much room now; -1 takes it out of use."""
        ...


@dataclass(frozen=True, slots=True)
class BinRules:
    """When a bin leaves, and what happens to a document longer than a row."""

    num_bins: int
    max_sequences: int | None
    min_room: int
    fullest_first: bool
    drop_oversized: bool


class BinPacker:
    """The open bins of one lane."""

    def __init__(
        self, fitting: type[Fitting], rules: BinRules, fields: AlignedFields, shape: RowShape, lane: int
    ) -> None:
        """Open no bin yet."""
        self._make, self._rules, self._fields, self._shape, self._lane = fitting, rules, fields, shape, lane
        self._pool = RowPool(lane)
        self._clear()

    def _clear(self) -> None:
        self._fitting = self._make(self._rules.num_bins)  # type: ignore[call-arg]
        self._open: dict[int, list[int]] = {}  # handles in each slot in use, oldest bin first
        self._rooms = [self._shape.max_length] * self._rules.num_bins
        self._free = list(range(self._rules.num_bins))  # a heap: the lowest slot is used first
        self._held = 0  # documents in open bins
        self._closers: list[int] = []  # the document that closed each bin
        self.closers: list[int] = []
        self._pool.clear()

    def push(self, block: Block) -> list[Block]:
        """Every bin that is full now, in the order in which they closed."""
        aligned = self._fields.align(block)
        rows, empty = without_empty(aligned)
        drops = block.drops
        if len(empty):
            drops = (*drops, Drop(_NAME, "empty document", empty))
        lengths = rows.offsets[1:] - rows.offsets[:-1]
        fits = lengths <= self._shape.max_length
        if not fits.all():
            drops = (*drops, self._oversized(rows, lengths, ~fits))
        first = self._pool.add(_as_block(rows, self._lane))
        self._held += int(np.count_nonzero(fits))
        self._closers = []
        closed = self._assign(lengths[fits].tolist(), (first + np.flatnonzero(fits)).tolist())
        places = (aligned.offsets[1:] > aligned.offsets[:-1]).nonzero()[0]
        self.closers = places[np.asarray(self._closers, np.int64) - first].tolist()
        out = [self._emit(closed)] if closed else []
        if self._pool.wasteful(self._held):
            self._pool.keep(self._handles())
        if drops:
            out = out or [Block(self._lane, Origin.empty(), {})]
            out[0] = out[0].dropping(*drops)
        return out

    def flush(self) -> list[Block]:
        """Every open bin, oldest first (or fullest first)."""
        order = sorted(self._open, key=self._rooms.__getitem__) if self._rules.fullest_first else self._open
        closed = [self._open[slot] for slot in order]
        out = [self._emit(closed)] if closed else []
        self._clear()
        self._fields.clear()
        return out

    end = flush

    def held(self) -> Origin:
        """Documents in open bins, by arrival."""
        return self._pool.origins(self._handles())

    def state(self) -> dict[str, Any]:
        """The slot of each held document, and the fields of the stream."""
        slots = {handle: slot for slot, handles in self._open.items() for handle in handles}
        return {"slots": [slots[handle] for handle in sorted(slots)], "fields": self._fields.state()}

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """Put each document back in its bin."""
        self._clear()
        self._fields.restore(state["fields"])
        slots = state["slots"]
        if len(slots) != (0 if held is None else len(held)):
            raise CheckpointError(
                f"{_NAME}: open rows held {len(slots)} documents and {0 if held is None else len(held)} were read back; "
                "the data or an operator before packing has changed"
            )
        if held is None or not slots:
            return
        rows = self._fields.align(held)
        first, self._held = self._pool.add(_as_block(rows, self._lane)), len(slots)
        for number, (slot, length) in enumerate(zip(slots, np.diff(rows.offsets).tolist(), strict=True)):
            self._open.setdefault(slot, []).append(first + number)
            self._rooms[slot] -= length
        for slot in self._open:
            self._fitting.update(slot, self._rooms[slot])
        self._free = [slot for slot in range(self._rules.num_bins) if slot not in self._open]

    def begun(self) -> Ints:
        """Tokens of each held document that have left: none."""
        return np.zeros(self._held, np.int64)

    def adopt(self, documents: Block, begun: Ints) -> list[Block]:
        """Take over from another packer. What is left of documents that were begun is dropped: documents stay whole here."""
        whole = (begun == 0).nonzero()[0]
        drops = left_of_begun(self._fields, documents.take((begun > 0).nonzero()[0]), begun[begun > 0])
        out = self.push(documents.take(whole).dropping(*drops) if drops else documents.take(whole))
        self.closers = whole[self.closers].tolist()
        return out

    def _oversized(self, rows: TokenRows, lengths: Ints, long: NDArray[np.bool_]) -> Drop:
        if self._rules.drop_oversized:
            drop = Drop.of_tokens(_NAME, "longer than a row", Origin(rows.ids[long]), lengths[long], whole=True)
            assert drop is not None  # they have tokens
            return drop
        row = int(np.flatnonzero(long)[0])
        dataset, shard, number = rows.ids[row, :3].tolist()
        raise RecordError(
            f"{_NAME}: a document of {lengths[row]} tokens does not fit a row of {self._shape.max_length} (dataset "
            f"{dataset}, shard {shard}, row {number}); cut documents before packing (tokenize(split_long_samples=True)), "
            "pass drop_oversized=True, or use algorithm='wrap'"
        )

    def _assign(self, lengths: list[int], arrived: list[int]) -> list[list[int]]:
        """Put documents into bins; the bins that close, in order."""
        closed: list[list[int]] = []
        opened, rooms, find, update = self._open, self._rooms, self._fitting.find, self._fitting.update
        cap, min_room = self._rules.max_sequences or (1 << 62), self._rules.min_room
        for length, handle in zip(lengths, arrived, strict=True):
            slot = find(length)
            if slot < 0:
                if not self._free:
                    self._close(self._most_urgent(), closed, handle)
                slot = heappop(self._free)
                opened[slot] = []
            documents = opened[slot]
            documents.append(handle)
            rooms[slot] = room = rooms[slot] - length
            if room < min_room or len(documents) >= cap:
                self._close(slot, closed, handle)
            else:
                update(slot, room)
        return closed

    def _close(self, slot: int, closed: list[list[int]], closer: int) -> None:
        self._closers.append(closer)
        documents = self._open.pop(slot)
        closed.append(documents)
        self._held -= len(documents)
        self._rooms[slot] = self._shape.max_length
        self._fitting.update(slot, -1)
        heappush(self._free, slot)

    def _most_urgent(self) -> int:
        """The bin that makes room for a new one; of equally full ones the oldest."""
        return min(self._open, key=self._rooms.__getitem__) if self._rules.fullest_first else next(iter(self._open))

    def _handles(self) -> Ints:
        return np.sort(np.asarray([handle for handles in self._open.values() for handle in handles], np.int64))

    def _emit(self, closed: list[list[int]]) -> Block:
        handles = np.asarray([handle for bin_ in closed for handle in bin_], np.int64)
        row_ends = np.cumsum([len(bin_) for bin_ in closed])
        pieces, lengths = self._pool.pieces(handles)
        spans = np.zeros((len(lengths), 2), np.int64)
        spans[:, 1] = lengths
        origin = Origin(self._pool.origins(handles).ids, np.concatenate([[0], row_ends]), spans)
        padding = padding_of(origin, self._shape)
        flat = pad_rows(pieces, row_ends.tolist(), padding, {self._fields.tokens: self._shape.pad_token_id or 0})
        return packed_block(self._lane, flat, origin, padding, self._shape)


def _as_block(rows: TokenRows, lane: int) -> Block:
    return Block(lane, Origin(rows.ids), {name: Ragged(v, rows.offsets) for name, v in rows.values.items()})

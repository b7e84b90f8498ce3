"""`best_fit_wrap`: full rows of long documents at once, and tight rows from a pool of what is left, cut at most once each.

A document longer than a row leaves as full rows of its own; its rest joins a pool of candidates. When the pool holds more
than `candidate_pool_size` of them, a row is built: first candidates that have waited for `max_candidate_age` arrivals, then
again and again the longest that fits, and where nothing fits the shortest is cut and gives its beginning. So no token is
padding except at a flush, few documents are cut, and the tokens of a document always leave in their order.

Candidates are found by length: the lengths that occur are the bits of one Python integer, as in `best_fit.py`.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.core.block import Block, Drop, Ints, Origin, Ragged
from headrace.errors import CheckpointError
from headrace.ops.pack.fields import AlignedFields, TokenRows, without_empty
from headrace.ops.pack.shape import RowShape, packed_block, pad_rows, padding_of
from headrace.ops.pool import RowPool

_NAME: Final = "pack_flat"

Segment = tuple[int, int, int]
"""Handle of a document, first token, number of tokens."""


@dataclass(frozen=True, slots=True)
class PoolRules:
    """When a row is built from the pool."""

    size: int
    max_age: int
    max_sequences: int | None


class BestFitWrapPacker:
    """The candidates of one lane. Documents are numbered by arrival from the last flush: number, handle and age in one."""

    def __init__(self, rules: PoolRules, fields: AlignedFields, shape: RowShape, lane: int) -> None:
        """Hold nothing."""
        self._rules, self._fields, self._shape, self._lane = rules, fields, shape, lane
        self._cap = rules.max_sequences or (1 << 62)
        self._pool = RowPool(lane)
        self._clear()

    def _clear(self) -> None:
        self._candidates = _Candidates()
        self._start: dict[int, int] = {}  # first token still here, of each candidate; oldest first
        self._pool.clear()
        self.closers: list[int] = []

    def push(self, block: Block) -> list[Block]:
        """Rows of long documents, and every row for which the pool is large enough."""
        return self.adopt(block, np.zeros(len(block), np.int64))

    def begun(self) -> Ints:
        """Tokens of each held document that have left."""
        return np.fromiter(self._start.values(), np.int64, len(self._start))

    def adopt(self, documents: Block, begun: Ints) -> list[Block]:
        """Take documents whose first `begun` tokens have left already."""
        aligned = self._fields.align(documents)
        rows, empty = without_empty(aligned)
        filled = (aligned.offsets[1:] > aligned.offsets[:-1]).nonzero()[0]
        places = filled.tolist()
        first = self._pool.add(_as_block(rows, self._lane))
        built: list[list[Segment]] = []
        self.closers = []
        lengths = (rows.offsets[1:] - rows.offsets[:-1]).tolist()
        for number, (length, start) in enumerate(zip(lengths, begun[filled].tolist(), strict=True), first):
            self._arrive(number, start, length, built)
            self.closers += [places[number - first]] * (len(built) - len(self.closers))
        out = [self._emit(built)] if built else []
        if self._pool.wasteful(len(self._start)):
            self._pool.keep(self._handles())
        drops = (*documents.drops, Drop(_NAME, "empty document", empty)) if len(empty) else documents.drops
        if drops:
            out = out or [Block(self._lane, Origin.empty(), {})]
            out[0] = out[0].dropping(*drops)
        return out

    def flush(self) -> list[Block]:
        """All candidates, in rows as tight as can be; one or few are padded."""
        built: list[list[Segment]] = []
        while self._start:
            built.append(self._build(self._pool.next_handle))
        out = [self._emit(built)] if built else []
        self._clear()
        self._fields.clear()
        return out

    end = flush

    def held(self) -> Origin:
        """Candidates by arrival."""
        return self._pool.origins(self._handles())

    def state(self) -> dict[str, Any]:
        """Number and first token of each candidate, how many arrived, and the fields of the stream."""
        numbers = list(self._start)
        return {
            "steps": [b - a for a, b in zip([0, *numbers], numbers, strict=False)],
            "starts": list(self._start.values()),
            "arrived": self._pool.next_handle,
            "fields": self._fields.state(),
        }

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """Put the candidates back."""
        self._clear()
        self._fields.restore(state["fields"])
        numbers = list(accumulate(state["steps"]))
        if len(numbers) != (0 if held is None else len(held)):
            raise CheckpointError(
                f"{_NAME}: the pool held {len(numbers)} documents and {0 if held is None else len(held)} were read back; "
                "the data or an operator before packing has changed"
            )
        rows = None if held is None else self._fields.align(held)
        kept = None if rows is None else _as_block(rows, self._lane)
        self._pool.restore(np.asarray(numbers, np.int64), kept, int(state["arrived"]))
        lengths = [] if rows is None else np.diff(rows.offsets).tolist()
        for number, start, length in zip(numbers, state["starts"], lengths, strict=True):
            self._start[number] = start
            self._candidates.add(number, length - start)

    def _arrive(self, number: int, begun: int, length: int, built: list[list[Segment]]) -> None:
        width = self._shape.max_length
        whole = length - (length - begun) % width
        built += [[(number, start, width)] for start in range(begun, whole, width)]
        if whole < length:
            self._start[number] = whole
            self._candidates.add(number, length - whole)
        while len(self._start) > self._rules.size and (
            self._candidates.tokens >= width or len(self._start) >= self._cap
        ):
            built.append(self._build(number))

    def _build(self, now: int) -> list[Segment]:
        """One row from the pool. It comes short only if the pool or the cap on segments does."""
        row: list[Segment] = []
        room = self._shape.max_length
        while room and self._start and len(row) < self._cap:
            number, length = self._choose(room, now)
            taken = min(room, length)
            row.append((number, self._start[number], taken))
            self._candidates.remove(number, length)
            if taken == length:
                del self._start[number]
            else:
                self._start[number] += taken
                self._candidates.add(number, length - taken)
            room -= taken
        return row

    def _choose(self, room: int, now: int) -> tuple[int, int]:
        """The oldest if it has waited too long and fits; else the longest that fits; else the shortest, to be cut."""
        oldest = next(iter(self._start))
        if now - oldest > self._rules.max_age and self._candidates.lengths[oldest] <= room:
            return oldest, self._candidates.lengths[oldest]
        return self._candidates.longest_within(room) or self._candidates.shortest()

    def _handles(self) -> Ints:
        return np.fromiter(self._start, np.int64, len(self._start))

    def _emit(self, built: list[list[Segment]]) -> Block:
        segments = np.asarray([segment for row in built for segment in row], np.int64)
        row_ends = np.cumsum([len(row) for row in built])
        documents, _ = self._pool.pieces(segments[:, 0])
        bounds = list(zip(segments[:, 1].tolist(), (segments[:, 1] + segments[:, 2]).tolist(), strict=True))
        pieces: dict[str, list[NDArray[Any]]] = {
            name: [values[a:b] for values, (a, b) in zip(views, bounds, strict=True)]
            for name, views in documents.items()
        }
        ids = self._pool.origins(segments[:, 0]).ids
        origin = Origin(ids, np.concatenate([[0], row_ends]), segments[:, 1:].copy())
        padding = padding_of(origin, self._shape)
        flat = pad_rows(pieces, row_ends.tolist(), padding, {self._fields.tokens: self._shape.pad_token_id or 0})
        return packed_block(self._lane, flat, origin, padding, self._shape)


class _Candidates:
    """Documents by the tokens they have left, the oldest first among equals."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self.tokens = 0
        self._by_length: dict[int, list[int]] = {}
        self._bits = 0

    def add(self, number: int, length: int) -> None:
        self.lengths[number] = length
        self.tokens += length
        insort(self._by_length.setdefault(length, []), number)
        self._bits |= 1 << length

    def remove(self, number: int, length: int) -> None:
        del self.lengths[number]
        self.tokens -= length
        same = self._by_length[length]
        same.remove(number)
        if not same:
            del self._by_length[length]
            self._bits ^= 1 << length

    def longest_within(self, room: int) -> tuple[int, int] | None:
        within = self._bits & ((1 << (room + 1)) - 1)
        if not within:
            return None
        length = within.bit_length() - 1
        return self._by_length[length][0], length

    def shortest(self) -> tuple[int, int]:
        length = (self._bits & -self._bits).bit_length() - 1
        return self._by_length[length][0], length


def _as_block(rows: TokenRows, lane: int) -> Block:
    return Block(lane, Origin(rows.ids), {name: Ragged(v, rows.offsets) for name, v in rows.values.items()})

"""Blocks: a micro-batch as columns.

A block is `n` rows of one lane, in order. Payload travels as columns, so operators work on whole arrays and the cost of
the machinery is paid per block. Four kinds of column exist:

* `numpy.ndarray`, first axis = rows: fixed-width values (`[n]`, or `[n, S]` for packed token rows);
* `Ragged`: one flat array and row offsets (token ids of documents);
* `Text`: UTF-8 bytes and row offsets (the Arrow layout), decoded only where a `str` is asked for;
* `list`: Python objects, where a user's function made them. A row without the field holds `MISSING`.

Payloads that are whole Python objects (a row of JSON, what a user's function returned) travel as `rows` instead; `column()`
looks into them, so an operator never needs to know which form it was handed.

`Origin` says where each row came from. It is one int64 matrix, because one gather of a 56-byte row is several times
cheaper than seven gathers of seven arrays. A packed row has several segments, each a token range of one source record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.core.refusal import Refusal
from headrace.core.size import objects_bytes

Ints = NDArray[np.int64]


class _Missing:
    """The value of a field that a row does not have."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "MISSING"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths: row `r` is `values[offsets[r]:offsets[r+1]]`.

    `offsets` is int64 `[n+1]` and need not begin at zero (a slice keeps its parent's values).
    """

    values: NDArray[Any]
    offsets: Ints

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> Ints:
        """Length of each row, int64 `[n]`."""
        return np.diff(self.offsets)

    @property
    def flat(self) -> NDArray[Any]:
        """Values of just these rows, `[total]`."""
        return self.values[self.offsets[0] : self.offsets[-1]]

    @classmethod
    def from_rows(cls, rows: Sequence[NDArray[Any]], dtype: Any = np.int32) -> Ragged:
        """Join arrays, one per row."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        values = np.concatenate([np.asarray(row) for row in rows]) if rows else np.empty(0, dtype)
        return cls(values, offsets)


@dataclass(frozen=True, slots=True)
class Text:
    """UTF-8 text: row `r` is `data[offsets[r]:offsets[r+1]]`, `data` uint8."""

    data: NDArray[np.uint8]
    offsets: Ints

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row_bytes(self, row: int) -> bytes:
        """UTF-8 bytes of one row."""
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()

    def to_bytes(self) -> list[bytes]:
        """UTF-8 bytes of each row."""
        view, ends = memoryview(self.data.data), self.offsets.tolist()
        return [bytes(view[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)]

    def to_views(self) -> list[memoryview]:
        """UTF-8 bytes of each row, not copied."""
        view, ends = memoryview(self.data.data), self.offsets.tolist()
        return [view[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]

    def to_str(self) -> list[str]:
        """Each row decoded."""
        view, ends = memoryview(self.data.data), self.offsets.tolist()
        return [str(view[a:b], "utf-8") for a, b in zip(ends[:-1], ends[1:], strict=True)]

    @classmethod
    def from_bytes(cls, rows: Sequence[bytes | memoryview]) -> Text:
        """Join UTF-8 rows."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.frombuffer(b"".join(rows), np.uint8), offsets)


Column = NDArray[Any] | Ragged | Text | list[Any]


# ---------------------------------------------------------------------------------------------------
# Columns: the same four verbs for every kind
# ---------------------------------------------------------------------------------------------------


def slice_column(column: Column, start: int, stop: int) -> Column:
    """Rows `start:stop` as a view (lists are copied)."""
    match column:
        case Ragged():
            return Ragged(column.values, column.offsets[start : stop + 1])
        case Text():
            return Text(column.data, column.offsets[start : stop + 1])
        case _:
            return column[start:stop]


def take_column(column: Column, index: Ints) -> Column:
    """Rows in the order of `index` (repeats allowed)."""
    match column:
        case Ragged():
            values, offsets = take_ragged(column.values, column.offsets, index)
            return Ragged(values, offsets)
        case Text():
            data, offsets = take_ragged(column.data, column.offsets, index)
            return Text(data, offsets)
        case list():
            return [column[i] for i in index.tolist()]
        case _:
            return column[index]


def take_ragged(values: NDArray[Any], offsets: Ints, index: Ints) -> tuple[NDArray[Any], Ints]:
    """Gather variable-length rows; runs of consecutive rows are copied as one piece."""
    starts, ends = offsets[index], offsets[index + 1]
    out = np.zeros(len(index) + 1, np.int64)
    np.cumsum(ends - starts, out=out[1:])
    if not len(index):
        return values[:0], out
    breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    firsts = np.concatenate([[0], breaks])
    lasts = np.concatenate([breaks, [len(index)]]) - 1
    pieces = [values[a:b] for a, b in zip(starts[firsts].tolist(), ends[lasts].tolist(), strict=True)]
    return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)), out


def column_form(column: Column) -> Any:
    """What columns must have in common to be joined as they are: kind, and for numbers type and shape of a row.

    Joining two types of numbers would make a third of them, so that a row's value would depend on its neighbours: 2**60 + 1
    beside a float is no longer itself.
    """
    match column:
        case Ragged():
            return Ragged, column.values.dtype, column.values.shape[1:]
        case np.ndarray():
            return np.ndarray, column.dtype, column.shape[1:]
        case _:
            return type(column)


def concat_columns(columns: Sequence[Column]) -> Column:
    """Rows of each, one after the other. Unlike forms become a list of the rows' own values."""
    columns = [column for column in columns if len(column)] or columns[:1]
    first = columns[0]
    if len(columns) == 1:
        return first
    form = column_form(first)
    if not all(column_form(column) == form for column in columns[1:]):
        return [value for column in columns for value in to_list(column)]
    return _join_like(first, columns)


def _join_like(first: Column, same: Sequence[Any]) -> Column:
    """Rows of columns of one form."""
    match first:
        case Ragged():
            return Ragged(np.concatenate([c.flat for c in same]), _join_offsets([c.offsets for c in same]))
        case Text():
            data = [c.data[c.offsets[0] : c.offsets[-1]] for c in same]
            return Text(np.concatenate(data), _join_offsets([c.offsets for c in same]))
        case list():
            return [value for column in same for value in column]
        case _:
            return np.concatenate(same)


def _join_offsets(offsets: Sequence[Ints]) -> Ints:
    lengths = np.concatenate([np.diff(o) for o in offsets])
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def to_list(column: Column) -> list[Any]:
    """One Python value per row: str for text, array views for ragged and 2-D rows, Python scalars for 1-D arrays."""
    match column:
        case Ragged():
            ends = column.offsets.tolist()
            return [column.values[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]
        case Text():
            return column.to_str()
        case list():
            return column
        case _:
            return column.tolist() if column.ndim == 1 else list(column)


def column_bytes(column: Column) -> int:
    """Payload bytes; of objects, about as many."""
    match column:
        case Ragged():
            return int(column.offsets[-1] - column.offsets[0]) * column.values.itemsize
        case Text():
            return int(column.offsets[-1] - column.offsets[0])
        case list():
            return objects_bytes(column)
        case _:
            return column.nbytes


# ---------------------------------------------------------------------------------------------------
# Origin
# ---------------------------------------------------------------------------------------------------

DATASET, SHARD, ROW, COMPONENT, CHUNK, OFFSET, PIECE = range(7)
ORIGIN_WIDTH: Final = 7


@dataclass(frozen=True, slots=True)
class Origin:
    """Where rows came from.

    `ids` is int64 `[m, 7]`: dataset id, shard id, row in the shard, component id, chunk number in the lane, offset in the
    chunk, piece (ordinal among the pieces that one sample was split into). Without `rows`, row `r` is `ids[r]`. With
    `rows` (int64 `[n+1]`, beginning at zero), row `r` is made of the segments `rows[r]:rows[r+1]`, and `spans` (int64
    `[m, 2]`) holds the start and length in tokens that each segment takes of its piece.
    """

    ids: Ints
    rows: Ints | None = None
    spans: Ints | None = None

    def __len__(self) -> int:
        return len(self.ids) if self.rows is None else len(self.rows) - 1

    def slice(self, start: int, stop: int) -> Origin:
        """Rows `start:stop`."""
        if self.rows is None:
            return Origin(self.ids[start:stop])
        a, b = int(self.rows[start]), int(self.rows[stop])
        return Origin(self.ids[a:b], self.rows[start : stop + 1] - a, None if self.spans is None else self.spans[a:b])

    def begun(self) -> Ints:
        """The records that begin in these rows, int64 `[k, 7]`: all but segments of packed rows that go on from earlier ones."""
        return self.ids if self.spans is None else self.ids[self.spans[:, 0] == 0]

    def firsts(self) -> Ints:
        """The first segment of each row, int64 `[n, 7]`; -1 for a row of nothing but padding."""
        if self.rows is None:
            return self.ids
        empty = self.rows[1:] == self.rows[:-1]
        if not np.count_nonzero(empty):
            return self.ids.take(self.rows[:-1], axis=0)
        firsts = np.full((len(self), self.ids.shape[1]), -1, np.int64)
        firsts[~empty] = self.ids[self.rows[:-1][~empty]]
        return firsts

    def take(self, index: Ints) -> Origin:
        """Rows in the order of `index`."""
        if self.rows is None:
            return Origin(self.ids[index])
        ids, rows = take_ragged(self.ids, self.rows, index)
        return Origin(ids, rows, None if self.spans is None else take_ragged(self.spans, self.rows, index)[0])

    def with_piece(self, piece: Ints) -> Origin:
        """The same rows with other piece ordinals, int64 `[n]`."""
        ids = self.ids.copy()
        ids[:, PIECE] = piece
        return replace(self, ids=ids)

    @staticmethod
    def concat(origins: Sequence[Origin]) -> Origin:
        """Rows of each, one after the other."""
        if len(origins) == 1:
            return origins[0]
        ids = np.concatenate([o.ids for o in origins])
        if all(o.rows is None for o in origins):
            return Origin(ids)
        packed = [o if o.rows is not None else Origin(o.ids, np.arange(len(o.ids) + 1)) for o in origins]
        rows = _join_offsets([o.rows for o in packed if o.rows is not None])
        spans = [o.spans for o in packed if o.spans is not None]
        return Origin(ids, rows, np.concatenate(spans) if len(spans) == len(packed) else None)

    @staticmethod
    def empty() -> Origin:
        """No rows."""
        return Origin(np.empty((0, ORIGIN_WIDTH), np.int64))


# ---------------------------------------------------------------------------------------------------
# Block
# ---------------------------------------------------------------------------------------------------


class Drop(NamedTuple):
    """Samples that end here, and why. `ids` int64 `[k, 7]`; `tokens` lost with them (or from within them).

    `refusal`: what is to be logged of a record that a stateful operator refused. `tokens_of`, int64 `[m, 3]`: chunk and offset
    of each record that tokens were lost of, and how many, where that is known.
    """

    operator: str
    reason: str
    ids: Ints
    tokens: int = 0
    refusal: Refusal | None = None
    tokens_of: Ints | None = None

    @classmethod
    def of_tokens(cls, operator: str, reason: str, origin: Origin, lost: Ints, *, whole: bool = False) -> Drop | None:
        """Tokens lost of rows, `lost` int64 `[n]`, or of rows that end here with them (`whole`). None if there are none."""
        rows = lost.nonzero()[0]
        if not len(rows):
            return None
        tokens_of = np.empty((len(rows), 3), np.int64)
        tokens_of[:, :2] = origin.firsts()[rows][:, [CHUNK, OFFSET]]
        tokens_of[:, 2] = lost[rows]
        return cls(operator, reason, origin.ids if whole else origin.ids[:0], int(lost.sum()), None, tokens_of)


class RowDigests(NamedTuple):
    """What the payload of each row is known by: `words` uint64 `[n, w]`, of fields and kinds that `header` names."""

    header: bytes
    words: NDArray[np.uint64]


@dataclass(slots=True)
class Block:
    """`n` rows of one lane, in order. Exactly one of `columns` and `rows` holds the payload.

    `digests` follow the rows for as long as their payload is the same (`core.digest`); None: not taken.
    """

    lane: int
    origin: Origin
    columns: dict[str, Column] | None = None
    rows: list[Any] | None = None
    drops: tuple[Drop, ...] = field(default=())
    digests: RowDigests | None = None

    def __len__(self) -> int:
        rows = self.origin.rows
        return len(self.origin.ids) if rows is None else len(rows) - 1

    def column(self, name: str) -> Column:
        """A field as a column; `MISSING` where a row lacks it. A dot path descends into nested mappings."""
        if self.columns is not None:
            if name in self.columns:
                return self.columns[name]
            head, _, rest = name.partition(".")
            if rest and head in self.columns:
                return [lookup(value, rest) for value in to_list(self.columns[head])]
            return [MISSING] * len(self)
        assert self.rows is not None
        return [lookup(row, name) for row in self.rows]

    def payloads(self) -> list[Any]:
        """One payload per row: the row objects, or a fresh dict per row built from the columns."""
        if self.rows is not None:
            return self.rows
        assert self.columns is not None
        if not self.columns:
            return [{} for _ in range(len(self))]
        if len(self.columns) == 1:
            ((name, column),) = self.columns.items()
            rows = [{name: value} for value in to_list(column)]
        else:
            names = tuple(self.columns)
            rows = [dict(zip(names, values)) for values in zip(*map(to_list, self.columns.values()))]  # noqa: B905  equal by construction, and hot
        if any(isinstance(c, list) and any([v is MISSING for v in c]) for c in self.columns.values()):  # noqa: C419  a list is twice as fast
            rows = [{k: v for k, v in row.items() if v is not MISSING} for row in rows]
        return rows

    def as_columns(self) -> dict[str, Column]:
        """The payload as columns; rows that are mappings are taken apart, field by field."""
        if self.columns is not None:
            return self.columns
        assert self.rows is not None
        names = list(dict.fromkeys(name for row in self.rows if isinstance(row, Mapping) for name in row))
        return {name: [lookup(row, name) for row in self.rows] for name in names}

    def slice(self, start: int, stop: int) -> Block:
        """Rows `start:stop` as views."""
        return Block(
            self.lane,
            self.origin.slice(start, stop),
            None if self.columns is None else {k: slice_column(c, start, stop) for k, c in self.columns.items()},
            None if self.rows is None else self.rows[start:stop],
            digests=self.digests and RowDigests(self.digests.header, self.digests.words[start:stop]),
        )

    def take(self, index: Ints) -> Block:
        """Rows in the order of `index`."""
        return Block(
            self.lane,
            self.origin.take(index),
            None if self.columns is None else {k: take_column(c, index) for k, c in self.columns.items()},
            None if self.rows is None else [self.rows[i] for i in index.tolist()],
            self.drops,
            self.digests and RowDigests(self.digests.header, self.digests.words[index]),
        )

    def with_columns(self, columns: dict[str, Column], origin: Origin | None = None) -> Block:
        """Another payload for the same rows (or for `origin`)."""
        return Block(self.lane, self.origin if origin is None else origin, columns, None, self.drops)

    def with_rows(self, rows: list[Any], origin: Origin | None = None) -> Block:
        """Another payload of Python objects for the same rows (or for `origin`)."""
        return Block(self.lane, self.origin if origin is None else origin, None, rows, self.drops)

    def dropping(self, *drops: Drop) -> Block:
        """The same block with more drops on its account."""
        return replace(self, drops=(*self.drops, *drops))

    def nbytes(self) -> int:
        """Payload bytes, roughly, for queue bounds."""
        if self.columns is not None:
            return sum(column_bytes(c) for c in self.columns.values())
        return objects_bytes(self.rows or ())


def concat_blocks(blocks: Sequence[Block]) -> Block:
    """Rows of each block, one after the other. Fields that only some blocks have are `MISSING` in the others."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    origin = Origin.concat([b.origin for b in blocks])
    drops = tuple(d for b in blocks for d in b.drops)
    if any(b.rows is not None for b in blocks):
        return Block(first.lane, origin, None, [row for b in blocks for row in b.payloads()], drops)
    names = list(dict.fromkeys(name for b in blocks for name in (b.columns or {})))
    columns = {name: concat_columns([b.column(name) for b in blocks]) for name in names}
    return Block(first.lane, origin, columns, None, drops, _concat_digests([b.digests for b in blocks]))


def _concat_digests(parts: Sequence[RowDigests | None]) -> RowDigests | None:
    taken = [part for part in parts if part is not None]
    if len(taken) != len(parts) or len({part.header for part in taken}) != 1:
        return None
    return RowDigests(taken[0].header, np.concatenate([part.words for part in taken]))


def lookup(payload: Any, path: str) -> Any:
    """`payload[path]`, descending at dots where there is no such key; `MISSING` where there is none."""
    if not isinstance(payload, Mapping):
        return MISSING
    if path in payload:
        return payload[path]
    head, _, rest = path.partition(".")
    return lookup(payload.get(head), rest) if rest else MISSING


def field_roots(fields: Iterable[str]) -> frozenset[str]:
    """Top-level names of dot paths. A name that itself holds a dot is kept as well."""
    return frozenset(part for path in fields for part in (path, path.partition(".")[0]))

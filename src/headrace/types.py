"""The records users see: `SampleRecord`, `SampleMeta`, `SampleBatch`, as lazy views over a block.

A pipeline moves blocks. A record object exists only where somebody asks for one, because building it costs as much as
tokenizing fifty tokens. What surprises:

* `SampleBatch.records` is built on first use. From then on the records are the truth: a payload rebound there is what
  `to_training()` sees.
* The library's own fields (the padding of a packed row, for instance) are left out of payloads and travel in
  `SampleMeta.tags`, so that records turned back into a block lose nothing.
* A packed row carries the identity of its first segment, with the segment's start appended to the lineage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import total_ordering
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.core.block import (
    CHUNK,
    COMPONENT,
    MISSING,
    OFFSET,
    ORIGIN_WIDTH,
    PIECE,
    Block,
    Column,
    Origin,
    Ragged,
    Text,
    lookup,
    slice_column,
    to_list,
)
from headrace.core.tokens import HIDDEN, PAD_TOKEN_ID, PADDING
from headrace.errors import DataError
from headrace.training import to_training

DatasetId = int
ShardId = int
LocalSampleId = int
LaneId = int
ChunkId = int
ChunkOffset = int
ComponentId = int
LineageIndex = int
LineagePath = tuple[int, ...]
SampleId = tuple[int, int, int]
"""Dataset id, shard id, row in the shard."""
SampleCursorKey = tuple[int, int, tuple[int, ...], SampleId]
SampleNumeric = int | float | bool | complex
SamplePayloadArray = NDArray[Any]
SamplePayloadAtom = bytes | memoryview | str | SampleNumeric | SamplePayloadArray | None
SamplePayloadDict = dict[str, Any]
SamplePayload = SamplePayloadAtom | list[Any] | SamplePayloadDict

_PACKING_TAG: Final = "_packing_metadata"
_PIECE_RADIX: Final = 1 << 20


@total_ordering
@dataclass(frozen=True, slots=True)
class SampleCursor:
    """Identity of a record inside its lane; cursors order by chunk, offset, lineage, sample id."""

    chunk_id: int
    chunk_offset: int
    sample_id: SampleId
    lineage: LineagePath = ()

    def as_key(self) -> SampleCursorKey:
        """Tuple that sorts as the cursor does."""
        return (self.chunk_id, self.chunk_offset, self.lineage, self.sample_id)

    @staticmethod
    def from_key(key: SampleCursorKey) -> SampleCursor:
        """Inverse of `as_key()`."""
        chunk, offset, lineage, sample = key
        return SampleCursor(chunk, offset, sample, lineage)

    @property
    def base_offset(self) -> tuple[int, int]:
        """Chunk and offset of the source sample."""
        return (self.chunk_id, self.chunk_offset)

    def child(self, index: int) -> SampleCursor:
        """The `index`-th record made from this one."""
        if index < 0:
            raise ValueError(f"a child index counts from 0, found {index}")
        return replace(self, lineage=(*self.lineage, index))

    def __lt__(self, other: SampleCursor) -> bool:
        return self.as_key() < other.as_key()


@dataclass(frozen=True, slots=True)
class ContributorRef:
    """One source sample that a record was made from. `is_last_child` marks the last record made from that sample."""

    cursor: SampleCursor
    is_last_child: bool = True


@dataclass(frozen=True, slots=True)
class SampleMeta:
    """Where a record comes from.

    `component_sample_counts` and `component_token_counts` map component ids to what this record holds of them; over all
    packed rows each document counts once, in the row where it begins.
    """

    sample_id: SampleId
    lane_id: int
    chunk_id: int
    chunk_offset: int = 0
    component_sample_counts: Mapping[int, int] = field(default_factory=lambda: {0: 1})
    component_token_counts: Mapping[int, int] | None = None
    lineage: LineagePath = ()
    tags: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin | None = field(default=None, repr=False, compare=False)
    """The row of the block this record was read from; lost when the lineage changes."""

    @property
    def cursor(self) -> SampleCursor:
        """Identity inside the lane."""
        return SampleCursor(self.chunk_id, self.chunk_offset, self.sample_id, self.lineage)

    def as_cursor_key(self) -> SampleCursorKey:
        """Tuple that sorts as the cursor does."""
        return (self.chunk_id, self.chunk_offset, self.lineage, self.sample_id)

    def with_lineage(self, path: Iterable[int]) -> SampleMeta:
        """The same sample with another lineage."""
        return replace(self, lineage=tuple(path), origin=None)

    def child(self, index: int) -> SampleMeta:
        """The `index`-th record made from this one."""
        return self.with_lineage((*self.lineage, index))

    @property
    def contributors(self) -> tuple[ContributorRef, ...]:
        """Source samples of a packed record, in order; empty for others."""
        return tuple(self.tags.get("_contributors", ()))

    def contribution_refs(self) -> tuple[ContributorRef, ...]:
        """`contributors`, or the record itself."""
        return self.contributors or (ContributorRef(self.cursor),)

    def contribution_cursors(self) -> tuple[SampleCursor, ...]:
        """Cursors of `contribution_refs()`."""
        return tuple(ref.cursor for ref in self.contribution_refs())

    def with_contributors(self, contributors: Iterable[ContributorRef] | None) -> SampleMeta:
        """The same record with these contributors (None: without any)."""
        return self._with_tag("_contributors", None if contributors is None else tuple(contributors))

    def with_tombstone(self, tombstone: bool = True) -> SampleMeta:
        """The same record, marked (or not) as one that only says a sample is finished."""
        return self._with_tag("_tombstone", True if tombstone else None)

    @property
    def tombstone(self) -> bool:
        """True if the record only says that a sample is finished."""
        return bool(self.tags.get("_tombstone"))

    @property
    def is_flush_sentinel(self) -> bool:
        """True for a flush marker."""
        return bool(self.tags.get("_flush_sentinel"))

    @property
    def is_sentinel(self) -> bool:
        """True for a tombstone, a flush marker or an end-of-source marker."""
        return self.tombstone or self.is_flush_sentinel or "_source_exhausted" in self.tags

    @property
    def padding_length(self) -> int:
        """Padding tokens at the end of a packed row; 0 for other records."""
        return int(self.tags.get(_PACKING_TAG, {}).get("padding_length", 0))

    def _with_tag(self, name: str, value: Any) -> SampleMeta:
        tags = {key: tag for key, tag in self.tags.items() if key != name}
        return replace(self, tags=tags if value is None else {**tags, name: value})


class SampleRecord:
    """One record. Operators may rebind `payload`.

    `meta` is worked out from the block when it is first asked for: a loop that only looks at payloads never pays for it.
    """

    __slots__ = ("_meta", "_row", "payload")

    def __init__(self, meta: SampleMeta, payload: Any) -> None:
        self._meta, self.payload = meta, payload

    @property
    def meta(self) -> SampleMeta:
        """Where the record comes from."""
        try:
            return self._meta
        except AttributeError:
            self._meta = meta_of_row(*self._row)
            return self._meta

    @meta.setter
    def meta(self, meta: SampleMeta) -> None:
        self._meta = meta

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampleRecord):
            return NotImplemented
        return bool(self.meta == other.meta and self.payload == other.payload)

    __hash__ = None  # type: ignore[assignment]  mutable, like the dict it holds

    def __repr__(self) -> str:
        return f"SampleRecord(meta={self.meta!r}, payload={self.payload!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleRecord, (self.meta, self.payload)


class _RowRecord(SampleRecord):
    """A record of a block's row, whose `meta` is not known yet. Built once a row: the constructor is all that counts."""

    __slots__ = ()

    def __init__(self, block: Block, row: int, payload: Any) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.payload, self._row = payload, (block, row)


class SampleBatch:
    """A training microbatch: rows of one lane, in order.

    Made from a block (`from_block`, no work) or from records. `len()`, `ids`, `lane_ids`, `chunk_ids` and
    `to_training()` never build records.

        batch = next(iter(pipeline))
        inputs = batch.to_training(return_labels=True)
    """

    __slots__ = ("_block", "_records")

    def __init__(self, records: Iterable[SampleRecord]) -> None:
        """A batch of these records."""
        self._records: tuple[SampleRecord, ...] | None = tuple(records)
        self._block: Block | None = None

    @classmethod
    def from_block(cls, block: Block) -> SampleBatch:
        """A view over `block`."""
        batch = cls.__new__(cls)
        batch._records, batch._block = None, block
        return batch

    def __len__(self) -> int:
        return len(self._records) if self._records is not None else len(self.block)

    @property
    def records(self) -> tuple[SampleRecord, ...]:
        """One record per row, built on first use; after that the records are the truth."""
        if self._records is None:
            self._records = tuple(records_from_block(self.block))
            self._block = None
        return self._records

    @property
    def block(self) -> Block:
        """The rows as a block; made anew from the records once these were handed out."""
        if self._block is not None:
            return self._block
        return block_from_records(self.records)

    @property
    def is_masked(self) -> bool:
        """True for a batch that holds no samples and only fills a step (`uneven="pad"`): rows of padding, no label counts."""
        if self._records is not None:
            return False
        origin = self.block.origin
        return origin.rows is not None and not len(origin.ids) and len(origin) > 0

    @property
    def ids(self) -> tuple[SampleId, ...]:
        """Sample id of each row (of its first segment, for packed rows)."""
        if self._records is not None:
            return tuple(record.meta.sample_id for record in self._records)
        return tuple((d, s, r) for d, s, r in self._firsts()[:, :3].tolist())

    @property
    def lane_ids(self) -> tuple[int, ...]:
        """Lane of each row."""
        if self._records is not None:
            return tuple(record.meta.lane_id for record in self._records)
        return (self.block.lane,) * len(self)

    @property
    def chunk_ids(self) -> tuple[int, ...]:
        """Work chunk of each row."""
        if self._records is not None:
            return tuple(record.meta.chunk_id for record in self._records)
        return tuple(self._firsts()[:, CHUNK].tolist())

    @property
    def lineage_paths(self) -> tuple[LineagePath, ...]:
        """Lineage of each row."""
        if self._records is not None:
            return tuple(record.meta.lineage for record in self._records)
        return tuple(meta.lineage for meta in metas_from_origin(self.block.origin, self.block.lane))

    def column(self, name: str) -> list[Any]:
        """One field of every row, without building records: `str` for text, arrays for token ids. A dot path descends.

        DataError for a field that no row has; where only some lack it, their place holds `MISSING` of `headrace.core.block`.
        """
        values = to_list(self.block.column(name))
        if values and all(value is MISSING for value in values):
            known = sorted(set(self.block.as_columns()) - HIDDEN)
            raise DataError(f"no row of this batch has a field {name!r}; they have {', '.join(known) or 'none'}")
        return values

    def to_training(self, **options: Any) -> dict[str, Any]:
        """Tensors for a training step; see `headrace.training.to_training` for every option."""
        return to_training(self.block, **options)

    def __repr__(self) -> str:
        lanes = sorted(set(self.lane_ids))
        return f"SampleBatch({len(self)} rows, lane {', '.join(map(str, lanes)) or '-'})"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._records is not None:
            return (SampleBatch, (self._records,))
        return (SampleBatch.from_block, (compact(self.block),))

    def _firsts(self) -> NDArray[np.int64]:
        return self.block.origin.firsts()


# ---------------------------------------------------------------------------------------------------
# Blocks to records and back
# ---------------------------------------------------------------------------------------------------


def compact(block: Block) -> Block:
    """The same rows without the rest of the arrays they are views of, ready to be pickled."""
    columns = block.columns and {name: _compact_column(column) for name, column in block.columns.items()}
    return replace(block, columns=columns)


def _compact_column(column: Column) -> Column:
    match column:
        case Ragged():
            return Ragged(column.flat.copy(), column.offsets - column.offsets[0])
        case Text():
            return Text(column.data[column.offsets[0] : column.offsets[-1]].copy(), column.offsets - column.offsets[0])
        case _:
            return column


def records_from_block(block: Block) -> list[SampleRecord]:
    """One record per row."""
    return [_RowRecord(block, row, payload) for row, payload in enumerate(_payloads(block))]


def meta_of_row(block: Block, row: int) -> SampleMeta:
    """Identity of one row, with the library's own fields as tags."""
    (meta,) = metas_from_origin(block.origin.slice(row, row + 1), block.lane)
    hidden = _hidden_of_row(block, row)
    if hidden or block.origin.rows is not None:
        return replace(meta, tags={**meta.tags, **_tags(meta, hidden)})
    return meta


def _hidden_of_row(block: Block, row: int) -> dict[str, Any]:
    if block.columns is not None:
        found = {name: block.columns[name] for name in HIDDEN if name in block.columns}
        return {name: to_list(slice_column(column, row, row + 1))[0] for name, column in found.items()}
    assert block.rows is not None
    values = {name: lookup(block.rows[row], name) for name in HIDDEN}
    return {name: value for name, value in values.items() if value is not MISSING}


def _payloads(block: Block) -> list[Any]:
    """Payloads without the library's own fields."""
    if block.columns is not None:
        if HIDDEN.isdisjoint(block.columns):
            return block.payloads()
        visible = {name: column for name, column in block.columns.items() if name not in HIDDEN}
        return replace(block, columns=visible).payloads()
    rows = block.payloads()
    if not any(isinstance(row, Mapping) and not HIDDEN.isdisjoint(row) for row in rows):
        return rows
    return [{k: v for k, v in row.items() if k not in HIDDEN} if isinstance(row, Mapping) else row for row in rows]


def _tags(meta: SampleMeta, hidden: dict[str, Any]) -> dict[str, Any]:
    """Hidden columns of one row as tags; the padding joins the packing summary."""
    tags = {name: value for name, value in hidden.items() if name != PADDING}
    if PADDING in hidden or meta.contributors:
        padding = int(hidden.get(PADDING, 0))
        total = sum((meta.component_token_counts or {}).values())
        tags[_PACKING_TAG] = {
            "num_sequences": max(1, len(meta.contributors)),
            "total_length": total,
            "packing_efficiency": total / (total + padding) if total + padding else 0.0,
            "padding_length": padding,
        }
    return tags


def metas_from_origin(origin: Origin, lane: int) -> list[SampleMeta]:
    """Identity of each row."""
    if origin.rows is not None:
        return [_packed_meta(origin.slice(row, row + 1), lane) for row in range(len(origin))]
    return [
        SampleMeta((d, s, r), lane, chunk, offset, {component: 1}, None, _lineage(piece), {}, Origin(row[None]))
        for row, (d, s, r, component, chunk, offset, piece) in zip(origin.ids, origin.ids.tolist(), strict=True)
    ]


def _packed_meta(origin: Origin, lane: int) -> SampleMeta:
    segments = origin.ids.tolist()
    spans = origin.spans.tolist() if origin.spans is not None else [[0, 0]] * len(segments)
    samples: dict[int, int] = {}
    tokens: dict[int, int] = {}
    contributors: list[ContributorRef] = []
    for (d, s, r, component, chunk, offset, piece), (start, length) in zip(segments, spans, strict=True):
        samples[component] = samples.get(component, 0) + (start == 0)
        tokens[component] = tokens.get(component, 0) + length
        contributors.append(ContributorRef(SampleCursor(chunk, offset, (d, s, r), _lineage(piece))))
    if not contributors:  # a row of nothing but padding
        return SampleMeta((-1, -1, -1), lane, -1, 0, {}, {}, origin=origin)
    first = contributors[0].cursor
    lineage = (*first.lineage, spans[0][0])
    tags = {"_contributors": tuple(contributors)}
    counts = tokens if origin.spans is not None else None
    return SampleMeta(first.sample_id, lane, first.chunk_id, first.chunk_offset, samples, counts, lineage, tags, origin)


def _lineage(piece: int) -> LineagePath:
    return (piece,) if piece else ()


def block_from_records(records: Sequence[SampleRecord]) -> Block:
    """Rows of these records, as one block. Records of several lanes are an error."""
    if not records:
        return Block(0, Origin.empty(), None, [])
    lanes = {record.meta.lane_id for record in records}
    if len(lanes) > 1:
        raise ValueError(f"a batch holds rows of one lane, found lanes {sorted(lanes)}")
    origin = Origin.concat([_origin(record.meta) for record in records])
    payloads = [record.payload for record in records]
    hidden = _hidden_columns([record.meta for record in records])
    if not hidden or not all(isinstance(payload, Mapping) for payload in payloads):
        return Block(lanes.pop(), origin, None, payloads)
    names = dict.fromkeys(name for payload in payloads for name in payload)
    columns: dict[str, Column] = {name: [lookup(payload, name) for payload in payloads] for name in names}
    return Block(lanes.pop(), origin, {**columns, **hidden})


def _hidden_columns(metas: Sequence[SampleMeta]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    if any(_PACKING_TAG in meta.tags for meta in metas):
        columns[PADDING] = np.array([meta.padding_length for meta in metas], np.int32)
    if any(PAD_TOKEN_ID in meta.tags for meta in metas):
        columns[PAD_TOKEN_ID] = np.asarray([meta.tags.get(PAD_TOKEN_ID, 0) for meta in metas])
    return columns


def _origin(meta: SampleMeta) -> Origin:
    if meta.origin is not None:
        return meta.origin
    ids = np.zeros((1, ORIGIN_WIDTH), np.int64)
    ids[0, :3] = meta.sample_id
    ids[0, COMPONENT] = next(iter(meta.component_sample_counts), 0)
    ids[0, CHUNK], ids[0, OFFSET] = meta.chunk_id, meta.chunk_offset
    piece = 0
    for ordinal in meta.lineage:
        piece = piece * _PIECE_RADIX + ordinal
    ids[0, PIECE] = piece
    return Origin(ids)

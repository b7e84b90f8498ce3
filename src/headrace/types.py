"""The records users see: `SampleRecord`, `SampleMeta`, `SampleBatch`, as lazy views over a block.

A pipeline moves blocks. A record object exists only where somebody asks for one, because building it costs as much as
tokenizing fifty tokens. What surprises:

* `SampleBatch.records` is built on first use. From then on the records are the truth: a payload rebound there is what
  `to_training()` sees.
* The library's own fields (the padding of a packed row, for instance) are left out of payloads and travel in
  `SampleMeta.tags`, so that records turned back into a block lose nothing.

Cursors and `SampleMeta` are in `meta.py`, and public here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
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
from headrace.core.equality import same
from headrace.core.padding import padding_of_payload, unknown_padding
from headrace.core.tokens import HIDDEN, PAD_TOKEN_ID, PADDING, find_tokens_field, is_sequence
from headrace.errors import DataError
from headrace.meta import (
    PACKING_TAG,
    ROW_LENGTH_TAG,
    ChunkId,
    ChunkOffset,
    ComponentId,
    ContributorRef,
    DatasetId,
    LaneId,
    LineageIndex,
    LineagePath,
    LocalSampleId,
    SampleCursor,
    SampleCursorKey,
    SampleId,
    SampleMeta,
    ShardId,
    metas_from_origin,
)
from headrace.training import to_training

__all__ = [
    "ChunkId",
    "ChunkOffset",
    "ComponentId",
    "ContributorRef",
    "DatasetId",
    "LaneId",
    "LineageIndex",
    "LineagePath",
    "LocalSampleId",
    "SampleBatch",
    "SampleCursor",
    "SampleCursorKey",
    "SampleId",
    "SampleMeta",
    "SampleNumeric",
    "SamplePayload",
    "SamplePayloadArray",
    "SamplePayloadAtom",
    "SamplePayloadDict",
    "SampleRecord",
    "ShardId",
    "StreamItem",
    "block_from_records",
    "compact",
    "records_from_block",
]

SampleNumeric = int | float | bool | complex
SamplePayloadArray = NDArray[Any]
SamplePayloadAtom = bytes | memoryview | str | SampleNumeric | SamplePayloadArray | None
SamplePayloadDict = dict[str, Any]
SamplePayload = SamplePayloadAtom | list[Any] | SamplePayloadDict

_PIECE_RADIX: Final = 1 << 20


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
        return bool(self.meta == other.meta and same(self.payload, other.payload))

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


StreamItem = SampleRecord | SampleBatch
"""What a pipeline hands out: batches, or records without `batch`."""


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
        return replace(meta, tags={**meta.tags, **_tags(meta, hidden, _length_of_row(block, row))})
    return meta


def _length_of_row(block: Block, row: int) -> int:
    """Numbers in its token field; 0 if it has none."""
    names = block.columns if block.rows is None else block.rows[row]
    name = find_tokens_field(names) if isinstance(names, Mapping) else None
    value: Any = () if name is None else to_list(slice_column(block.column(name), row, row + 1))[0]
    return len(value) if is_sequence(value) else 0


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


def _tags(meta: SampleMeta, hidden: dict[str, Any], length: int) -> dict[str, Any]:
    """Hidden columns of one row as tags; the padding joins the packing summary, and the tokens that it is among are counted."""
    tags = {name: value for name, value in hidden.items() if name != PADDING}
    if PADDING in hidden or meta.contributors:
        padding = int(hidden.get(PADDING, 0))
        total = sum((meta.component_token_counts or {}).values())
        tags[PACKING_TAG] = {
            "num_sequences": max(1, len(meta.contributors)),
            "total_length": total,
            "packing_efficiency": total / (total + padding) if total + padding else 0.0,
            "padding_length": padding,
        }
        tags[ROW_LENGTH_TAG] = length
    return tags


def block_from_records(records: Sequence[SampleRecord]) -> Block:
    """Rows of these records, as one block. Records of several lanes are an error."""
    if not records:
        return Block(0, Origin.empty(), None, [])
    lanes = {record.meta.lane_id for record in records}
    if len(lanes) > 1:
        raise ValueError(f"a batch holds rows of one lane, found lanes {sorted(lanes)}")
    origin = Origin.concat([_origin(record.meta) for record in records])
    payloads = [record.payload for record in records]
    hidden = _hidden_columns(records, origin)
    if not hidden or not all(isinstance(payload, Mapping) for payload in payloads):
        return Block(lanes.pop(), origin, None, payloads)
    names = dict.fromkeys(name for payload in payloads for name in payload)
    columns: dict[str, Column] = {name: [lookup(payload, name) for payload in payloads] for name in names}
    return Block(lanes.pop(), origin, {**columns, **hidden})


def _hidden_columns(records: Sequence[SampleRecord], origin: Origin) -> dict[str, Column]:
    """OperatorError for a row that was changed so that nobody knows what of it is padding."""
    columns: dict[str, Column] = {}
    metas = [record.meta for record in records]
    if any(PACKING_TAG in meta.tags for meta in metas):
        padding = np.zeros(len(records), np.int32)
        for row, record in enumerate(records):
            was = int(record.meta.tags.get(ROW_LENGTH_TAG, 0))
            left = padding_of_payload(record.payload, record.meta.padding_length, was)
            if left is None:
                name = find_tokens_field(record.payload) if isinstance(record.payload, Mapping) else None
                lengths = None if name is None else (was, len(record.payload[name]))
                raise unknown_padding(Block(0, origin, None, []), row, lengths)
            padding[row] = left
        columns[PADDING] = padding
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

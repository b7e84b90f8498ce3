"""Where a record comes from: cursors, contributors and `SampleMeta`, and how they are read off a block's `Origin`.

A packed row carries the identity of its first segment, with the segment's start appended to the lineage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import total_ordering
from typing import Any, Final

from headrace.core.block import Origin

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

PACKING_TAG: Final = "_packing_metadata"
ROW_LENGTH_TAG: Final = "_row_length"
"""Tokens of a row, padding included, as they were when the record was made."""


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
        return int(self.tags.get(PACKING_TAG, {}).get("padding_length", 0))

    def _with_tag(self, name: str, value: Any) -> SampleMeta:
        tags = {key: tag for key, tag in self.tags.items() if key != name}
        return replace(self, tags=tags if value is None else {**tags, name: value})


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

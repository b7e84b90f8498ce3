"""What entered a changed operator and was not delivered: it enters the operator that takes over.

* Rows, for `batch`: those that are in no batch delivered, in their order.
* Documents, for `pack_flat`: those with tokens left, in their order. A document goes on behind the last of its tokens that was
  delivered; the cutting algorithms can take it from there, others count what is left.

Both are a function of what the operators held at the cut and of what was delivered since, to the token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Protocol

import numpy as np

from headrace.core.block import CHUNK, OFFSET, PIECE, Block, Drop, Ints, Origin, concat_blocks
from headrace.core.message import Message
from headrace.core.tokens import column_lengths, find_tokens_field

_TO_THE_END: Final = 1 << 62


class Recorder:
    """Passes messages on and keeps them, so that they can be passed on again."""

    def __init__(self, stream: Iterator[Message]) -> None:
        self._stream = stream
        self.kept: list[Message] = []

    def messages(self) -> Iterator[Message]:
        """The stream from here on."""
        for message in self._stream:
            self.kept.append(message)
            yield message

    def take_until_last(self, wanted: Callable[[Block], bool]) -> list[Block]:
        """Blocks passed on, up to the last one that is wanted. What came behind it comes again."""
        last = max((i for i, m in enumerate(self.kept) if isinstance(m, Block) and wanted(m)), default=-1)
        taken = [message for message in self.kept[: last + 1] if isinstance(message, Block)]
        self._stream, self.kept = chain(self.kept[last + 1 :], self._stream), []
        return taken


@dataclass(frozen=True, slots=True)
class Held:
    """What a stateful operator held at the cut."""

    origin: Origin
    rows: Block | None


class Rest(Protocol):
    """What is to enter the first reshaped operator before the stream goes on."""

    def without(self, delivered: Sequence[Origin], recorder: Recorder) -> Rest:
        """The rest once this was delivered, of what was here and of what the recorder passed on, which is put back."""
        ...

    def enter(self, accumulator: Any) -> list[Block]:
        """Give it to the operator as it is now; what leaves it at once."""
        ...


# ---------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------


def row_keys(origin: Origin) -> list[bytes]:
    """Each row as bytes: its records, and the tokens it takes of each."""
    records = origin.ids[:, [CHUNK, OFFSET, PIECE]]
    if origin.rows is None:
        return [row.tobytes() for row in np.ascontiguousarray(records)]
    spans = np.zeros((len(records), 2), np.int64) if origin.spans is None else origin.spans
    segments = np.ascontiguousarray(np.hstack([records, spans]))
    ends = origin.rows.tolist()
    return [segments[a:b].tobytes() for a, b in zip(ends[:-1], ends[1:], strict=True)]


@dataclass(frozen=True)
class Rows:
    """Rows for `batch`."""

    rows: Block | None

    def without(self, delivered: Sequence[Origin], recorder: Recorder) -> Rows:
        """Those that were not delivered."""
        gone = {key for origin in delivered for key in row_keys(origin)}

        def left(block: Block) -> Block:
            keep = [row for row, key in enumerate(row_keys(block.origin)) if key not in gone]
            return block if len(keep) == len(block) else block.take(np.asarray(keep, np.int64))

        given = recorder.take_until_last(lambda block: len(left(block)) < len(block))
        rest = [left(block) for block in (self.rows, *given) if block is not None]
        rest = [block for block in rest if len(block)]
        return Rows(concat_blocks(rest) if rest else None)

    def enter(self, accumulator: Any) -> list[Block]:
        """As any rows."""
        return [] if self.rows is None else accumulator.push(self.rows)


# ---------------------------------------------------------------------------------------------------
# Documents
# ---------------------------------------------------------------------------------------------------

Key = tuple[int, int, int]
"""Chunk, offset and piece of a record."""
Spans = dict[Key, list[tuple[int, int]]]
"""Token ranges by record."""


def record_keys(ids: Ints) -> list[Key]:
    """Chunk, offset and piece of each record."""
    return [(c, o, p) for c, o, p in ids[:, [CHUNK, OFFSET, PIECE]].tolist()]


def spans_of(origins: Iterable[Origin]) -> Spans:
    """The segments of packed rows, by record."""
    out: Spans = {}
    for origin in origins:
        spans = np.zeros((len(origin.ids), 2), np.int64) if origin.spans is None else origin.spans
        for key, (start, length) in zip(record_keys(origin.ids), spans.tolist(), strict=True):
            out.setdefault(key, []).append((start, start + length))
    return out


def held_documents(packed: Sequence[Origin], opened: Origin, begun: Sequence[int]) -> tuple[Origin, Spans]:
    """Documents that wait in packed rows and in the packer, each once in the order of the stream, and which tokens of them do.

    `packed`: rows held behind the packer, those nearest to delivery first; `opened`: documents in the packer.
    """
    waiting = spans_of(packed)
    for key, start in zip(record_keys(opened.ids), begun, strict=True):
        waiting.setdefault(key, []).append((start, _TO_THE_END))
    ids = np.concatenate([*(origin.ids for origin in packed), opened.ids])
    _, first = np.unique(ids[:, [CHUNK, OFFSET, PIECE]], axis=0, return_index=True)
    return Origin(ids[np.sort(first)]), waiting


def unbroken_from(waiting: Sequence[tuple[int, int]], length: int) -> int:
    """First token from which on all of a document's `length` tokens wait."""
    start = length
    for begin, end in sorted(waiting, key=lambda span: -span[1]):
        if end < start:
            break
        start = min(start, begin)
    return start


@dataclass(frozen=True)
class Documents:
    """Documents for the packer `op`, and which of their tokens wait. `begun`: tokens at the beginning that do not."""

    op: Any
    rows: Block | None
    waiting: Spans
    begun: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    lost: int = 0

    def without(self, delivered: Sequence[Origin], recorder: Recorder) -> Documents:
        """Those with tokens left behind the last one delivered. Others that wait, between tokens delivered, count as lost."""
        gone = spans_of(delivered)
        given = recorder.take_until_last(lambda block: any(key in gone for key in record_keys(block.origin.ids)))
        blocks = [block for block in (self.rows, *given) if block is not None and len(block)]
        if not blocks:
            return Documents(self.op, None, {})
        rows = concat_blocks(blocks)
        keys, lengths = record_keys(rows.origin.ids), document_lengths(self.op, rows)
        begun, lost = np.zeros(len(rows), np.int64), 0
        for i, (key, length) in enumerate(zip(keys, lengths.tolist(), strict=True)):
            waiting = [(a, min(b, length)) for a, b in self.waiting.get(key, [(0, length)])]
            out = gone.get(key, [])
            begun[i] = max(unbroken_from(waiting, length), max((end for _, end in out), default=0))
            lost += sum(max(0, min(b, int(begun[i])) - a) for a, b in waiting) - sum(b - a for a, b in out)
        last = max((i for i, key in enumerate(keys) if key in gone), default=-1)
        behind = np.arange(len(keys)) > last  # of these, empty ones too: those that were not read ahead come as well
        left = np.flatnonzero((begun < lengths) | (behind & (lengths == 0)))
        still = {keys[i]: [(int(begun[i]), _TO_THE_END)] for i in left.tolist()}
        return Documents(self.op, rows.take(left), still, begun[left], lost)

    def enter(self, accumulator: Any) -> list[Block]:
        """Begun ones go on where they were."""
        if self.rows is None:
            return []
        drop = Drop(
            self.op.name, "between tokens delivered before packing was changed", self.rows.origin.ids[:0], self.lost
        )
        out: list[Block] = accumulator.adopt(self.rows, self.begun)
        return [*out, self.rows.slice(0, 0).dropping(drop)] if self.lost else out


def document_lengths(op: Any, rows: Block) -> Ints:
    """Tokens of each document as the packer `op` counts them."""
    name = find_tokens_field(rows.as_columns()) if op.tokens_field == "auto" else op.tokens_field
    lengths = None if name is None else column_lengths(rows.column(name), len(rows))
    return np.zeros(len(rows), np.int64) if lengths is None else lengths

"""`wrap`: one stream of tokens, cut every `max_length`.

No token is lost and none is padding, but documents are cut where a row ends. All of it is offset arithmetic: the tokens
are copied once, into the rows, and a document costs two entries in a few small arrays.

With `max_sequences_per_bin` a row also closes behind its last allowed segment, and is padded.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.core.block import Block, Drop, Ints, Origin
from headrace.errors import CheckpointError
from headrace.ops.pack.fields import AlignedFields, TokenRows, left_of_begun, without_empty
from headrace.ops.pack.shape import RowShape, packed_block, pad_rows, padding_of

_NAME: Final = "pack_flat"


class WrapPacker:
    """The open row of one lane: always fewer than `max_length` tokens."""

    def __init__(self, fields: AlignedFields, shape: RowShape, max_sequences: int | None, lane: int) -> None:
        """Hold nothing."""
        self._fields, self._shape, self._cap, self._lane = fields, shape, max_sequences, lane
        self._clear()

    def _clear(self) -> None:
        self._pieces: dict[str, list[NDArray[Any]]] = {}
        self._ids: list[Ints] = []
        self._lengths: list[Ints] = []  # tokens of each document that are still here
        self._tokens = 0
        self._skip = 0  # tokens of the first document that have left
        self._completed: Ints = np.empty(0, np.int64)  # of each row just emitted, the document in which it ends
        self.closers: list[int] = []

    def push(self, block: Block) -> list[Block]:
        """Every row that is full now."""
        aligned = self._fields.align(block)
        rows, empty = without_empty(aligned)
        before = sum(map(len, self._ids))
        drops = block.drops
        if len(empty):
            drops = (*drops, Drop(_NAME, "empty document", empty))
        self._append(rows)
        self._completed = np.empty(0, np.int64)
        out = self._full_rows()
        places = (aligned.offsets[1:] > aligned.offsets[:-1]).nonzero()[0]
        self.closers = places[self._completed - before].tolist()
        if drops:
            out = out or [block.slice(0, 0).with_columns({})]
            out[0] = out[0].dropping(*drops)
        return out

    def flush(self) -> list[Block]:
        """The open row, padded; without `pad_token_id` word of what is lost."""
        out: list[Block] = []
        if self._tokens and self._shape.pad_token_id is not None:
            out = [self._emit(np.asarray([self._tokens]))]
        elif self._tokens:
            ids = np.concatenate(self._ids)[self._skip > 0 :]
            drop = Drop(_NAME, "tail of a flush", ids, self._tokens)
            out = [Block(self._lane, Origin.empty(), {}, None, (drop,))]
        self._clear()
        self._fields.clear()
        return out

    end = flush

    def held(self) -> Origin:
        """Documents of the open row, the first perhaps in part."""
        return Origin(np.concatenate(self._ids)) if self._ids else Origin.empty()

    def state(self) -> dict[str, Any]:
        """Tokens of the first document that have left, and the fields of the stream."""
        return {"skip": self._skip, "tokens": self._tokens, "fields": self._fields.state()}

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """Hold these documents again, without what has left of the first."""
        self._clear()
        self._fields.restore(state["fields"])
        if held is not None and len(held):
            self._append(_without_head(self._fields.align(held), int(state["skip"])))
        self._skip = int(state["skip"])
        if self._tokens != int(state["tokens"]):
            raise CheckpointError(
                f"{_NAME}: the open row held {state['tokens']} tokens and {self._tokens} were read back; "
                "the data, the tokenizer or an operator before packing has changed"
            )

    def begun(self) -> Ints:
        """Tokens of each held document that have left."""
        begun = np.zeros(sum(map(len, self._ids)), np.int64)
        begun[:1] = self._skip
        return begun

    def adopt(self, documents: Block, begun: Ints) -> list[Block]:
        """Take over from another packer. The first document may be continued; what is left of other begun ones is dropped."""
        takes = begun == 0
        takes[:1] = True
        drops = left_of_begun(self._fields, documents.take((~takes).nonzero()[0]), begun[~takes])
        out, rest = list[Block](), takes.nonzero()[0]
        if begun[:1].any():
            self._append(_without_head(self._fields.align(documents.slice(0, 1)), int(begun[0])))
            self._skip = int(begun[0])
            out, rest = self._full_rows(), rest[1:]
        closers = [0] * sum(map(len, out))
        out += self.push(documents.take(rest))
        self.closers = closers + rest[self.closers].tolist()
        return _with_drops(out, drops, self._lane)

    def _append(self, rows: TokenRows) -> None:
        if not len(rows):
            return
        for name, values in rows.values.items():
            self._pieces.setdefault(name, []).append(values)
        self._ids.append(rows.ids)
        self._lengths.append(rows.offsets[1:] - rows.offsets[:-1])
        self._tokens += int(rows.offsets[-1])

    def _full_rows(self) -> list[Block]:
        length = self._shape.max_length
        if self._cap is None:
            count = self._tokens // length
            return [self._emit(np.arange(1, count + 1) * length)] if count else []
        cuts = _capped_cuts(np.cumsum(np.concatenate(self._lengths)), length, self._cap) if self._ids else []
        return [self._emit(np.asarray(cuts))] if len(cuts) else []

    def _emit(self, cuts: Ints) -> Block:
        """Rows that end at these token counts; what lies behind the last stays."""
        ids, lengths = np.concatenate(self._ids), np.concatenate(self._lengths)
        ends = lengths.cumsum()
        cut = int(cuts[-1])
        self._completed = ends.searchsorted(cuts)
        segment_ends = np.concatenate([ends[: ends.searchsorted(cut, side="right")], cuts])
        segment_ends.sort()
        starts = np.zeros_like(segment_ends)
        starts[1:] = segment_ends[:-1]
        taken = segment_ends - starts
        if not taken.all():  # a document and a row end at the same token
            segment_ends, starts, taken = (part[taken > 0] for part in (segment_ends, starts, taken))
        document = ends.searchsorted(starts, side="right")
        spans = np.empty((len(taken), 2), np.int64)
        spans[:, 0], spans[:, 1] = starts - (ends - lengths)[document], taken
        spans[: document.searchsorted(1), 0] += self._skip
        rows = np.zeros(len(cuts) + 1, np.int64)
        rows[1:] = segment_ends.searchsorted(cuts, side="right")
        origin = Origin(ids[document], rows, spans)
        flat = self._cut_tokens(cuts)
        padding = padding_of(origin, self._shape)
        if padding.any():
            bounds = [0, *cuts.tolist()]
            parts = {n: [v[a:z] for a, z in zip(bounds[:-1], bounds[1:], strict=True)] for n, v in flat.items()}
            fill = {self._fields.tokens: self._shape.pad_token_id or 0}
            flat = pad_rows(parts, range(1, len(cuts) + 1), padding, fill)
        self._keep_documents(ids, lengths, ends, cut)
        return packed_block(self._lane, flat, origin, padding, self._shape)

    def _cut_tokens(self, cuts: Ints) -> dict[str, NDArray[Any]]:
        """Take the tokens before the last cut; the rest is copied, so that no block stays alive for it."""
        rest = self._tokens - int(cuts[-1])
        flat: dict[str, NDArray[Any]] = {}
        for name, pieces in self._pieces.items():
            last = pieces[-1]
            keep = len(last) - rest
            taken = [*pieces[:-1], last[:keep]]
            flat[name] = taken[0] if len(taken) == 1 else np.concatenate(taken)
            self._pieces[name] = [last[keep:].copy()] if rest else []
        self._tokens = rest
        return flat

    def _keep_documents(self, ids: Ints, lengths: Ints, ends: Ints, cut: int) -> None:
        first = int(ends.searchsorted(cut, side="right"))
        if first == len(ends):
            self._ids, self._lengths, self._skip = [], [], 0
            return
        left = lengths[first:].copy()
        gone = int(cut - (ends[first] - lengths[first]))
        left[0] -= gone
        self._skip = gone + (self._skip if first == 0 else 0)
        self._ids, self._lengths = [ids[first:].copy()], [left]


def _capped_cuts(ends: Ints, length: int, cap: int) -> list[int]:
    """Row ends where a row closes at `length` tokens or behind its `cap`-th segment, whichever comes first."""
    documents = ends.tolist()
    cuts: list[int] = []
    at = 0
    while True:
        last = bisect_right(documents, at) + cap - 1  # the document that would fill the row's segments
        full = at + length
        if last < len(documents) and documents[last] <= full:
            at = documents[last]
        elif full <= documents[-1]:
            at = full
        else:
            return cuts
        cuts.append(at)


def _with_drops(out: list[Block], drops: tuple[Drop, ...], lane: int) -> list[Block]:
    if not drops:
        return out
    first = out[0] if out else Block(lane, Origin.empty(), {})
    return [first.dropping(*drops), *out[1:]]


def _without_head(rows: TokenRows, skip: int) -> TokenRows:
    offsets = np.maximum(rows.offsets - skip, 0)
    return TokenRows({name: values[skip:] for name, values in rows.values.items()}, offsets, rows.ids)

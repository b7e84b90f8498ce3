"""What the operator laws are stated over: streams of documents, cut at will, and runs of accumulators over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from headrace.core.block import Block, Origin, Ragged, Text, concat_blocks, to_list
from headrace.core.op import Accumulator, Stateful

Fetch = Callable[[Origin], Block]


def stream(lengths: Sequence[int], lane: int = 0) -> Block:
    """Documents of these lengths, with tokens that never repeat, two aligned fields, and fields that packing drops."""
    n = len(lengths)
    offsets = np.zeros(n + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    ids = np.zeros((n, 7), np.int64)
    row = np.arange(n)
    ids[:, 0], ids[:, 1], ids[:, 2], ids[:, 3] = row % 2, row // 50, row % 50, row % 2
    ids[:, 4], ids[:, 5] = row // 16, row % 16
    tokens = np.arange(1, offsets[-1] + 1, dtype=np.int32)
    columns = {
        "input_ids": Ragged(tokens, offsets),
        "loss_mask": Ragged((tokens % 3 == 0).astype(np.uint8), offsets),
        "weight": Ragged((tokens / 2).astype(np.float32), offsets),
        "text": Text.from_bytes([f"document {i}".encode() for i in range(n)]),
        "score": row.astype(np.float64),
        "meta": [{"source": i} for i in range(n)],
    }
    return Block(lane, Origin(ids), columns)


def as_objects(block: Block) -> Block:
    """The same records as Python dicts."""
    return block.with_rows(block.payloads())


def cut(block: Block, at: Iterable[int]) -> list[Block]:
    """The stream in pieces that end at these rows; an empty piece where a row is named twice."""
    bounds = [0, *sorted(min(a, len(block)) for a in at), len(block)]
    return [block.slice(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def find(block: Block, origin: Origin) -> Block:
    """The records of `block` with these ids, as a restore fetches them."""
    rows = {row.tobytes(): number for number, row in enumerate(np.ascontiguousarray(block.origin.ids))}
    return block.take(np.asarray([rows[row.tobytes()] for row in np.ascontiguousarray(origin.ids)], np.int64))


def rows_of(blocks: Iterable[Block]) -> list[Any]:
    """Every row, comparable: payload with types, and origin."""
    out: list[Any] = []
    for block in blocks:
        payloads = [{name: _plain(value) for name, value in row.items()} for row in block.payloads()]
        for number, payload in enumerate(payloads):
            origin = block.origin.slice(number, number + 1)
            spans = None if origin.spans is None else origin.spans.tolist()
            out.append((payload, origin.ids.tolist(), spans))
    return out


def _plain(value: Any) -> Any:
    return (str(value.dtype), value.tolist()) if isinstance(value, np.ndarray) else value


@dataclass
class Tally:
    """Everything that left an accumulator."""

    blocks: list[Block] = field(default_factory=list)

    def add(self, blocks: list[Block]) -> None:
        self.blocks += blocks

    @property
    def rows(self) -> list[Any]:
        return rows_of(self.blocks)

    @property
    def dropped_ids(self) -> list[list[int]]:
        return [row for block in self.blocks for drop in block.drops for row in drop.ids.tolist()]

    @property
    def dropped_tokens(self) -> int:
        return sum(drop.tokens for block in self.blocks for drop in block.drops)

    @property
    def drop_reasons(self) -> list[tuple[str, int]]:
        return [(drop.reason, len(drop.ids)) for block in self.blocks for drop in block.drops]


def run(op: Stateful, pieces: Sequence[Block], end: bool = True, lane: int = 0) -> Tally:
    """Push every piece, then end the stream."""
    accumulator, tally = op.accumulator(lane), Tally()
    for piece in pieces:
        tally.add(accumulator.push(piece))
    if end:
        tally.add(accumulator.end())
    return tally


def restored(op: Stateful, accumulator: Accumulator, fetch: Fetch, lane: int = 0) -> Accumulator:
    """A fresh accumulator that continues where this one stands, by way of a checkpoint's bytes."""
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(accumulator.state()))
    held = accumulator.held()
    again = op.accumulator(lane)
    again.restore(state, fetch(held) if len(held) else None)
    return again


def snapshot(accumulator: Accumulator) -> tuple[bytes, list[Any]]:
    """State as bytes and the origins held: equal for equal positions."""
    held = accumulator.held()
    spans = None if held.spans is None else held.spans.tolist()
    return msgspec.msgpack.encode(accumulator.state()), [held.ids.tolist(), spans]


def tokens_out(blocks: Iterable[Block]) -> list[int]:
    """Token ids that left, in order, padding aside."""
    out: list[int] = []
    for block in blocks:
        if not len(block):
            continue
        padding = block.column("_padding")
        for row, pad in zip(to_list(block.column("input_ids")), to_list(padding), strict=True):
            out += row.tolist()[: len(row) - int(pad)]
    return out


def joined(blocks: Sequence[Block]) -> Block:
    """All rows as one block."""
    return concat_blocks([block for block in blocks if len(block)])

"""From segments to packed rows: positions, padding and the block that carries them.

A packed row holds exactly `max_length` tokens: its segments one after the other, then padding. `positions` restart at
zero in every segment and in the padding. A document that continues in the next row starts there at position zero again,
because its beginning is out of reach of attention in that row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.core.block import Block, Column, Ints, Origin
from headrace.core.tokens import PADDING, POSITIONS

_SHORT_SEGMENTS: Final = 12
"""Below this mean length one arithmetic pass over all tokens beats a copy per segment."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """What every packed row of a stream has in common."""

    max_length: int
    pad_token_id: int | None
    emit_positions: bool


def positions_of(lengths: Ints, longest: int) -> NDArray[np.int32]:
    """`0..length-1` for each length, one after the other, int32; no length exceeds `longest`."""
    if not len(lengths):
        return np.empty(0, np.int32)
    total = int(lengths.sum())
    if total >= _SHORT_SEGMENTS * len(lengths):
        count = np.arange(longest, dtype=np.int32)
        return np.concatenate([count[:length] for length in lengths.tolist()])
    starts = (lengths.cumsum() - lengths).astype(np.int32)
    return np.arange(total, dtype=np.int32) - np.repeat(starts, lengths)


def padding_of(origin: Origin, shape: RowShape) -> NDArray[np.int32]:
    """Padding tokens of each row: what its segments leave free."""
    assert origin.rows is not None and origin.spans is not None
    ends = np.zeros(len(origin.spans) + 1, np.int64)
    origin.spans[:, 1].cumsum(out=ends[1:])
    at = ends[origin.rows]
    return (shape.max_length - at[1:] + at[:-1]).astype(np.int32)


def packed_block(
    lane: int, flat: Mapping[str, NDArray[Any]], origin: Origin, padding: NDArray[np.int32], shape: RowShape
) -> Block:
    """A block of packed rows from the flat values of each field, padding included."""
    rows, length = len(origin), shape.max_length
    columns: dict[str, Column] = {name: values.reshape(rows, length) for name, values in flat.items()}
    if shape.emit_positions:
        columns[POSITIONS] = positions_of(_runs(origin, padding), length).reshape(rows, length)
    columns[PADDING] = padding
    return Block(lane, origin, columns)


def _runs(origin: Origin, padding: NDArray[np.int32]) -> Ints:
    """Lengths of the segments, with each row's padding as a run of its own."""
    assert origin.rows is not None and origin.spans is not None
    lengths = origin.spans[:, 1]
    padded = padding.nonzero()[0]
    return np.insert(lengths, origin.rows[1:][padded], padding[padded]) if len(padded) else lengths


def pad_rows(
    pieces: Mapping[str, Sequence[NDArray[Any]]],
    row_ends: Sequence[int],
    padding: NDArray[np.int32],
    fill: Mapping[str, int],
) -> dict[str, NDArray[Any]]:
    """Join the pieces of each field, padding behind the last piece of every row. `row_ends` counts pieces."""
    out: dict[str, NDArray[Any]] = {}
    longest = int(padding.max(initial=0))
    padded = [(end, pad) for end, pad in zip(row_ends, padding.tolist(), strict=True) if pad]
    for name, parts in pieces.items():
        if not padded:
            out[name] = np.concatenate(parts)
            continue
        tail = np.full(longest, fill.get(name, 0), parts[0].dtype)
        joined: list[NDArray[Any]] = []
        at = 0
        for end, pad in padded:
            joined += parts[at:end]
            joined.append(tail[:pad])
            at = end
        joined += parts[at:]
        out[name] = np.concatenate(joined)
    return out

"""Token rows of a batch as arrays `[B, S]`, and where the documents in them begin.

Padding and document boundaries are known from lengths and origins, never from token values: a pad id may equal the end
id, and an end id may stand in the middle of a text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.core.block import MISSING, Block, Column, Ints, Ragged, Text
from headrace.core.exact import exactly, first_changed
from headrace.core.tokens import ATTENTION_MASK, PAD_TOKEN_ID, PADDING, POSITIONS
from headrace.errors import DataError


class Stacked(NamedTuple):
    """One field as `[B, S]`, and its lengths before padding (None where no row was padded here)."""

    values: NDArray[Any]
    lengths: Ints | None


def stack_rows(block: Block, name: str, is_tokens: bool = False) -> Stacked:
    """A field with one sequence of numbers per row as one array. Rows of unequal length are padded only where the
    tokenizer was told to (`padding="longest"`), to the longest row of this batch; anything else is a DataError."""
    column = block.column(name)
    if isinstance(column, np.ndarray) and column.ndim == 2:
        return Stacked(column, None)
    ragged = _as_ragged(block, name, column)
    lengths = ragged.lengths
    width = int(lengths.max(initial=0))
    if (lengths == width).all():
        return Stacked(ragged.flat.reshape(len(lengths), width), None)
    pad_ids = block.column(PAD_TOKEN_ID)
    if isinstance(pad_ids, list) and lacking(pad_ids):
        low = int(np.argmin(lengths))
        raise _error(
            block,
            low,
            f"rows of {name!r} have unequal lengths, {lengths[low]} and {width}",
            "pack them (pack_flat), or tokenize with padding='longest' or padding='max_length'",
        )
    out = np.zeros((len(lengths), width), ragged.values.dtype)
    inside = np.arange(width) < lengths[:, None]
    if is_tokens:
        out[:] = np.asarray(pad_ids)[:, None]
    out[inside] = ragged.flat
    return Stacked(out, lengths)


def _as_ragged(block: Block, name: str, column: Column) -> Ragged:
    if isinstance(column, Ragged):
        return column
    if isinstance(column, (Text, np.ndarray)):
        kind = "text" if isinstance(column, Text) else f"an array of shape {column.shape[1:]} per row"
        raise _error(block, 0, f"field {name!r} is {kind}", "only fields with one number per token can be stacked")
    rows: list[NDArray[Any]] = []
    for number, value in enumerate(column):
        if value is MISSING:
            raise _error(block, number, f"field {name!r} is missing", "every record of a batch needs the field")
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in "biuf":
            raise _error(
                block,
                number,
                f"field {name!r} holds {type(value).__name__} of shape {array.shape}",
                "only fields with one number per token can be stacked",
            )
        rows.append(array)
    _refuse_rounding(block, name, rows)
    return Ragged.from_rows(rows)


def _refuse_rounding(block: Block, name: str, rows: list[NDArray[Any]]) -> None:
    """DataError for a whole number that the type which all rows fit would round."""
    types = {row.dtype for row in rows}
    if len(types) < 2:
        return
    common = np.result_type(*types)
    for number, row in enumerate(rows):
        place = first_changed(row, exactly(common))
        if place is not None:
            message = f"field {name!r} holds {row[place]} as {row.dtype}, and with the other rows it would be {common}"
            raise _error(block, number, message, "give the field one type")


def padding_lengths(block: Block, width: int, tokens: Stacked) -> NDArray[np.int64] | None:
    """Padding tokens at the end of each row, int64 `[B]`; None if there is none.

    From the `_padding` column, from lengths padded here, from the spans of packed rows, or from trailing zeros of an
    attention mask, whichever is there first. Padding in front of a row is a DataError.
    """
    column = block.column(PADDING)
    if not isinstance(column, list) or not lacking(column):
        padding = np.asarray(column, np.int64)
    elif tokens.lengths is not None:
        padding = width - tokens.lengths
    elif block.origin.rows is not None and block.origin.spans is not None:
        padding = width - _row_sums(block)
        if (padding < 0).any():
            return None  # a user's function has cut the rows; their spans say nothing any more
    else:
        return _masked_tail(block, width)
    wrong = (padding < 0) | (padding > width)
    if np.count_nonzero(wrong):
        row = int(np.argmax(wrong))
        raise _error(
            block,
            row,
            f"padding length {padding[row]} is outside 0..{width}, the length of the row",
            "a function after packing has changed the rows but not their padding",
        )
    return padding if np.count_nonzero(padding) else None


def _masked_tail(block: Block, width: int) -> NDArray[np.int64] | None:
    column = block.column(ATTENTION_MASK)
    if isinstance(column, list) and lacking(column) == len(column):
        return None
    mask = stack_rows(block, ATTENTION_MASK).values
    if not width or mask.shape[1] != width:
        return None
    seen = mask[:, ::-1] != 0
    padding = np.where(seen.any(axis=1), seen.argmax(axis=1), width)
    in_front = ~seen[:, -1] & (padding < width)
    if in_front.any():
        row = int(np.argmax(in_front))
        raise _error(
            block,
            row,
            f"{ATTENTION_MASK!r} begins with {int((mask[row] != 0).argmax())} zeros, which is padding in front of the row",
            "pad rows at their end; or take the field out, and give a loss_mask that is 0 on padding",
        )
    return padding if padding.any() else None


def is_there(column: Column) -> bool:
    """Whether any row has the field."""
    return not isinstance(column, list) or lacking(column) < len(column)


def lacking(column: list[Any]) -> int:
    """Rows without the field."""
    return sum(value is MISSING for value in column)  # not `in`: an array has no single truth


def _row_sums(block: Block) -> NDArray[np.int64]:
    assert block.origin.rows is not None and block.origin.spans is not None
    ends = np.concatenate([[0], np.cumsum(block.origin.spans[:, 1])])
    return np.diff(ends[block.origin.rows])


def segment_starts(block: Block, width: int, padding: NDArray[np.int64] | None) -> NDArray[np.bool_]:
    """True where a document begins, bool `[B, S]`; the padding of a row begins a segment of its own.

    Packed rows know their segments. Other rows are read by `positions`, which must restart at zero.
    """
    origin = block.origin
    pads = np.zeros(len(block), np.int64) if padding is None else padding
    starts = np.zeros((len(block), width), np.bool_)
    if origin.rows is not None and origin.spans is not None and (_row_sums(block) + pads == width).all():
        ends = np.cumsum(origin.spans[:, 1])
        begin = np.concatenate([[0], ends[:-1]])
        row = np.repeat(np.arange(len(block)), np.diff(origin.rows))
        base = np.concatenate([[0], ends])[origin.rows[:-1]]
        starts[row, begin - base[row]] = True
    else:
        column = block.column(POSITIONS)
        if isinstance(column, list) and lacking(column):
            raise _error(
                block,
                0,
                "these rows carry no document boundaries: neither segments of packing nor positions",
                "pack with pack_flat, or give the records a 'positions' field that restarts at zero",
            )
        positions = stack_rows(block, POSITIONS).values
        if positions.shape[1] != width:
            raise _error(block, 0, f"{positions.shape[1]} positions for {width} tokens", "positions need one per token")
        inside = np.arange(width) < (width - pads)[:, None]
        starts = (positions == 0) & inside
        late = inside[:, :1] & ~starts[:, :1]
        if late.any():
            row = int(late.any(axis=1).argmax())
            raise _error(
                block,
                row,
                f"positions begin with {positions[row, 0]}",
                "document boundaries are read from positions that start at zero in every row",
            )
    padded = np.flatnonzero(pads)
    starts[padded, width - pads[padded]] = True
    return starts


def _error(block: Block, row: int, what: str, remedy: str) -> DataError:
    origin = block.origin
    first = row if origin.rows is None else int(origin.rows[row])
    dataset, shard, number = origin.ids[first, :3].tolist() if first < len(origin.ids) else (-1, -1, -1)
    return DataError(
        f"to_training: {what} (row {row} of the batch; dataset {dataset}, shard {shard}, row {number}); {remedy}"
    )

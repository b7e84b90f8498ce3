"""What of a row is padding after something has changed the row: it is known by length, so a change of length has to be understood.

A row with as many tokens as before is as padded as before. One that became longer or shorter is read off its attention mask, if it
has one of as many numbers, or was cut at its end; otherwise nobody knows, and guessing would train on padding or leave out text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.core.block import DATASET, ROW, Block, Column, Ints, Ragged, slice_column, to_list
from headrace.core.tokens import ATTENTION_MASK, HIDDEN, PADDING, column_lengths, find_tokens_field, is_sequence
from headrace.errors import OperatorError


def hidden_columns(block: Block, columns: Mapping[str, Column]) -> dict[str, Column]:
    """The library's own columns for `columns`, which a function made of the rows of `block`, one of each.

    OperatorError names a row of which nobody knows what is padding now.
    """
    before = block.columns or {}
    own = {name: before[name] for name in sorted(HIDDEN) if name in before}
    padding, name = own.pop(PADDING, None), find_tokens_field(before)
    was = None if name is None else column_lengths(before[name], len(block))
    if padding is None or name is None or was is None:
        return own
    new = name if name in columns else find_tokens_field(columns)
    now = None if new is None else column_lengths(columns[new], len(block))
    if new is None or now is None:
        return own | ({PADDING: padding} if _has_as_long(columns, was) else {})
    padded = np.array(padding)
    for row in np.flatnonzero((was != now) & ((padded != 0) | (ATTENTION_MASK in columns))).tolist():
        mask = _value(columns[ATTENTION_MASK], row) if ATTENTION_MASK in columns else None
        left = padding_left(_value(columns[new], row), int(padded[row]), mask, _value(before[name], row))
        if left is None:
            raise unknown_padding(block, row, (int(was[row]), int(now[row])))
        padded[row] = left
    return own | {PADDING: padded}


def padding_left(tokens: Any, padding: int, mask: Any, before: Any = None) -> int | None:
    """Padding of a row that has another length now; None if nothing says. `before`: its tokens as they were, if they are known."""
    now = np.asarray(tokens)
    if mask is not None and np.ndim(mask) == 1 and len(mask) == len(now):
        return len(now) - int(np.flatnonzero(np.asarray(mask)).max(initial=-1)) - 1
    if not padding:
        return 0
    if before is not None and len(now) <= len(before) and np.array_equal(now, np.asarray(before)[: len(now)]):
        return max(0, padding - (len(before) - len(now)))
    return None


def padding_of_payload(payload: Any, padding: int, length: int) -> int | None:
    """Padding of a row that had `length` tokens, the last `padding` of them padding, and is this now. None: nobody knows."""
    if not isinstance(payload, Mapping):
        return None if padding else 0
    name = find_tokens_field(payload)
    if name is None or not is_sequence(payload[name]):
        return padding if any(is_sequence(value) and len(value) == length for value in payload.values()) else 0
    if len(payload[name]) == length:
        return padding
    return padding_left(payload[name], padding, payload.get(ATTENTION_MASK))


def unknown_padding(block: Block, row: int, lengths: tuple[int, int] | None) -> OperatorError:
    """What to say of a padded row: `lengths` before and now, None if its payload has no fields any more."""
    dataset, shard, at = block.origin.firsts()[row, DATASET : ROW + 1].tolist()
    made = "a payload without fields" if lengths is None else "{1} tokens of the {0}".format(*lengths)
    return OperatorError(
        f"a function has made {made} of a padded row (dataset {dataset}, shard {shard}, row {at}) and nothing says how many are "
        f"padding: return a mapping with an {ATTENTION_MASK!r} of as many numbers, change rows before they are padded, or (in "
        "map_transform and map_block) cut them at their end only"
    )


def padding_of(block: Block) -> Ints:
    """Padding tokens at the end of each row, as far as the library knows."""
    padding = (block.columns or {}).get(PADDING)
    return padding if isinstance(padding, np.ndarray) else np.zeros(len(block), np.int64)


def without_padding(block: Block) -> Block:
    """The same rows, the padding at their ends cut off from every field with a number per token."""
    columns, padding = block.columns or {}, padding_of(block)
    name = find_tokens_field(columns)
    lengths = None if name is None else column_lengths(columns[name], len(block))
    if lengths is None or not padding.any():
        return block
    ends = (lengths - padding).tolist()
    cut: dict[str, Column] = {}
    for each, column in columns.items():
        long = column_lengths(column, len(block))
        if each != PADDING and long is not None and np.array_equal(long, lengths):
            cut[each] = Ragged.from_rows(
                [np.asarray(row)[:end] for row, end in zip(to_list(column), ends, strict=True)]
            )
        elif each != PADDING:
            cut[each] = column
    return block.with_columns(cut)


def _has_as_long(columns: Mapping[str, Column], lengths: Any) -> bool:
    found = (column_lengths(column, len(lengths)) for column in columns.values())
    return any(each is not None and np.array_equal(each, lengths) for each in found)


def _value(column: Column, row: int) -> Any:
    return to_list(slice_column(column, row, row + 1))[0]

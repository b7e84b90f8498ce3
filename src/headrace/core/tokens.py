"""Names and shapes of token rows: what packing, batching and the training view agree on.

Two columns belong to the library and are hidden from payloads (`HIDDEN`; a user's own `_id` is not):

* `_padding` int32 `[n]`: padding tokens at the end of each row, known from lengths and never from token values;
* `_pad_token_id` int64 `[n]`: rows of unequal length are padded with this id to the longest of their batch, in the
  training view (`tokenize(padding="longest")`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.core.block import Block, Column, Ragged, Text

TOKEN_FIELDS: Final = ("input_ids", "tokens", "token_ids", "ids")
"""Where token ids are looked for, in this order, with `tokens_field="auto"`."""

POSITIONS: Final = "positions"
ATTENTION_MASK: Final = "attention_mask"
"""One number per token; 0 on padding."""
LOSS_MASK: Final = "loss_mask"
"""One number per token; the label of a token with 0 does not count."""
PADDING: Final = "_padding"
PAD_TOKEN_ID: Final = "_pad_token_id"
HIDDEN: Final = frozenset({PADDING, PAD_TOKEN_ID})
PIECE_BITS: Final = 20
"""A piece's ordinal is `ordinal of the row it was cut from << 20 | ordinal within that row`."""


def find_tokens_field(names: Iterable[str]) -> str | None:
    """The first of `TOKEN_FIELDS` among `names`."""
    present = set(names)
    return next((name for name in TOKEN_FIELDS if name in present), None)


def is_sequence(value: Any) -> bool:
    """True for a value that may hold a number per token: a 1-D numeric array or tensor, a list or tuple of numbers.
    An empty list is one as well; `holds_numbers` is what decides about the kind of a field."""
    return (isinstance(value, (list, tuple)) and not value) or holds_numbers(value)


def holds_numbers(value: Any) -> bool:
    """True for a sequence that says by itself that it is one of numbers. Text is none, and an empty list does not tell."""
    if isinstance(value, (list, tuple)):
        return bool(value) and isinstance(value[0], (int, float, np.number, np.bool_))
    shape = getattr(value, "shape", None)
    return shape is not None and len(shape) == 1 and not _is_object_array(value)


def _is_object_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind not in "biuf"


def column_lengths(column: Column, rows: int) -> NDArray[np.int64] | None:
    """Values per row, int64 `[n]`; None if the column does not hold sequences of numbers."""
    match column:
        case Ragged():
            return column.offsets[1:] - column.offsets[:-1]
        case Text():
            return None
        case list():
            if not all(is_sequence(value) for value in column):
                return None
            return np.fromiter(map(len, column), np.int64, len(column))
        case _:
            return np.full(rows, column.shape[1], np.int64) if column.ndim == 2 else None


def count_tokens(block: Block) -> int:
    """Tokens in the token field of a block, padding aside; 0 where it has none."""
    columns = block.as_columns()
    name = TOKEN_FIELDS[0] if TOKEN_FIELDS[0] in columns else find_tokens_field(columns)
    if name is None:
        return 0
    column = columns[name]
    if isinstance(column, np.ndarray) and column.ndim == 2:
        total = column.size
    else:
        lengths = column_lengths(column, len(block))
        if lengths is None:
            return 0
        total = int(lengths.sum())
    padding = columns.get(PADDING)
    if not isinstance(padding, np.ndarray) or not np.count_nonzero(padding):  # a third of the time of a sum
        return total
    return total - int(padding.sum())

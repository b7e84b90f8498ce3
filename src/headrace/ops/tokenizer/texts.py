"""The texts of a block's field as `str`, and the rows that have none.

Whole columns in the usual case: one pass that decodes, one check that no text holds a lone surrogate (half of a UTF-16 pair,
which no encoding can carry; it comes from JSON escapes such as "\\ud800").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.core.block import MISSING, Block, Column, Ints, Text, to_list
from headrace.core.op import BadRows
from headrace.errors import RecordError


def read_texts(block: Block, field: str, empty_if_missing: bool, bad: BadRows) -> tuple[list[str], Ints | None]:
    """Texts of the usable rows and their row numbers; None for the numbers if every row is usable."""
    column = block.column(field)
    texts = _whole(column)
    if texts is not None:
        return texts, None
    texts, rows = [], []
    values = column.to_bytes() if isinstance(column, Text) else to_list(column)
    for row, value in enumerate(values):
        text = "" if empty_if_missing and _is_absent(block, row, value) else _as_text(value)
        if isinstance(text, str):
            texts.append(text)
            rows.append(row)
        else:
            bad.add(row, RecordError(_complaint(block, row, field, value, text)))
    return texts, None if len(rows) == len(block) else np.array(rows, np.int64)


def _whole(column: Column) -> list[str] | None:
    """The column as texts if every row is one."""
    try:
        if isinstance(column, Text):
            return column.to_str()
        if isinstance(column, list) and all(type(value) is str for value in column):
            "".join([text for text in column if not text.isascii()]).encode()
            return column
    except UnicodeError:
        return None
    return None


def _is_absent(block: Block, row: int, value: Any) -> bool:
    if block.rows is not None and not isinstance(block.rows[row], Mapping):
        return False
    return value is None or value is MISSING


def _as_text(value: Any) -> str | UnicodeError | None:
    """The text, or why it is none."""
    try:
        if isinstance(value, (bytes, bytearray, memoryview)):
            return str(value, "utf-8")
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeError as error:
        return error
    return None


def _complaint(block: Block, row: int, field: str, value: Any, error: UnicodeError | None) -> str:
    payload = block.rows[row] if block.rows is not None else None
    if block.rows is not None and not isinstance(payload, Mapping):
        return (
            f"tokenize reads field {field!r}, but the record is a {type(payload).__name__} ({payload!r:.60}), not a mapping; "
            f"turn it into one first: .map_transform(lambda text: {{{field!r}: text}})"
        )
    if isinstance(error, UnicodeEncodeError):
        return (
            f"field {field!r} holds a lone surrogate (U+{ord(error.object[error.start]):04X} at character {error.start}), which is "
            "no text; repair it upstream, for example with text.encode('utf-8', 'replace').decode()"
        )
    if isinstance(error, UnicodeDecodeError):
        return (
            f"field {field!r} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}; "
            "name the encoding with .decode_text(encoding=...)"
        )
    have = _fields_of(block, row, field)
    if value is MISSING:
        return f"field {field!r} is missing; {have}. Name another field, or pass missing_field='empty' to take it as ''"
    if value is None:
        return f"field {field!r} is null; {have}. Pass missing_field='empty' to take it as ''"
    return f"field {field!r} is of type {type(value).__name__} ({value!r:.60}), not text; {have}"


def _fields_of(block: Block, row: int, field: str) -> str:
    """What the record has, as far as it was read: a block of columns also shows fields that only its neighbours have."""
    if block.rows is not None:
        names = set(map(str, block.rows[row]))
    else:
        names = {n for n, c in (block.columns or {}).items() if not (isinstance(c, list) and c[row] is MISSING)}
        if not names - {field.partition(".")[0]}:
            return "no other field was read"
    return f"the record has: {', '.join(sorted(names)[:20]) or 'no fields'}"

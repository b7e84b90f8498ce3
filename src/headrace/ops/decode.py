"""The `decode_text` operator: bytes to text, in place, field by field.

A column that is UTF-8 already and has nothing to change passes through as it is. What cannot be text (None, a list, a mapping)
is left alone if it is absent and reported if it is present: turning None into the word "None" would train on it.
"""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.block import MISSING, Block, Column, Text, field_roots, to_list
from headrace.core.op import BadRows, Fields, Worker
from headrace.errors import ConfigError, RecordError
from headrace.ops.named_fields import look_for

CR = 13


@dataclass(frozen=True)
class DecodeText:
    r"""Decode `fields` with `encoding` and `errors` (as in `bytes.decode`); numbers become their digits.

    `normalize_newlines` turns `\r\n` and `\r` into `\n`; `lowercase` lowers. `max_batch` and `max_latency_ms` are accepted for
    programs that pass them and change nothing: blocks are as large as the pipeline makes them.
    """

    fields: tuple[str, ...] | list[str] | str = ("text",)
    encoding: str = "utf-8"
    errors: str = "strict"
    normalize_newlines: bool = True
    lowercase: bool = False
    max_batch: int = 128
    max_latency_ms: float = 2

    def __post_init__(self) -> None:
        """Check names now, not at the first byte that needs them."""
        object.__setattr__(self, "fields", (self.fields,) if isinstance(self.fields, str) else tuple(self.fields))
        if not self.fields or not all(self.fields):
            raise ConfigError(f"decode_text(fields={self.fields!r}): name at least one field")
        for what, value, find in (
            ("encoding", self.encoding, _look_up_text),
            ("errors", self.errors, codecs.lookup_error),
        ):
            try:
                find(value)
            except LookupError as error:
                raise ConfigError(f"decode_text({what}={value!r}): {error}") from error

    @property
    def name(self) -> str:
        """Shown by explain() and in errors."""
        return "decode_text"

    def describe(self) -> dict[str, Any]:
        """Every parameter that decides data."""
        return {
            "fields": list(self.fields),
            "encoding": codecs.lookup(self.encoding).name,
            "errors": self.errors,
            "normalize_newlines": self.normalize_newlines,
            "lowercase": self.lowercase,
        }

    def prepare(self, sample: Block | None, notes: Any = None) -> DecodeText:
        """Look for the fields in the first records."""
        look_for("decode_text", self.fields, sample)
        return self

    def needs(self, downstream: Fields) -> Fields:
        """What is wanted further down, and the fields decoded: a record whose unused field is bad is bad in any plan."""
        return None if downstream is None else downstream | field_roots(self.fields)

    def worker(self) -> Worker:
        """A function from block to block."""
        return self._run

    def _run(self, block: Block, bad: BadRows) -> Block:
        faults: dict[int, RecordError] = {}
        for row, payload in enumerate(block.rows or ()):
            if not isinstance(payload, Mapping):
                faults[row] = RecordError(
                    f"decode_text needs records that are mappings; this one is a {type(payload).__name__} ({payload!r:.60})"
                )
        columns = dict(block.as_columns())
        for field in self.fields:
            root = field if field in columns else field.partition(".")[0]
            if root in columns:
                columns[root] = self._column(columns[root], field[len(root) + 1 :], field, faults)
        for row in sorted(faults):
            bad.add(row, faults[row])
        decoded = block.with_columns(columns)
        return (
            decoded.take(np.array([r for r in range(len(block)) if r not in faults], np.int64)) if faults else decoded
        )

    def _column(self, column: Column, inner: str, field: str, faults: dict[int, RecordError]) -> Column:
        if not inner and isinstance(column, Text) and self._unchanged(column):
            return column
        values = _text_rows(column) if isinstance(column, Text) else to_list(column)
        out: list[Any] = []
        for row, value in enumerate(values):
            try:
                out.append(self._inside(value, inner) if inner else self._text(value))
            except UnicodeError as error:
                faults.setdefault(row, RecordError(f"field {field!r} does not decode as {self.encoding}: {error}"))
                out.append(MISSING)
            except TypeError as error:
                faults.setdefault(row, RecordError(f"field {field!r}: {error}"))
                out.append(MISSING)
        return out

    def _unchanged(self, column: Text) -> bool:
        """True if every text of this column comes out as it is. Text is UTF-8 already, whatever `encoding` says of bytes."""
        if self.lowercase:
            return False
        data = column.data[column.offsets[0] : column.offsets[-1]]
        if self.normalize_newlines and bool((data == CR).any()):
            return False
        try:
            column.to_str()
        except UnicodeDecodeError:
            return False
        return True

    def _inside(self, value: Any, path: str) -> Any:
        """A copy of a nested mapping with the text at the dot path decoded."""
        if not isinstance(value, Mapping):
            return value
        head, _, rest = path.partition(".")
        key, rest = (path, "") if path in value else (head, rest)
        if key not in value:
            return value
        return {**value, key: self._inside(value[key], rest) if rest else self._text(value[key])}

    def _text(self, value: Any) -> Any:
        if value is None or value is MISSING:
            return value
        if isinstance(value, (bytes, bytearray, memoryview)):
            text = str(value, self.encoding, self.errors)
        elif isinstance(value, str):
            text = value
        elif isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
            text = str(value)
        else:
            raise TypeError(f"a {type(value).__name__} ({value!r:.60}) is neither bytes nor text")
        if self.normalize_newlines and "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        return text.lower() if self.lowercase else text


def _text_rows(column: Text) -> list[str | bytes]:
    """Each row as text, or as bytes where it is not UTF-8 after all."""
    rows: list[str | bytes] = []
    for raw in column.to_bytes():
        try:
            rows.append(str(raw, "utf-8"))
        except UnicodeDecodeError:
            rows.append(raw)
    return rows


def _look_up_text(encoding: str) -> None:
    """LookupError for a codec that is none, or none of text, like base64."""
    with contextlib.suppress(UnicodeError):
        b"x".decode(encoding)

"""Which fields of a record are packed, decided by a rule that looks at kinds and never at lengths.

* The token field is named, or the first of `input_ids`, `tokens`, `token_ids`, `ids`.
* Every other field that holds a sequence of numbers is **aligned**: it must have one value per token and is packed like
  the tokens (`attention_mask`, `loss_mask`, ...). A different length is an error that names the field.
* Everything else is dropped: text, bytes, scalars, lists of strings, mappings, None. A `loss_mask` of such a kind (other than
  None) is an error: without it every label would count.

The first record of the stream (or after a flush) decides the token field; the first one that has tokens decides the others
and their types, because an empty list says nothing about its kind. An empty document is asked for no other field. Both decisions
are part of the state, so that a resumed run judges records as the first one did. Token ids are int32 in every row. A record whose
values the type of a field does not hold as they are is an error; no value changes, and what a record comes to never depends on
which records are in the block with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.core.block import MISSING, Block, Column, Drop, Ints, Ragged, Text
from headrace.core.exact import exactly, first_changed
from headrace.core.padding import without_padding
from headrace.core.tokens import (
    HIDDEN,
    LOSS_MASK,
    POSITIONS,
    TOKEN_FIELDS,
    column_lengths,
    find_tokens_field,
    holds_numbers,
    is_sequence,
)
from headrace.errors import PayloadTypeError, RecordError

_NAME = "pack_flat"
TOKEN_TYPE: Final = np.dtype(np.int32)
"""What packed token ids are, whatever types they come in: shards written by other programs share rows."""


@dataclass(slots=True)
class TokenRows:
    """Documents to pack: `values[name][offsets[d]:offsets[d+1]]` of every field, offsets from zero; ids int64 `[d, 7]`."""

    values: dict[str, NDArray[Any]]
    offsets: Ints
    ids: Ints

    def __len__(self) -> int:
        return len(self.ids)


class AlignedFields:
    """Names and types of the packed fields of one stream."""

    def __init__(self, tokens_field: str, pad_token_id: int | None, emit_positions: bool) -> None:
        """Know nothing but the parameters."""
        self._asked, self._pad, self._emit_positions = tokens_field, pad_token_id, emit_positions
        self.clear()

    def clear(self) -> None:
        """Forget the stream."""
        self.tokens = ""
        self.dtypes: dict[str, np.dtype[Any] | None] = {}

    def state(self) -> dict[str, Any]:
        """Names and types, msgpack-able."""
        return {name: "" if dtype is None else dtype.str for name, dtype in self.dtypes.items()}

    def restore(self, state: Mapping[str, str]) -> None:
        """Continue from `state()`; the token field comes first."""
        self.dtypes = {name: np.dtype(text) if text else None for name, text in state.items()}
        self.tokens = next(iter(self.dtypes), "")

    def align(self, block: Block) -> TokenRows:
        """The packed fields of a block, flat. Raises RecordError before any of it is packed."""
        block = without_padding(block)
        columns = self._columns(block)
        if not len(block):
            return TokenRows({}, np.zeros(1, np.int64), block.origin.ids)
        tokens = self.tokens or self._find_tokens(block, columns)
        lengths = self._lengths(block, tokens, block.column(tokens))
        if not lengths.all():  # empty documents say nothing about fields, wherever they stand
            values = {name: np.empty(0, dtype) for name, dtype in self.dtypes.items()}
            if lengths.any():
                values = self.align(block.take(lengths.nonzero()[0])).values
            return TokenRows(values, np.concatenate([[0], lengths.cumsum()]), block.origin.ids)
        if not self._learned():
            self._learn(block, columns, 0)
        self._refuse_others(block, columns)
        values: dict[str, NDArray[Any]] = {}
        for name in self.dtypes:
            column = columns[name] if name in columns else block.column(name)
            found = lengths if name == tokens else self._lengths(block, name, column)
            if found is not lengths and (found != lengths).any():
                row = int((found != lengths).nonzero()[0][0])
                raise _error(
                    block,
                    row,
                    f"field {name!r} has {found[row]} values for {lengths[row]} tokens",
                    "make it one value per token, or remove the field before packing",
                )
            values[name] = self._typed(block, name, column, lengths)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        lengths.cumsum(out=offsets[1:])
        return TokenRows(values, offsets, block.origin.ids)

    def _columns(self, block: Block) -> dict[str, Column]:
        if block.origin.rows is not None:
            raise _error(block, 0, "the rows are packed already", "pack a stream once")
        for row, payload in enumerate(block.rows or ()):
            if not isinstance(payload, Mapping):
                found = f"a record must be a mapping with token ids, found {type(payload).__name__}"
                located = _error(block, row, found, "tokenize before packing")
                error = PayloadTypeError(str(located))
                error.origin = located.origin
                raise error
        return block.as_columns()

    def _refuse_others(self, block: Block, columns: dict[str, Column]) -> None:
        """RecordError for numbers in a field that the record which decided the fields did not have, and for a mask of none."""
        for name, column in columns.items():
            if name not in self.dtypes and name not in HIDDEN:
                row = _first_numbers(column)
                if row is not None:
                    message = f"field {name!r} appears in some records only"
                    raise _error(block, row, message, "give all records the same fields")
                if name == LOSS_MASK and (row := _first_value(column)) is not None:
                    message = f"field {name!r} holds {_kind(column, row)}, and a mask is one number per token"
                    raise _error(block, row, message, "mend the record, or remove the field before packing")

    def _learned(self) -> bool:
        return bool(self.tokens) and self.dtypes[self.tokens] is not None

    def _find_tokens(self, block: Block, columns: dict[str, Column]) -> str:
        """Name of the token field, from the first record."""
        first = [name for name, column in columns.items() if _may_be_tokens(column, 0)]
        name = find_tokens_field(first) if self._asked == "auto" else self._asked
        if name is None or not _may_be_tokens(block.column(name), 0):
            self._refuse_kind(block, columns)
            looked = " or ".join(TOKEN_FIELDS) if self._asked == "auto" else repr(self._asked)
            has = ", ".join(sorted(columns)) or "no fields"
            raise _error(
                block,
                0,
                f"no token ids: looked for {looked}, the record has {has}",
                "tokenize before packing, or name the field with tokens_field=",
            )
        self.tokens = name
        self.dtypes = dict.fromkeys([name])
        return name

    def _refuse_kind(self, block: Block, columns: dict[str, Column]) -> None:
        """RecordError if the first record has a token field, but not of numbers one after the other."""
        name = find_tokens_field(columns) if self._asked == "auto" else self._asked
        column = block.column(name) if name is not None else [MISSING]
        if not isinstance(column, list) or column[0] is not MISSING:
            message = f"field {name!r} holds {_kind(column, 0)}, and token ids are numbers one after the other"
            raise _error(block, 0, message, "tokenize before packing, or name the field with tokens_field=")

    def _learn(self, block: Block, columns: dict[str, Column], row: int) -> None:
        """Names and types of the packed fields, from a record with tokens."""
        found = {self.tokens: _dtype(block.column(self.tokens), row)}
        for name, column in columns.items():
            if name != self.tokens and name not in HIDDEN and _is_numbers(column, row):
                found[name] = _dtype(column, row)
        if self._emit_positions and POSITIONS in found:
            raise _error(
                block, row, "the record has 'positions' already", "pass emit_positions=False or remove the field"
            )
        for name, dtype in found.items():
            if dtype.kind not in "biuf":
                raise _not_numbers(block, row, name)
        if found[self.tokens].kind != "f":
            found[self.tokens] = TOKEN_TYPE
        dtype = found[self.tokens]
        if self._pad is not None and dtype.kind in "iu" and not np.iinfo(dtype).min <= self._pad <= np.iinfo(dtype).max:
            message = f"pad_token_id {self._pad} does not fit the token type {dtype}"
            raise _error(block, row, message, "use a wider type or another id")
        self.dtypes.update(found)

    def _lengths(self, block: Block, name: str, column: Column) -> Ints:
        lengths = column_lengths(column, len(block))
        if lengths is not None:
            return lengths
        values = column if isinstance(column, list) else [None] * len(block)
        row = next((row for row, value in enumerate(values) if not is_sequence(value)), 0)
        found = "missing" if not values or values[row] is MISSING else f"a {type(values[row]).__name__}"
        raise _error(
            block,
            row,
            f"field {name!r} must hold numbers, one per token, as in the records before; it is {found}",
            "give all records the same fields",
        )

    def _typed(self, block: Block, name: str, column: Column, lengths: Ints) -> NDArray[Any]:
        """Values of one field, flat, in the type the stream has. Each record is judged by its own values."""
        dtype = self.dtypes[name]
        assert dtype is not None
        at, out = 0, list[NDArray[Any]]()
        for values in self._parts(block, name, column):
            place = _first_changed(values, dtype)
            if place is not None:
                row = int(lengths.cumsum().searchsorted(at + place, side="right"))
                message = f"field {name!r} is {values.dtype} here and {dtype} in a packed row, which does not hold {values[place]}"
                raise _error(block, row, message, "give the field one type")
            at += len(values)
            out.append(values.astype(dtype, copy=False))
        return out[0] if len(out) == 1 else np.concatenate(out)

    def _parts(self, block: Block, name: str, column: Column) -> list[NDArray[Any]]:
        """Values of one field, flat, in as few arrays as it has types."""
        if not isinstance(column, list):
            return [column.flat if isinstance(column, Ragged) else np.asarray(column).reshape(-1)]
        arrays = [np.asarray(value) for value in column]
        types = {array.dtype for array in arrays}
        kinds = {dtype.kind for dtype in types}
        if not kinds <= set("biuf"):
            raise _not_numbers(block, next(i for i, array in enumerate(arrays) if array.dtype.kind not in "biuf"), name)
        if "f" in kinds and (row := _first_rounded(column, arrays)) is not None:
            message = f"field {name!r} holds fractions and whole numbers of more than 53 bits, and no type holds both"
            raise _error(block, row, message, "mend the record, or remove the field before packing")
        return [np.concatenate(arrays)] if len(types) == 1 else arrays


def lengths_of_documents(block: Block, asked: str) -> Ints:
    """Tokens of each document, int64 `[n]`; zero where packing will find out that there are none."""
    block = without_padding(block)
    columns, rows = block.as_columns(), range(len(block))
    found = (name for name, column in columns.items() if any(_may_be_tokens(column, row) for row in rows))
    name = find_tokens_field(found) if asked == "auto" else asked
    column = [] if name is None else block.column(name)
    if isinstance(column, list) and column:
        return np.array([len(value) if is_sequence(value) else 0 for value in column], np.int64)
    lengths = None if isinstance(column, list) else column_lengths(column, len(block))
    return np.zeros(len(block), np.int64) if lengths is None else lengths


def _may_be_tokens(column: Column, row: int) -> bool:
    """True if one record's value may be token ids; an empty list may."""
    return is_sequence(column[row]) if isinstance(column, list) else _is_numbers(column, row)


def _is_numbers(column: Column, row: int) -> bool:
    """True if the field holds a sequence of numbers, judged by one record."""
    match column:
        case Ragged():
            return True
        case Text():
            return False
        case list():
            return holds_numbers(column[row])
        case _:
            return column.ndim == 2


def _first_numbers(column: Column) -> int | None:
    """The first record whose field holds a sequence of numbers."""
    if isinstance(column, list):
        return next((row for row, value in enumerate(column) if holds_numbers(value)), None)
    return 0 if _is_numbers(column, 0) else None


def _first_value(column: Column) -> int | None:
    """The first record with anything in the field but None or an empty sequence."""
    if not isinstance(column, list):
        return 0
    return next(
        (row for row, v in enumerate(column) if v is not None and v is not MISSING and not is_sequence(v)), None
    )


def _kind(column: Column, row: int) -> str:
    """What a field holds that holds no sequence of numbers."""
    match column:
        case Text():
            return "text"
        case list():
            shape = getattr(column[row], "shape", None)
            return f"a {type(column[row]).__name__}" + (f" of shape {tuple(shape)}" if shape else "")
        case Ragged():
            return "numbers"
        case np.ndarray() if column.ndim == 1:
            return f"a {type(column[row].item()).__name__}"
        case _:
            return f"an array of shape {column.shape[1:]} per record"


def _first_changed(values: NDArray[Any], dtype: np.dtype[Any]) -> int | None:
    """Place of the first value that another type would not hold as it is."""
    if values.dtype == dtype:
        return None
    if values.dtype.kind == dtype.kind == "f":
        with np.errstate(over="ignore"):
            changed = (values.astype(dtype) != values) & ~np.isnan(values)
        return int(np.argmax(changed)) if changed.any() else None
    return first_changed(values, exactly(dtype))


def _first_rounded(column: Sequence[Any], arrays: Sequence[NDArray[Any]]) -> int | None:
    """The first record in which numpy has made a float of a whole number that is none."""
    for row, (value, array) in enumerate(zip(column, arrays, strict=True)):
        large = isinstance(value, (list, tuple)) and array.dtype.kind == "f" and (np.abs(array) >= 1 << 53).any()
        if large and any(isinstance(one, int) and one != float(one) for one in value):
            return row
    return None


def _not_numbers(block: Block, row: int, name: str) -> RecordError:
    message = f"field {name!r} holds something that is no number of up to 64 bits"
    return _error(block, row, message, "mend the record, or remove the field before packing")


def _dtype(column: Column, row: int) -> np.dtype[Any]:
    match column:
        case Ragged():
            return column.values.dtype
        case np.ndarray():
            return column.dtype
        case _:
            return np.asarray(column[row]).dtype if isinstance(column, list) else np.dtype(np.uint8)


def _error(block: Block, row: int, what: str, remedy: str) -> RecordError:
    dataset, shard, number = block.origin.ids[row, :3].tolist() if len(block.origin.ids) else (-1, -1, -1)
    error = RecordError(f"{_NAME}: {what} (dataset {dataset}, shard {shard}, row {number}); {remedy}")
    error.origin = tuple(block.origin.ids[row].tolist()) if len(block.origin.ids) else None
    return error


def left_of_begun(fields: AlignedFields, documents: Block, begun: Ints) -> tuple[Drop, ...]:
    """Word of the tokens behind the first `begun` of these documents, where a packer cannot go on with them."""
    if not len(documents):
        return ()
    offsets = fields.align(documents).offsets
    tokens = int((offsets[1:] - offsets[:-1] - begun).sum())
    return (Drop(_NAME, "begun before packing was changed", documents.origin.ids[:0], tokens),)


def without_empty(rows: TokenRows) -> tuple[TokenRows, Ints]:
    """The documents that have tokens, and the ids of those that have none."""
    empty = rows.offsets[1:] == rows.offsets[:-1]
    if not empty.any():
        return rows, rows.ids[:0]
    offsets = np.concatenate([rows.offsets[:1], rows.offsets[1:][~empty]])
    return TokenRows(rows.values, offsets, rows.ids[~empty]), rows.ids[empty]

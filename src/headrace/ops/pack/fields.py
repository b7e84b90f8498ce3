"""Which fields of a record are packed, decided by a rule that looks at kinds and never at lengths.

* The token field is named, or the first of `input_ids`, `tokens`, `token_ids`, `ids`.
* Every other field that holds a sequence of numbers is **aligned**: it must have one value per token and is packed like
  the tokens (`attention_mask`, `loss_mask`, ...). A different length is an error that names the field.
* Everything else is dropped: text, bytes, scalars, lists of strings, mappings, None.

The first record of the stream (or after a flush) decides names, the first record with tokens decides types. Both are
part of the state, so a resumed run judges records as the first one did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.core.block import MISSING, Block, Column, Ints, Ragged, Text
from headrace.core.tokens import POSITIONS, TOKEN_FIELDS, column_lengths, find_tokens_field, is_sequence
from headrace.errors import PayloadTypeError, RecordError

_NAME = "pack_flat"


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
        """The packed fields of a block, flat. Raises RecordError before anything is changed for good."""
        columns = self._columns(block)
        if not self.tokens and len(block):
            self._learn_names(block, columns)
        lengths = np.zeros(0, np.int64)
        values: dict[str, NDArray[Any]] = {}
        for name in self.dtypes:
            column = columns[name] if name in columns else block.column(name)
            found = self._lengths(block, name, column)
            if name == self.tokens:
                lengths = found
            elif (found != lengths).any():
                row = int(np.flatnonzero(found != lengths)[0])
                raise _error(
                    block,
                    row,
                    f"field {name!r} has {found[row]} values for {lengths[row]} tokens",
                    "make it one value per token, or remove the field before packing",
                )
            values[name] = self._typed(block, name, column, lengths)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return TokenRows(values, offsets, block.origin.ids)

    def _columns(self, block: Block) -> dict[str, Column]:
        if block.origin.rows is not None:
            raise _error(block, 0, "the rows are packed already", "pack a stream once")
        if block.rows is not None:
            for row, payload in enumerate(block.rows):
                if not isinstance(payload, Mapping):
                    found = f"a record must be a mapping with token ids, found {type(payload).__name__}"
                    raise PayloadTypeError(str(_error(block, row, found, "tokenize before packing")))
        columns = block.as_columns()
        for name, column in columns.items():
            known = name in self.dtypes or name.startswith("_") or not self.tokens
            if not known and _holds_sequences(column):
                raise _error(
                    block, 0, f"field {name!r} appears in some records only", "give all records the same fields"
                )
        return columns

    def _learn_names(self, block: Block, columns: dict[str, Column]) -> None:
        first = {name: column for name, column in columns.items() if _starts_with_sequence(column)}
        tokens = find_tokens_field(first) if self._asked == "auto" else self._asked
        asked = None if tokens is None else block.column(tokens)
        if tokens is None or asked is None or not _starts_with_sequence(asked):
            looked = " or ".join(TOKEN_FIELDS) if self._asked == "auto" else repr(self._asked)
            raise _error(
                block,
                0,
                f"no token ids: looked for {looked}, the record has {', '.join(sorted(columns)) or 'no fields'}",
                "tokenize before packing, or name the field with tokens_field=",
            )
        if self._emit_positions and POSITIONS in first:
            raise _error(
                block, 0, "the record has 'positions' already", "pass emit_positions=False or remove the field"
            )
        names = [tokens, *(name for name in first if name != tokens and not name.startswith("_"))]
        self.tokens, self.dtypes = tokens, dict.fromkeys(names)

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
        """Values of one field, flat, in the type the stream has."""
        if isinstance(column, list):
            arrays = [np.asarray(value) for value in column if len(value)]
            flat = np.concatenate(arrays) if arrays else np.empty(0, self.dtypes[name])
            if not arrays:
                return flat
        else:
            flat = column.flat if isinstance(column, Ragged) else np.asarray(column).reshape(-1)
        dtype = self.dtypes[name]
        if dtype is None:
            dtype = self._learn_type(block, name, column, flat)
        if flat.dtype == dtype:
            return flat
        cast = flat.astype(dtype)
        if not np.can_cast(flat.dtype, dtype, "safe") and (cast != flat).any():
            row = int(np.searchsorted(np.cumsum(lengths), np.flatnonzero(cast != flat)[0], side="right"))
            raise _error(
                block,
                row,
                f"field {name!r} is {flat.dtype} here and {dtype} before, and the values do not fit",
                "give the field one type",
            )
        return cast

    def _learn_type(self, block: Block, name: str, column: Column, flat: NDArray[Any]) -> np.dtype[Any]:
        if isinstance(column, list):  # the first record with tokens decides, not the block
            flat = np.asarray(next(value for value in column if len(value)))
        dtype = flat.dtype
        if name == self.tokens and self._pad is not None and dtype.kind in "iu":
            limits = np.iinfo(dtype)
            if not limits.min <= self._pad <= limits.max:
                raise _error(
                    block,
                    0,
                    f"pad_token_id {self._pad} does not fit the token type {dtype}",
                    "use a wider type or another id",
                )
        self.dtypes[name] = dtype
        return dtype


def _holds_sequences(column: Column) -> bool:
    match column:
        case Ragged():
            return True
        case Text():
            return False
        case list():
            return any(is_sequence(value) for value in column)
        case _:
            return column.ndim == 2


def _starts_with_sequence(column: Column) -> bool:
    if isinstance(column, list):
        return bool(column) and is_sequence(column[0])
    return _holds_sequences(column)


def _error(block: Block, row: int, what: str, remedy: str) -> RecordError:
    dataset, shard, number = block.origin.ids[row, :3].tolist() if len(block.origin.ids) else (-1, -1, -1)
    return RecordError(f"{_NAME}: {what} (dataset {dataset}, shard {shard}, row {number}); {remedy}")


def without_empty(rows: TokenRows) -> tuple[TokenRows, Ints]:
    """The documents that have tokens, and the ids of those that have none."""
    empty = rows.offsets[1:] == rows.offsets[:-1]
    if not empty.any():
        return rows, rows.ids[:0]
    offsets = np.concatenate([rows.offsets[:1], rows.offsets[1:][~empty]])
    return TokenRows(rows.values, offsets, rows.ids[~empty]), rows.ids[empty]

"""Arrow columns as block columns, without a copy where the layouts agree.

Text stays UTF-8 bytes and offsets; numbers are numpy; numeric lists are `Ragged`, or `[n, S]` if their size is fixed. What
holds nulls or structure becomes Python objects, made for the rows asked for and not before. A row's value is the same either
way: it does not depend on whether some other row of its row group is null.

What is stored is read-only, and others will read it. Numbers that are handed out are a copy, which is the caller's own to change
whatever rows it asked for. Of the bytes of text it may be a view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.core.block import Column, Ints, Ragged, Text, concat_columns, slice_column, take_column
from headrace.io.buffers import BufferPool

_VIEW_SHARE = 4
"""Text of at least one part in this many of its column is a view; less is copied, since a view would keep the whole column in
memory for as long as somebody holds a few of its rows."""


@dataclass(frozen=True, slots=True)
class Objects:
    """A column whose rows become Python objects when they are read."""

    array: pa.ChunkedArray | pa.Array

    def __len__(self) -> int:
        return len(self.array)


Stored = Column | Objects


def store_column(column: pa.ChunkedArray) -> Stored:
    """Turn a decoded column into what `take_rows` serves from."""
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    if not chunks:
        return Objects(column)
    parts = [_store_chunk(chunk) for chunk in chunks]
    if any(isinstance(part, Objects) for part in parts):
        return Objects(column)
    joined = concat_columns([part for part in parts if not isinstance(part, Objects)])
    for array in _arrays(joined):
        array.flags.writeable = False
    return joined


def _arrays(column: Column) -> list[NDArray[Any]]:
    match column:
        case Text():
            return [column.data, column.offsets]
        case Ragged():
            return [column.values, column.offsets]
        case list():
            return []
        case _:
            return [column]


def unsound_rows(column: pa.ChunkedArray) -> dict[int, str]:
    """Rows with text that is not UTF-8, and what Arrow says of it. Neither writers nor decoders look."""
    if not _has_text(column.type):
        return {}
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return _unsound(column.cast(_spelled_out(column.type)))
    return {}


def _unsound(column: pa.ChunkedArray) -> dict[int, str]:
    """The same, of a column that holds its text row by row: part of a dictionary is as bad as all of it."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        n = len(column)
        if n == 1:
            return {0: str(error)}
        halves = ((0, n // 2), (n // 2, n))
        parts = [(a, column.take(pa.array(range(a, b), pa.int64()))) for a, b in halves]
        return {a + row: reason for a, part in parts for row, reason in _unsound(part).items()}
    return {}


def _has_text(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_text(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _has_text(kind.value_type)
    if pa.types.is_nested(kind):
        return any(_has_text(kind.field(i).type) for i in range(kind.num_fields))
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _spelled_out(kind: pa.DataType) -> pa.DataType:
    """The type without dictionaries."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_struct(kind):
        return pa.struct([kind.field(i).with_type(_spelled_out(kind.field(i).type)) for i in range(kind.num_fields)])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_spelled_out(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_spelled_out(kind.value_type)))
    return kind


def stored_bytes(column: Stored) -> int:
    """Memory that a stored column keeps."""
    match column:
        case Objects():
            return column.array.nbytes
        case Text():
            return column.data.nbytes + column.offsets.nbytes
        case Ragged():
            return column.values.nbytes + column.offsets.nbytes
        case list():
            return 64 * len(column)
        case _:
            return column.nbytes


def take_rows(column: Stored, rows: Ints) -> Column:
    """Rows in the order of `rows`; fresh objects for each."""
    if isinstance(column, Objects):
        return _objects(column.array.take(pa.array(rows)))
    taken = take_column(column, rows)
    if isinstance(taken, Ragged) and not taken.values.flags.writeable:  # one run of rows is a view
        return Ragged(taken.values.copy(), taken.offsets)
    return taken


def slice_rows(column: Stored, start: int, stop: int, pool: BufferPool) -> Column:
    """Rows `start:stop`: a copy, or a view where it is text and a large part of the column."""
    match column:
        case Objects():
            return _objects(column.array.slice(start, stop - start))
        case Text() if (stop - start) * _VIEW_SHARE >= len(column):
            return slice_column(column, start, stop)
        case Text():
            data, offsets = _copy(column.data, column.offsets[start : stop + 1], pool)
            return Text(data, offsets)
        case Ragged():
            values, offsets = _copy(column.values, column.offsets[start : stop + 1], pool)
            return Ragged(values, offsets)
        case list():
            return column[start:stop]
        case _:
            out = pool.empty((stop - start, *column.shape[1:]), column.dtype)
            np.copyto(out, column[start:stop])
            return out


def _copy(values: NDArray[Any], offsets: Ints, pool: BufferPool) -> tuple[NDArray[Any], Ints]:
    first, last = int(offsets[0]), int(offsets[-1])
    out = pool.empty((last - first,), values.dtype)
    np.copyto(out, values[first:last])
    return out, offsets - first


def _objects(array: pa.ChunkedArray | pa.Array) -> list[Any]:
    """A Python object for each row; what would be an array in a column without nulls is one here too."""
    kind = array.type
    if pa.types.is_timestamp(kind) and kind.unit == "ns":  # `datetime` has no nanoseconds
        return [None if value is None else np.datetime64(value, "ns") for value in array.cast(pa.int64()).to_pylist()]
    if _is_list(kind) and _is_number(kind.value_type):
        return [_numbers(row.values) if row.is_valid else None for row in array]
    return array.to_pylist()


def _numbers(values: Any) -> Any:
    return values.to_pylist() if values.null_count else values.to_numpy(zero_copy_only=False).copy()


def _store_chunk(array: pa.Array) -> Stored:
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _store_chunk(array.storage)
    if pa.types.is_dictionary(kind):
        return _store_chunk(array.dictionary_decode())
    if array.null_count or pa.types.is_null(kind):
        return Objects(array)
    if pa.types.is_string_view(kind):
        return _store_chunk(array.cast(pa.large_string()))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _text(array)
    if (
        pa.types.is_boolean(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or (pa.types.is_timestamp(kind) and kind.unit != "ns" and kind.tz is None)
    ):
        return array.to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(kind) and _is_number(kind.value_type) and not array.flatten().null_count:
        return array.flatten().to_numpy(zero_copy_only=False).reshape(len(array), kind.list_size)
    if _is_list(kind) and not pa.types.is_fixed_size_list(kind) and _is_number(kind.value_type):
        return _ragged(array)
    return Objects(array)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _text(array: pa.Array) -> Text:
    wide = pa.types.is_large_string(array.type)
    _, offset_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64 if wide else np.int32)[array.offset : array.offset + len(array) + 1]
    data: NDArray[np.uint8] = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.empty(0, np.uint8)
    return Text(data, offsets.astype(np.int64, copy=False))


def _ragged(array: Any) -> Stored:
    values = array.values
    offsets = array.offsets.to_numpy().astype(np.int64, copy=False)
    if values.null_count:
        return Objects(array)
    return Ragged(values.to_numpy(zero_copy_only=False), offsets)

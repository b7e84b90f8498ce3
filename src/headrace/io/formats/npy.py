"""Packed rows as NumPy files: one file a shard, one integer array `[n, S]` a file, field `input_ids`.

Files are memory-mapped, and rows are gathered into pooled buffers in one call: reading is a matter of memory bandwidth, and
fresh pages cost five times as much as reused ones.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from headrace.core.block import Ints
from headrace.core.op import BadRows
from headrace.errors import ConfigError, DataChangedError, FormatError
from headrace.io.buffers import BufferPool
from headrace.io.formats.base import Payload, ShardTable, check_shard_rows, map_files
from headrace.io.options import StoreOptions
from headrace.io.store import Entry, LocalFile, Store, is_url

FIELD = "input_ids"
OPEN_SHARDS = 256


class NpyFormat:
    """See the module."""

    name = "npy"
    suffixes = (".npy",)

    def count(self, store: Store, entries: Sequence[Entry], options: StoreOptions) -> Ints:
        """Rows by the header; all files must have rows of one length."""
        if is_url(store.root):
            raise ConfigError(
                f"npy files are memory-mapped and {store.root} is not a local folder; copy the files first"
            )
        shapes = map_files(entries, lambda entry: _map(store.path(entry.name), entry).shape)
        for entry, shape in zip(entries, shapes, strict=True):
            if shape[1] != shapes[0][1]:
                raise FormatError(
                    f"{store.path(entry.name)} has rows of {shape[1]} tokens and {entries[0].name} of {shapes[0][1]}; "
                    "rows of one dataset must have one length. Make a dataset for each"
                )
        return np.array([shape[0] for shape in shapes], np.int64)

    def open(self, dataset: str, table: ShardTable, options: StoreOptions) -> NpyReader:
        """A reader."""
        return NpyReader(dataset, table, options)


FORMAT = NpyFormat()


def _map(path: str, entry: Entry) -> NDArray[Any]:
    """Map a file as int `[n, S]`; FormatError if it is not that or is cut off."""
    LocalFile(path, entry.size, entry.stamp)
    try:
        array = npy_format.open_memmap(path, mode="r") if _rows_of(path) else _empty(path)
    except DataChangedError:
        raise
    except (ValueError, OSError, EOFError) as error:
        raise FormatError(
            f"{path} ({entry.size} bytes) cannot be read as a NumPy array: {error}. Copy or write the file anew"
        ) from error
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise FormatError(
            f"{path} holds {array.dtype} {array.shape}; packed rows must be integers [rows, tokens]. "
            "Reshape with numpy.save(path, array.reshape(-1, S))"
        )
    return array


def _rows_of(path: str) -> int:
    return int(np.prod(_header(path)[0], dtype=np.int64))


def _header(path: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with open(path, "rb") as file:
        version = npy_format.read_magic(file)
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, _, dtype = read(file)
    return shape, dtype


def _empty(path: str) -> NDArray[Any]:
    """A file without elements cannot be mapped."""
    return np.empty(*_header(path))


class NpyReader:
    """Gathers rows from maps."""

    def __init__(self, dataset: str, table: ShardTable, options: StoreOptions) -> None:
        """Nothing is opened before the first read."""
        self._dataset = dataset
        self._table = table
        self._store = table.store(options)
        self._pool = BufferPool()
        self._lock = threading.Lock()
        self._maps: OrderedDict[int, tuple[LocalFile, NDArray[Any]]] = OrderedDict()

    def read(self, shard: int, rows: Ints, fields: frozenset[str] | None, bad: BadRows | None = None) -> Payload:
        """`input_ids` as `[len(rows), S]` in the file's own integer type (native byte order)."""
        check_shard_rows(self._dataset, self._table.names, self._table.counts, shard, rows)
        if fields is not None and FIELD not in fields:
            return {}
        file, data = self._map(shard)
        file.check()
        out = self._pool.empty((len(rows), data.shape[1]), data.dtype.newbyteorder("="))
        n = len(rows)
        if n and int(rows[-1]) - int(rows[0]) == n - 1 and bool((rows[1:] - rows[:-1] == 1).all()):
            np.copyto(out, data[int(rows[0]) : int(rows[0]) + n])
        elif data.dtype.isnative:
            np.take(data, rows, axis=0, out=out, mode="clip")  # rows are checked above; "raise" would copy twice
        else:
            out[:] = data[rows]
        return {FIELD: out}

    def close(self) -> None:
        """Forget the maps; each goes when its last read is over."""
        with self._lock:
            self._maps.clear()

    def _map(self, shard: int) -> tuple[LocalFile, NDArray[Any]]:
        with self._lock:
            if (found := self._maps.get(shard)) is not None:
                self._maps.move_to_end(shard)
                return found
        entry = self._table.entry(shard)
        path = self._store.path(entry.name)
        made = (LocalFile(path, entry.size, entry.stamp), np.asarray(_map(path, entry)))
        with self._lock:
            found = self._maps.setdefault(shard, made)
            while len(self._maps) > OPEN_SHARDS:
                self._maps.popitem(last=False)
        return found

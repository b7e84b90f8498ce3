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
from headrace.errors import ConfigError, FormatError
from headrace.io.buffers import BufferPool
from headrace.io.formats.base import Payload, ShardTable, check_shard_rows, map_files, open_limit
from headrace.io.options import StoreOptions
from headrace.io.store import Entry, File, Store

FIELD = "input_ids"


class NpyFormat:
    """See the module."""

    name = "npy"
    suffixes = (".npy",)

    def count(self, store: Store, entries: Sequence[Entry], options: StoreOptions) -> Ints:
        """Rows by the header; all files must have rows of one length."""
        shapes = map_files(entries, lambda entry: _map(store, entry)[1].shape)
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


def _map(store: Store, entry: Entry) -> tuple[File, NDArray[Any]]:
    """Map a file as int `[n, S]`; FormatError if it is not that or is cut off."""
    file = store.open(entry)
    path = file.local_path
    if path is None:
        raise ConfigError(
            f"{file.path} is remote, and npy files are memory-mapped; let whole copies be kept on this machine with "
            'options={"cache": {"enabled": True}}'
        )
    try:
        shape, dtype, begin = _header(path)
        empty = 0 in shape  # nothing to map
        array = np.empty(shape, dtype) if empty else np.asarray(npy_format.open_memmap(path, mode="r"))
    except (ValueError, OSError, EOFError) as error:
        raise FormatError(
            f"{file.path} ({entry.size} bytes) cannot be read as a NumPy array: {error}. Copy or write the file anew"
        ) from error
    if (stop := begin + array.nbytes) < entry.size:
        raise FormatError(
            f"{file.path} has {entry.size} bytes and its array ends at byte {stop}; of several arrays in one file only the "
            "first would be read. Write a file for each"
        )
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise FormatError(
            f"{file.path} holds {array.dtype} {array.shape}; packed rows must be integers [rows, tokens]. "
            "Reshape with numpy.save(path, array.reshape(-1, S))"
        )
    return file, array


def _header(path: str) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type, and where the data begin."""
    with open(path, "rb") as file:
        version = npy_format.read_magic(file)
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, _, dtype = read(file)
        return shape, dtype, file.tell()


class NpyReader:
    """Gathers rows from maps."""

    def __init__(self, dataset: str, table: ShardTable, options: StoreOptions) -> None:
        """Nothing is opened before the first read."""
        self._dataset = dataset
        self._table = table
        self._store = table.store(options)
        self._pool = BufferPool()
        self._limit = open_limit(2)
        self._lock = threading.Lock()
        self._maps: OrderedDict[int, tuple[File, NDArray[Any]]] = OrderedDict()

    def read(self, shard: int, rows: Ints, fields: frozenset[str] | None, bad: BadRows | None = None) -> Payload:
        """`input_ids` as `[len(rows), S]` in the file's own integer type (native byte order)."""
        run = check_shard_rows(self._dataset, self._table.names, self._table.counts, shard, rows)
        if fields is not None and FIELD not in fields:
            return {}
        file, data = self._map(shard)
        file.check()
        out = self._pool.empty((len(rows), data.shape[1]), data.dtype.newbyteorder("="))
        if run:
            np.copyto(out, data[int(rows[0]) : int(rows[-1]) + 1])
        elif data.dtype.isnative:
            data.take(rows, 0, out, "clip")  # rows are checked above; "raise" would copy twice
        else:
            out[:] = data[rows]
        return {FIELD: out}

    def close(self) -> None:
        """Forget the maps; each goes when its last read is over."""
        with self._lock:
            self._maps.clear()

    def _map(self, shard: int) -> tuple[File, NDArray[Any]]:
        with self._lock:
            if (found := self._maps.get(shard)) is not None:
                self._maps.move_to_end(shard)
                return found
        made = _map(self._store, self._table.entry(shard))
        with self._lock:
            found = self._maps.setdefault(shard, made)
            while len(self._maps) > self._limit:
                self._maps.popitem(last=False)
        return found

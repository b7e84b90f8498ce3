"""Newline indexes kept between runs: find, check, build.

An index is looked up by the path of its file and taken only if size and modification time (or ETag) are those of the file
now. It is written whole or not at all, so processes may build the same one at once; the last to finish wins, and all
wrote the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Final

from headrace.errors import DataChangedError, FormatError
from headrace.io.cache import cache_root, key_of, writing
from headrace.io.newline_index import NewlineIndex, read_index, split_chunks, write_index
from headrace.io.options import StoreOptions
from headrace.io.store import Entry, File, Store, is_url

_TICK_NS = 20_000_000
"""File times step by the kernel's clock tick: 10 ms at most, twice that to be safe."""

INDEX_SUFFIX = ".headrace-index"
_OTHER_KINDS: Final = {
    b"\x1f\x8b": "gzip data; let its name end in .gz",
    b"\x28\xb5\x2f\xfd": "zstd data; let its name end in .zst",
    b"BZh": "bzip2 data; let its name end in .bz2",
    b"\xfd7zXZ": "xz data; let its name end in .xz",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1": "a Parquet file; let its name end in .parquet",
    b"\x93NUMPY": "a NumPy array; let its name end in .npy",
    b"\xff\xfe": "UTF-16 text; write it anew as UTF-8",
    b"\xfe\xff": "UTF-16 text; write it anew as UTF-8",
    b"<!doctype": "an HTML page, not JSON; fetch the file anew",
    b"<html": "an HTML page, not JSON; fetch the file anew",
    b"<?xml": "an XML document (a store's answer to a failed request?), not JSON; fetch the file anew",
}
"""What files begin with that are not lines of JSON, and what they are. None of it can begin JSON."""


def index_path(store: Store, entry: Entry, options: StoreOptions) -> Path:
    """Where the index of a file is kept."""
    path = store.path(entry.name)
    if options.cache.index_beside and not is_url(path):
        folder, name = os.path.split(path)
        return Path(folder) / f".{name}{INDEX_SUFFIX}"
    return cache_root(options.cache) / "index" / key_of(path)


def find_index(store: Store, entry: Entry, options: StoreOptions) -> NewlineIndex | None:
    """The kept index, if it is of the file as it is now."""
    index = read_index(str(index_path(store, entry, options)))
    if index is None or (index.size, index.stamp) != (entry.size, entry.stamp):
        return None
    return index


def let_settle(entry: Entry) -> None:
    """Wait out the clock tick that a file was written in: a later change in the same tick would leave size and time alike."""
    age = time.time_ns() - entry.stamp
    if 0 <= age < _TICK_NS:
        time.sleep((_TICK_NS - age) / 1e9)


def build_index_of(
    store: Store, entry: Entry, options: StoreOptions, chunks: Callable[[File], Iterable[bytes]] | None = None
) -> NewlineIndex:
    """Scan the file and keep its index. `chunks(file)` gives its data if that is not what its bytes are."""
    let_settle(entry)
    file = store.open(entry)

    def checked() -> tuple[int, int]:
        file.check()  # a file that grew while we read it
        return entry.size, entry.stamp

    target = index_path(store, entry, options)
    out: IO[bytes]
    with writing(target) as out:
        pieces = chunks(file) if chunks else split_chunks(file.read, entry.size)
        write_index(_of_json(pieces, file.path), out, checked)
    index = read_index(str(target))
    if index is None:
        raise DataChangedError(f"{target} was removed while it was written; is another program cleaning the cache?")
    return index


def _of_json(pieces: Iterable[bytes], path: str) -> Iterator[bytes]:
    """The pieces, unless they begin like a file of another kind: all its rows would be bad, or few and huge."""
    whole = iter(pieces)
    first = next(whole, b"")
    start = first[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for mark, kind in _OTHER_KINDS.items():
        if start.startswith(mark.lower()):
            raise FormatError(f"{path} is {kind}, or take it out of the dataset")
    yield first
    yield from whole

"""Newline indexes kept between runs: find, check, build.

An index is looked up by the path of its file and taken only if size and modification time (or ETag) are those of the file
now. It is written whole or not at all, so processes may build the same one at once; the last to finish wins, and all
wrote the same.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Final

from headrace.errors import DataChangedError, FormatError
from headrace.io.cache import cache_root, cache_roots, key_of, writing
from headrace.io.newline_index import NewlineIndex, read_index, read_index_of, split_chunks, write_index
from headrace.io.options import StoreOptions
from headrace.io.store import Entry, File, Store, is_url

_TICK_NS = 20_000_000
"""File times step by the kernel's clock tick: 10 ms at most, twice that to be safe."""

INDEX_SUFFIX = ".headrace-index"
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_log = logging.getLogger("headrace")
_unkept: set[Path] = set()
"""Folders that indexes could not be kept in, for one warning each."""
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


def find_index(store: Store, entry: Entry, options: StoreOptions) -> NewlineIndex | None:
    """The kept index, if it is of the file as it is now. The folders need not be this user's to write."""
    for folder in (*_beside(store, entry, options), *(_in(root, store, entry) for root in cache_roots(options.cache))):
        index = read_index(str(folder))
        if index is not None and (index.size, index.stamp) == (entry.size, entry.stamp):
            return index
    return None


def _beside(store: Store, entry: Entry, options: StoreOptions) -> list[Path]:
    """Where an index beside its file is kept, if it is to be there."""
    folder, name = os.path.split(store.path(entry.name))
    return [Path(folder) / f".{name}{INDEX_SUFFIX}"] if options.cache.index_beside and not is_url(folder) else []


def _in(root: Path, store: Store, entry: Entry) -> Path:
    """Where an index is kept in a cache folder."""
    return root / "index" / key_of(store.path(entry.name))


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

    def write(out: IO[bytes]) -> None:
        pieces = chunks(file) if chunks else split_chunks(file.read, entry.size)
        write_index(_of_json(pieces, file.path), out, checked)

    for target in (*_beside(store, entry, options), _in(cache_root(options.cache), store, entry)):
        try:
            with writing(target) as out:
                write(out)
        except OSError as error:
            if error.errno not in _FORBIDDEN:
                raise
            _tell_of_unkept(target.parent, error)
            continue
        index = read_index(str(target))
        if index is None:
            raise DataChangedError(f"{target} was removed while it was written; is another program cleaning the cache?")
        return index
    with tempfile.TemporaryFile() as out:
        write(out)
        out.flush()
        index = read_index_of(out.fileno())
    assert index is not None  # it is whole, and nobody else sees it
    return index


def _tell_of_unkept(folder: Path, error: OSError) -> None:
    if folder not in _unkept:
        _unkept.add(folder)
        _log.warning(
            "newline indexes cannot be kept in %s (%s): other places are tried, and without one each process scans the files "
            "anew. Let this user write there, or set HEADRACE_CACHE to another folder",
            folder,
            error.strerror,
        )


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

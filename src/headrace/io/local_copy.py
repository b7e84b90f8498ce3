"""Local copies of shards: decompressed ones, and ones of remote files.

A copy is a `File`: its bytes come from the cache, its identity from the original, so a change of the original is noticed. It
is held in the cache for as long as somebody keeps the object.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import IO

from headrace.errors import ConfigError
from headrace.io.cache import CopyCache, key_of
from headrace.io.compress import INPUT_BYTES, decompressed
from headrace.io.newline_index import NewlineIndex, split_chunks
from headrace.io.options import StoreOptions
from headrace.io.row_index import build_index_of, let_settle
from headrace.io.store import Entry, File, LocalFile, Store

_USUAL_RATIO = 5
"""How many times its size a compressed shard is reckoned to take; text has 3 to 5."""


class CopiedFile(LocalFile):
    """A copy in the cache, standing for `original`."""

    __slots__ = ("original",)

    def __init__(self, fd: int, local_path: str, original: File) -> None:
        """Take over `fd`, whose lock holds the copy in the cache."""
        self._fd = fd
        self.path = original.path
        self.local_path = local_path
        self.original = original
        self.size = os.fstat(fd).st_size
        self.stamp = 0

    def check(self) -> None:
        """Check the original."""
        self.original.check()


def open_decompressed(store: Store, entry: Entry, options: StoreOptions, kind: str) -> CopiedFile:
    """A decompressed copy of a file, made if there is none."""
    let_settle(entry)
    file = store.open(entry)
    return _copy(CopyCache(options.cache), file, entry, kind, lambda: decompressed(file, kind))


def index_compressed(store: Store, entry: Entry, options: StoreOptions, kind: str) -> NewlineIndex:
    """Index the decompressed data in one pass, keeping it as a copy where the cache has room to spare."""
    cache = CopyCache(options.cache)
    if cache.used() + _USUAL_RATIO * entry.size < cache.limit():
        try:
            copy = open_decompressed(store, entry, options, kind)
        except ConfigError:  # it did not fit after all: the index needs no copy
            return build_index_of(store, entry, options, lambda file: decompressed(file, kind))
        return build_index_of(store, entry, options, lambda _: split_chunks(copy.read, copy.size))
    return build_index_of(store, entry, options, lambda file: decompressed(file, kind))


class CachedStore:
    """A remote store whose files are read from whole local copies (`CacheOptions.enabled`)."""

    def __init__(self, inner: Store, options: StoreOptions) -> None:
        """Copies of files in `inner`."""
        self.root = inner.root
        self.listable = inner.listable
        self._inner = inner
        self._cache = CopyCache(options.cache)
        self.scan = inner.scan
        self.stat = inner.stat
        self.path = inner.path

    def open(self, entry: Entry) -> File:
        """Open the copy, made if there is none."""
        file = self._inner.open(entry)
        return _copy(self._cache, file, entry, "copy", lambda: split_chunks(file.read, entry.size, INPUT_BYTES * 8))


def _copy(cache: CopyCache, file: File, entry: Entry, kind: str, data: Callable[[], Iterable[bytes]]) -> CopiedFile:
    def make(out: IO[bytes]) -> None:
        for piece in data():
            out.write(piece)
        file.check()

    key = key_of(file.path, kind, entry.size, entry.stamp)
    return CopiedFile(cache.acquire(key, make), str(cache.folder / key), file)

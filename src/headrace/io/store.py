"""Where bytes come from: one small interface for local folders and object stores.

A `Store` lists files and opens them; a `File` gives byte ranges and is safe to use from several threads. Local files are
read with `os.pread`; object stores live in `object_store.py`, imported only when a URL asks for it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from headrace.errors import ConfigError, DataChangedError
from headrace.io.options import StoreOptions


@dataclass(frozen=True, slots=True)
class Entry:
    """One file: name relative to the store's root, size in bytes, and a stamp that changes when the file does."""

    name: str
    size: int
    stamp: int


class File(Protocol):
    """An open file of known size."""

    path: str
    size: int

    @property
    def local_path(self) -> str | None:
        """Where the same bytes are as a local file, for readers that need one; None if nowhere."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start:stop`; all of them, or an error."""
        ...

    def check(self) -> None:
        """Raise `DataChangedError` if the file is no longer the one that was opened (where that can be told cheaply)."""
        ...


class Store(Protocol):
    """A folder, local or far."""

    root: str
    listable: bool

    def scan(self) -> list[Entry]:
        """Every file below the root, hidden ones left out, ordered by name."""
        ...

    def stat(self, name: str) -> Entry:
        """One file; FileNotFoundError if there is none."""
        ...

    def path(self, name: str) -> str:
        """What to call the file in a message."""
        ...

    def open(self, entry: Entry) -> File:
        """Open the file, which must still be as `entry` says (`DataChangedError`)."""
        ...


def is_url(path: str) -> bool:
    """True for `scheme://...`."""
    return "://" in path


def is_http(path: str) -> bool:
    """True for `http://...` and `https://...`, whose folders cannot be listed."""
    return path.startswith(("http://", "https://"))


def open_store(root: str, options: StoreOptions) -> Store:
    """The store of a folder or URL."""
    if not is_url(root):
        return LocalStore(root)
    from headrace.io.object_store import ObjectStore  # obstore is loaded only for URLs

    store = ObjectStore(root, options)
    if not options.cache.enabled:
        return store
    from headrace.io.local_copy import CachedStore

    return CachedStore(store, options)


class LocalStore:
    """A local folder."""

    listable = True

    def __init__(self, root: str) -> None:
        """Files are named relative to `root`."""
        self.root = os.path.abspath(root)

    def scan(self) -> list[Entry]:
        """Every file below the root, ordered by the bytes of its name."""
        return sorted(self._walk(self.root, "", frozenset()), key=lambda entry: os.fsencode(entry.name))

    def _walk(self, folder: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[Entry]:
        info = os.stat(folder)
        key = (info.st_dev, info.st_ino)
        if key in above:  # a link back to a folder that we are in
            return
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    if not entry.name.startswith((".", "_")):
                        yield from self._walk(entry.path, f"{prefix}{entry.name}/", above | {key})
                elif entry.name.startswith("."):
                    continue
                elif entry.is_file():
                    info = entry.stat()
                    yield Entry(prefix + entry.name, info.st_size, info.st_mtime_ns)
                elif entry.is_symlink():  # leaving it out would be less data than meant, in silence
                    raise ConfigError(
                        f"{entry.path} is a link to {os.readlink(entry.path)!r}, which is not there. Restore that or remove "
                        "the link"
                    )

    def stat(self, name: str) -> Entry:
        """One file."""
        path = self.path(name)
        try:
            info = os.stat(path)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path} does not exist; check the path (it is looked up on this machine)"
            ) from None
        if not stat.S_ISREG(info.st_mode):
            raise ConfigError(f"{path} is not a regular file; give a file or a folder of files")
        return Entry(name, info.st_size, info.st_mtime_ns)

    def path(self, name: str) -> str:
        """The local path."""
        return os.path.join(self.root, name)

    def open(self, entry: Entry) -> LocalFile:
        """Open and compare size and modification time."""
        return LocalFile(self.path(entry.name), entry.size, entry.stamp)


class LocalFile:
    """A file descriptor that closes itself when the last user lets go, so a reader may forget it at any time."""

    __slots__ = ("_fd", "local_path", "path", "size", "stamp")

    local_path: str | None

    def __init__(self, path: str, size: int | None = None, stamp: int | None = None) -> None:
        """Open for reading; with `size` and `stamp` given, the file must match them."""
        self.path = path
        self.local_path = path
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise DataChangedError(
                f"{path} is gone; it was there when the dataset was made. Restore it or make the dataset anew"
            ) from None
        info = os.fstat(self._fd)
        self.size = info.st_size if size is None else size
        self.stamp = info.st_mtime_ns if stamp is None else stamp
        self.check()

    def check(self) -> None:
        """Compare size and modification time with those known (1 microsecond)."""
        info = os.fstat(self._fd)
        if info.st_size != self.size:
            raise DataChangedError(
                f"{self.path} changed: it has {info.st_size} bytes and had {self.size} when the dataset was made. "
                "Make the dataset anew; checkpoints of the old data do not fit the new"
            )
        if info.st_mtime_ns != self.stamp:
            raise DataChangedError(
                f"{self.path} changed: modified at {info.st_mtime_ns} ns, and at {self.stamp} ns when the dataset was "
                "made. Make the dataset anew (its newline index is rebuilt by itself)"
            )

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start:stop`."""
        data = os.pread(self._fd, stop - start, start)
        if len(data) == stop - start:
            return data
        parts = [data]
        got = len(data)
        while got < stop - start:  # Linux gives at most 2 GiB at a time
            data = os.pread(self._fd, stop - start - got, start + got)
            if not data:
                self.check()
                raise DataChangedError(f"{self.path} ends at byte {start + got}, inside a range up to byte {stop}")
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SeekableFile:
    """A `File` as a file object, for libraries that want one. For one thread at a time."""

    closed = False

    def __init__(self, file: File) -> None:
        """Stand at the start."""
        self._file = file
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        """The next `size` bytes."""
        stop = self._file.size if size is None or size < 0 else min(self._at + size, self._file.size)
        data = self._file.read(self._at, stop)
        self._at = stop
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move."""
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def size(self) -> int:
        """Bytes in all."""
        return self._file.size

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def writable(self) -> bool:
        """False."""
        return False

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do: the file belongs to someone else."""

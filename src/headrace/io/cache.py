"""The cache folder: newline indexes, and whole copies of shards that cannot be read at random where they are.

Contract
* A file appears under its final name complete or not at all (written beside it, then renamed).
* One process at a time makes a given copy; others wait for it and use it (advisory `flock`, freed by the kernel when a
  process dies). Who waits for long says so, with the path, again and again.
* Nothing but time depends on locks. On a mount without them several processes may make the same copy, and the byte limit may be
  passed by what is made at the same time; the log says so once a folder.
* A copy in use is held by a shared lock, so eviction passes over it. Eviction removes the copies opened longest ago until
  the new one fits the byte limit; if everything is in use, it is an error that says how many bytes are needed.
* Nothing is removed but what has the name of a copy, so data that somebody keeps in the cache folder is safe.
* Several users may share the folder: files have the mode that the umask says, and what another user has made is read, and neither
  touched nor evicted where it may not be.
* Nothing is ever written into the data folder, unless `CacheOptions.index_beside` asks for the indexes to be there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Final

import xxhash

from headrace.errors import ConfigError
from headrace.io.options import CacheOptions

_STALE_S = 24 * 3600.0
_ROOM = "room.lock"
_PATIENCE_S: Final = 5.0
_MOST_S: Final = 600.0
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""What `flock` says where there are no locks: NFS without its lock service, Lustre without `-o flock`, some FUSE mounts."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_COPY: Final = re.compile(r"\.?[0-9a-f]{32}-")
"""How the names of copies begin (`key_of`), and of unfinished ones."""
_log = logging.getLogger("headrace")
_without: dict[Path, OSError] = {}
"""Folders that were found to have no locks, and what told so."""
_had: dict[Path, int] = {}
"""Copies that this process has had, and how often it made them again."""


def cache_roots(options: CacheOptions) -> list[Path]:
    """Where the cache folder may be: the option, else `HEADRACE_CACHE`, else `~/.cache/headrace` and, where the home folder cannot
    be written (a container), a folder of this user under the temporary directory."""
    chosen = options.root or os.environ.get("HEADRACE_CACHE")
    if chosen:
        return [Path(chosen).expanduser()]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [Path(base) / "headrace", Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"]


def cache_root(options: CacheOptions) -> Path:
    """The cache folder, made if need be: the first of `cache_roots` that can be written."""
    *others, last = cache_roots(options)
    for root in others:
        with contextlib.suppress(ConfigError):
            return _made(root)
    return _made(last)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache folder {folder} cannot be made ({error}); set HEADRACE_CACHE to another"
        ) from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"the cache folder {folder} cannot be written; set HEADRACE_CACHE to one that can")
    return folder


def key_of(path: str, *parts: object) -> str:
    """A file name for something made from `path`: readable, and different for different paths."""
    text = "\0".join([path, *map(str, parts)])
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in os.path.basename(path))[:60]
    return f"{xxhash.xxh3_128_hexdigest(text.encode('utf-8', 'surrogateescape'))}-{name}"


@contextlib.contextmanager
def writing(target: Path, naming: AbstractContextManager[None] | None = None) -> Generator[IO[bytes]]:
    """A file that becomes `target` when the block ends well, and is removed when it does not. `naming` is held as it does."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = _unfinished(target)
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
        with naming or contextlib.nullcontext():
            os.replace(name, target)
    except BaseException as error:  # whatever ended the writing, half a file must not stay
        reached = os.stat(name).st_size if os.path.exists(name) else 0
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise ConfigError(
                f"the disk of {target.parent} is full ({error.strerror}): {target.name} needs {reached} bytes or more, and "
                f"{shutil.disk_usage(target.parent).free} are free. Make room, or put HEADRACE_CACHE on a larger disk"
            ) from error
        raise


def _unfinished(target: Path) -> tuple[int, str]:
    """A new file beside `target`, with the mode that the umask says: other users may share the folder."""
    while True:
        name = f"{target.parent}/.{target.name[:80]}.{secrets.token_hex(4)}.part"
        with contextlib.suppress(FileExistsError):
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), name


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """One process and thread at a time, where the mount has locks. The lock file stays; it is empty.

    A wait is logged after `_PATIENCE_S` seconds, with the path and how long it has lasted, and then less and less often.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # another user's; a local disk locks it all the same
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(fd, fcntl.LOCK_EX, path)
        yield
    finally:
        os.close(fd)


def _lock(fd: int, operation: int, path: Path) -> None:
    """`flock`, waiting as long as it takes; nothing where there are no locks. BlockingIOError with `LOCK_NB`."""
    granted = threading.Event()
    watcher = threading.Thread(target=_tell_of_wait, args=(path, granted), name="headrace-lock", daemon=True)
    if not operation & fcntl.LOCK_NB:
        watcher.start()  # a mount may keep even a call that is not to wait
    try:
        fcntl.flock(fd, operation)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _tell_of_none(path.parent, error)
    finally:
        granted.set()


def _tell_of_wait(path: Path, granted: threading.Event) -> None:
    begun = time.monotonic()
    for pause in pauses():
        if granted.wait(pause):
            return
        _log.warning(
            "waiting for the lock %s for %.1f s: another process is making this copy, or the mount does not grant locks (then set "
            "HEADRACE_CACHE to a local disk)",
            path,
            time.monotonic() - begun,
        )


def pauses() -> Iterator[float]:
    """Seconds between words about a wait."""
    pause = _PATIENCE_S
    while True:
        yield pause
        pause = min(2 * pause, _MOST_S)


def _tell_of_none(folder: Path, error: OSError) -> None:
    if _without.setdefault(folder, error) is not error:
        return
    _log.warning(
        "%s has no file locks (%s): processes that need the same file at the same time may each make it. Nothing else is lost; "
        "HEADRACE_CACHE on a local disk avoids it",
        folder,
        error.strerror,
    )


def _tell_of_again(target: Path, limit: int) -> None:
    """A copy made over and over costs more than reading: say so, less and less often."""
    if target not in _had:
        return
    _had[target] += 1
    times = sum(_had.values())
    if times & (times - 1) == 0:
        _log.warning(
            "%s was let go for want of room and is made again (with others, %d times so far): what is read does not fit "
            "the %d bytes that copies may take. Raise CacheOptions.limit_bytes",
            target,
            times,
            limit,
        )


class CopyCache:
    """Whole files kept under a byte limit, shared by processes."""

    def __init__(self, options: CacheOptions) -> None:
        """Copies live in `root/copies`."""
        self.folder = _made(cache_root(options) / "copies")
        self._limit: int | None = options.limit_bytes  # type: ignore[assignment]

    def limit(self) -> int:
        """Bytes that copies may take in all."""
        if self._limit is not None:
            return self._limit
        return (shutil.disk_usage(self.folder).free + self.used()) // 2

    def used(self) -> int:
        """Bytes that copies take now, unfinished ones among them."""
        return sum(size for _, size, _ in self._files())

    def _files(self) -> list[tuple[float, int, str]]:
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(".lock") or not _COPY.match(entry.name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat()
                    found.append((info.st_mtime, info.st_size, entry.path))
        return sorted(found)

    def acquire(self, key: str, make: Callable[[IO[bytes]], Any]) -> int:
        """A descriptor of the copy `key`, made by `make(file)` if it is not there. Closing it lets the copy go."""
        target = self.folder / key
        if (fd := self._hold(target)) is not None:
            return fd
        with locked(self.folder / f"{key}.lock"):
            if (fd := self._hold(target)) is not None:
                return fd
            _tell_of_again(target, self.limit())
            # a file that changes its name while somebody lists the folder may be overlooked
            with writing(target, locked(self.folder / _ROOM)) as out:
                counted = _Counted(out, self)
                make(counted)  # type: ignore[arg-type]
                counted.finish()
            fd = self._hold(target)
        if fd is None:
            return self.acquire(key, make)
        return fd

    def _hold(self, target: Path) -> int | None:
        try:
            fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            _lock(fd, fcntl.LOCK_SH, target)
        except OSError:
            os.close(fd)
            raise
        if os.fstat(fd).st_nlink == 0:  # evicted between the two calls
            os.close(fd)
            return None
        with contextlib.suppress(PermissionError):  # another user's
            os.utime(fd)
        _had.setdefault(target, 0)
        return fd

    def make_room(self, need: int) -> None:
        """Remove the copies opened longest ago until `need` more bytes fit."""
        limit = self.limit()
        files = self._files()
        used = sum(size for _, size, _ in files)
        for modified, size, path in files:
            if used + need <= limit:
                return
            if path.endswith(".part") and time.time() - modified < _STALE_S:
                continue
            if self._remove_idle(path):
                used -= size
        if used + need > limit:
            raise ConfigError(
                f"the cache {self.folder} may hold {limit} bytes and {used} of them are in use, so {need} more do not "
                "fit. Raise CacheOptions.limit_bytes (it must hold every shard that is read at the same time), or put "
                "HEADRACE_CACHE on a larger disk"
            )

    @staticmethod
    def _remove_idle(path: str) -> bool:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS gives exclusive locks only to those who may write
        except FileNotFoundError:
            return True
        except PermissionError:  # another user's
            return False
        try:
            _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, Path(path))
            os.unlink(path)
        except (BlockingIOError, PermissionError):
            return False
        except FileNotFoundError:
            return True
        finally:
            os.close(fd)
        return True


class _Counted:
    """Output that makes room in the cache as it grows.

    What it is about to write is a part of the file's size beforehand, so that others who make copies meanwhile see it; the look
    and the growth happen under one lock.
    """

    STEP = 64 << 20

    def __init__(self, out: IO[bytes], cache: CopyCache) -> None:
        self._out = out
        self._cache = cache
        self._written = self._ahead = 0

    def write(self, data: bytes) -> int:
        if len(data) > self._ahead:
            step = max(len(data), min(self.STEP, self._cache.limit() // 16))
            with locked(self._cache.folder / _ROOM):
                self._cache.make_room(step - self._ahead)
                self._out.flush()
                os.ftruncate(self._out.fileno(), self._written + step)
            self._ahead = step
        self._ahead -= len(data)
        self._written += len(data)
        return self._out.write(data)

    def finish(self) -> None:
        """Give back what was not needed."""
        self._out.flush()
        os.ftruncate(self._out.fileno(), self._written)

"""Shared memory between a parent and one worker: two counters and two slabs.

Facts behind it (one 2-core virtual machine, see docs/guide/step-pipelines.md):

* A slab that exists already beats the best pipe from about 16 KB, by 4-25 times at 256 KB and 20-50 times at
  1 MB. A new segment *per message* loses to every pipe below 256 KB and never beats a good pipe at all: page
  faults and `munmap` eat what the copy saves. So there is one slab per direction, made with the worker.
* It is a `memfd`: no name, so nothing is left behind by a kill, no two runs collide, the size of /dev/shm does
  not matter, and no resource tracker prints anything. Pages come into being when first written.
* A full slab never blocks: the sender puts the bytes into the socket instead.

The sender owns the map of free pages; the receiver clears one flag byte when it has let go of an allocation, in any
order, so that a value that is held for long keeps its own pages busy and nobody else's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

PAGE = 64 * 1024
THRESHOLD = 64 * 1024  # bytes; from here on a buffer goes through the slab (break-even near 16 KB)
_HEADER = 4096
_WORDS = 8


def slab_pages(slab_bytes: int) -> int:
    """Whole pages of a slab of this size."""
    return slab_bytes // PAGE


def _layout(pages: int) -> tuple[int, int, int, int]:
    flags = _HEADER + 2 * pages
    first = -(-flags // PAGE) * PAGE
    return _HEADER, _HEADER + pages, first, first + pages * PAGE


class Arena:
    """One mapping, seen by both sides: words, then two arrays of flags, then two slabs."""

    def __init__(self, fd: int, pages: int) -> None:
        """Map `fd`, which must be large enough for two slabs of `pages` pages."""
        self.fd = fd
        self.pages = pages
        self.owner = os.getpid()
        self._map = mmap.mmap(fd, arena_bytes(pages))
        self.memory = memoryview(self._map)
        self.words = self.memory[: _WORDS * 8].cast("q")

    def slab(self, direction: int) -> tuple[memoryview, memoryview]:
        """The flags and the bytes of the slab towards the worker (0) or from it (1)."""
        starts = _layout(self.pages)
        flags, data = starts[direction], starts[2 + direction]
        return self.memory[flags : flags + self.pages], self.memory[data : data + self.pages * PAGE]

    def close(self) -> None:
        """Let go of the file; the memory itself goes when the last view of it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def arena_bytes(pages: int) -> int:
    """Bytes of an arena with two slabs of `pages` pages."""
    return _layout(pages)[2] + 2 * pages * PAGE


def create_arena(slab_bytes: int) -> Arena:
    """A new arena; without slabs, and with a message that says why, when there is no room for them."""
    pages = slab_pages(slab_bytes)
    size = arena_bytes(pages)
    fd = -1
    try:
        fd = _create_file(size)
        return Arena(fd, pages)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if pages == 0:
            raise
        import logging  # with tempfile below: 10 ms that a worker's start need not pay

        logging.getLogger("headrace").warning(
            "no shared memory of %d bytes for a worker (%s); large arrays go through its socket instead, which is "
            "slower. Give the machine or container more shared memory (docker: --shm-size), or ask for less.",
            size,
            error,
        )
        return create_arena(0)


def _create_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("headrace", os.MFD_CLOEXEC)
        reserve = False  # memory of its own: no file system whose space could run out under a write
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
        reserve = True
    try:
        os.ftruncate(fd, size)
        if reserve and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)  # an error now, not a bus error later
    except BaseException:  # whatever it is, nothing stays open
        os.close(fd)
        raise
    return fd


class SlabWriter:
    """The sender's side: finds room, copies in, and takes back what the receiver has let go of."""

    def __init__(self, slab: tuple[memoryview, memoryview]) -> None:
        """Write to this slab; nobody else may."""
        self._flags, self._data = slab
        self._live: dict[int, int] = {}  # first page -> pages, in order of address
        self.hits = 0
        self.misses = 0

    def put(self, data: memoryview) -> int:
        """Copy `data` in and return its offset, or -1 if there is no room."""
        need = -(-data.nbytes // PAGE)
        page = self._find(need)
        if page < 0:
            self.misses += 1
            return -1
        self.hits += 1
        self._live[page] = need
        self._flags[page] = 1
        offset = page * PAGE
        self._data[offset : offset + data.nbytes] = data
        return offset

    def _find(self, need: int) -> int:
        """The lowest run of free pages: memory that was used a moment ago is mapped and warm."""
        if need > len(self._flags):
            return -1
        live = {page: count for page, count in self._live.items() if self._flags[page]}
        self._live = live
        at = 0
        for page in sorted(live):
            if page - at >= need:
                return at
            at = page + live[page]
        return at if len(self._flags) - at >= need else -1


class SlabReader:
    """The receiver's side: hands out the bytes and clears the flag when they are let go of."""

    def __init__(self, slab: tuple[memoryview, memoryview]) -> None:
        """Read from this slab."""
        self._flags, self._data = slab
        self._owner = os.getpid()
        self._leases: dict[int, weakref.ref[Any]] = {}

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes themselves: valid until `release`."""
        return self._data[offset : offset + size]

    def release(self, offset: int) -> None:
        """Let go of an allocation."""
        if os.getpid() == self._owner:  # a fork of this process holds copies, not the right to free
            self._flags[offset // PAGE] = 0

    def lease(self, offset: int, size: int) -> NDArray[np.uint8]:
        """The bytes without a copy, writable; let go of when the last array over them is gone.

        Every array built on the returned one refers to it through the buffer protocol, so its death is the
        moment at which nothing can see these bytes any more.
        """
        import numpy as np  # only a process that meets large buffers pays for it

        array = np.frombuffer(self._data, np.uint8, size, offset)

        def gone(_: object) -> None:
            del self._leases[offset]
            self.release(offset)

        self._leases[offset] = weakref.ref(array, gone)
        return array


class Recycler:
    """Private memory for copies that come out of a slab, used again when the copy is dead.

    Fresh pages cost more than the copy itself (8 MB: 2000 page faults), recycled ones nothing. Bounded: at most
    `limit` bytes wait for use.
    """

    def __init__(self, limit: int = 64 * 1024 * 1024) -> None:
        """Keep at most `limit` bytes of free memory."""
        self._limit = limit
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._free_bytes = 0
        self._out: dict[int, weakref.ref[Any]] = {}

    def copy(self, view: memoryview) -> NDArray[np.uint8]:
        """A writable copy of `view`."""
        import numpy as np

        size = view.nbytes
        rounded = -(-size // PAGE) * PAGE
        stack = self._free.get(rounded)
        if stack:
            block = stack.pop()
            self._free_bytes -= rounded
        else:
            block = np.empty(rounded, np.uint8)
        array = np.frombuffer(block.data, np.uint8, size)
        key = id(array)

        def gone(_: object) -> None:
            self._out.pop(key, None)
            if self._free_bytes + rounded <= self._limit:
                self._free.setdefault(rounded, []).append(block)
                self._free_bytes += rounded

        self._out[key] = weakref.ref(array, gone)
        array.data[:] = view
        return array


KEEP_MEMORY_LOADS = "ctypes"


def keep_memory() -> None:
    """Tell glibc's allocator to keep what is freed instead of giving it back page by page.

    An 8 MB array filled and doubled takes 12.6 ms in a fresh process and 0.30 ms after this; the price is that
    a worker's memory stays at its peak. Does nothing where there is no glibc.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD

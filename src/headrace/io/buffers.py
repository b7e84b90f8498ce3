"""A pool of reusable array buffers.

Fresh pages are about five times slower to fill than pages already mapped, and a batch of 8 x 2048 int64 (128 KiB) is
exactly where the allocator starts to ask the kernel for fresh ones each time. So big outputs are views of pooled buffers.
A buffer is handed out again only when nothing but the pool refers to it: every numpy view, torch tensor or memoryview made
of it holds a reference to the buffer itself, so the reference count tells, and nobody has to give anything back.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_SMALL = 32 << 10
"""Below this many bytes the allocator's own free lists are as good."""


def _idle_references() -> int:
    """What `getrefcount` says of an object that only a list holds (it differs between Python versions)."""
    held = [np.empty(1, np.uint8)]
    return min(sys.getrefcount(held[i]) for i in range(1))


_IDLE = _idle_references()


class BufferPool:
    """Arrays on reused memory; safe to call from several threads.

    >>> pool = BufferPool()
    >>> pool.empty((4, 2048), np.int64).shape
    (4, 2048)

    `max_bytes` bounds what the pool keeps, not what it hands out: with every buffer in use, the array is simply new.
    """

    def __init__(self, max_bytes: int = 64 << 20, depth: int = 64) -> None:
        """Keep at most `max_bytes` of buffers, and `depth` of a size."""
        self.max_bytes = max_bytes
        self.depth = depth
        self._lock = threading.Lock()
        self._sizes: OrderedDict[int, list[NDArray[np.uint8]]] = OrderedDict()
        self._kept = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that the pool refers to now."""
        return self._kept

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialised C-ordered array that nobody else can see."""
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes < _SMALL or nbytes > self.max_bytes:
            return np.empty(shape, kind)
        return np.ndarray(shape, kind, self._acquire(1 << (nbytes - 1).bit_length()))

    def _acquire(self, size: int) -> NDArray[np.uint8]:
        with self._lock:
            buffers = self._sizes.setdefault(size, [])
            for i in range(len(buffers)):
                if sys.getrefcount(buffers[i]) == _IDLE:
                    return buffers[i]
            self._sizes.move_to_end(size)
            base = np.empty(size, np.uint8)
            if len(buffers) < self.depth:
                self._make_room(size)
                if self._kept + size <= self.max_bytes:
                    buffers.append(base)
                    self._kept += size
            return base

    def _make_room(self, size: int) -> None:
        """Forget buffers of sizes not asked for lately; one still in use lives on with its user."""
        for other, buffers in list(self._sizes.items()):
            while buffers and self._kept + size > self.max_bytes and other != size:
                buffers.pop()
                self._kept -= other
            if not buffers and other != size:
                del self._sizes[other]

"""Decoded pieces of files, kept in memory under a byte limit and shared by the threads of a reader.

* Single flight: whoever asks for a piece that another thread is decoding waits for it, so nothing is decoded twice by
  neighbours.
* A piece whose rows have all been served once is let go at once, as long as others are wanted: training reads a row once a
  pass, and the next pass is far away.
* The limit never makes the piece in hand leave, so a piece larger than the limit is still decoded once for the reads that
  follow one another.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Slot(Generic[T]):
    ready: threading.Event = field(default_factory=threading.Event)
    value: T | None = None
    error: BaseException | None = None
    size: int = 0
    rows: int = 0
    served: int = 0


class GroupCache(Generic[T]):
    """See the module."""

    def __init__(self, limit_bytes: int) -> None:
        """Keep at most `limit_bytes` beside the pieces in hand."""
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._slots: OrderedDict[Hashable, _Slot[T]] = OrderedDict()
        self._bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes kept now."""
        return self._bytes

    def get(self, key: Hashable, served: int, decode: Callable[[], tuple[T, int, int]]) -> T:
        """The piece `key`; `served` of its rows are about to be read. `decode()` gives (value, bytes, rows)."""
        with self._lock:
            slot = self._slots.get(key)
            mine = slot is None
            if slot is None:
                slot = self._slots[key] = _Slot()
            else:
                self._slots.move_to_end(key)
        if mine:
            self._fill(key, slot, decode)
        else:
            slot.ready.wait()
        if slot.error is not None:
            return self.get(key, served, decode)  # let this thread see its own error
        with self._lock:
            slot.served += served
            if slot.served >= slot.rows and self._slots.get(key) is slot:
                self._drop(key)
        assert slot.value is not None
        return slot.value

    def _fill(self, key: Hashable, slot: _Slot[T], decode: Callable[[], tuple[T, int, int]]) -> None:
        try:
            value, size, rows = decode()
        except BaseException as error:  # whatever it is, those who wait must hear of it
            with self._lock:
                self._slots.pop(key, None)
            slot.error = error
            slot.ready.set()
            raise
        with self._lock:
            slot.value, slot.size, slot.rows = value, size, rows
            self._bytes += size
            for other in list(self._slots):
                if self._bytes <= self.limit_bytes:
                    break
                if other != key and self._slots[other].ready.is_set():
                    self._drop(other)
        slot.ready.set()

    def _drop(self, key: Hashable) -> None:
        self._bytes -= self._slots.pop(key).size

    def clear(self) -> None:
        """Forget everything that is not being decoded."""
        with self._lock:
            for key in [key for key, slot in self._slots.items() if slot.ready.is_set()]:
                self._drop(key)

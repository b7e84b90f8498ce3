"""The bounded buffer between the thread that drives the lanes and the training loop.

The consumer takes everything that is ready in one go, so that a lock is shared once per burst, not once per batch. Bounded
by batches and by bytes: half the bound may wait here while the other half is in the consumer's hands.

Shutdown: `close()` from the consumer's side makes the next `put` raise `Closed`; `fail()` and `finish()` from the producer's
side reach the consumer after everything that was put before them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Final


class Closed(Exception):
    """The consumer has left."""


class Finished(Exception):
    """The producer has nothing more."""


SMALL: Final = 8 << 20
"""Bytes of waiting items up to which there may be `MORE` times as many of them."""
MORE: Final = 4


class Handover:
    """One producer, one consumer.

    Every wait of either is a change of threads, which small batches notice: they come out of a block by the dozen, and taking
    turns every eight of them cost a tenth of a run's time.
    """

    def __init__(self, units: int, nbytes: int, *, fixed: bool = True) -> None:
        """Up to about `units` items and `nbytes` bytes; more of small items unless the number is `fixed`."""
        self._limit, self._limit_bytes = max(1, units // 2), max(1, nbytes // 2)
        self._limit_small = self._limit if fixed else MORE * self._limit
        self._items: deque[Any] = deque()
        self._units = self._bytes = 0
        self._changed = threading.Condition()
        self._closed = self._finished = False
        self._failure: BaseException | None = None
        self.full_ns = 0
        self.empty_ns = 0

    def __len__(self) -> int:
        return self._units

    def put(self, item: Any, units: int = 0, nbytes: int = 0) -> None:
        """Add an item, waiting while the buffer is full. An item of no units (a cut) never waits."""
        with self._changed:
            if units and self._full():
                before = time.perf_counter_ns()
                while self._full() and not self._closed:
                    self._changed.wait()
                self.full_ns += time.perf_counter_ns() - before
            if self._closed:
                raise Closed
            self._items.append(item)
            self._units += units
            self._bytes += nbytes
            if units:
                self._changed.notify()

    def _full(self) -> bool:
        if self._units > 0 and self._bytes >= self._limit_bytes:
            return True
        return self._units >= (self._limit_small if 0 < self._bytes < SMALL else self._limit)

    def take(self) -> deque[Any]:
        """Everything that is ready, at least one item; `Finished` at the end, or the producer's failure."""
        with self._changed:
            if not self._items and not self._ended():
                before = time.perf_counter_ns()
                while not self._items and not self._ended():
                    self._changed.wait()
                self.empty_ns += time.perf_counter_ns() - before
            if self._items:
                items, self._items = self._items, deque()
                self._units = self._bytes = 0
                self._changed.notify()
                return items
            if self._failure is not None:
                raise self._failure
            raise Finished

    def ready(self, within: float) -> bool:
        """Whether `take` need not wait; waits up to `within` seconds for that."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._items) or self._ended(), within)

    def _ended(self) -> bool:
        return self._closed or self._finished or self._failure is not None

    def finish(self) -> None:
        """Nothing more will come."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come, and this is why."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def close(self) -> None:
        """The consumer has left: drop what is here."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._units = self._bytes = 0
            self._changed.notify_all()

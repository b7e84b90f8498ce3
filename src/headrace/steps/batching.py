"""How many items travel together: by time and bytes, never by count.

The best message is 16 to 64 KB (past 128 KB a message leaves the cache and the allocator's fast path; this, not
the number, is why batches of 1000 are slow), and no batch should hold more than about 10 ms of work. A jump in cost
is believed sooner than a drop, but not at once: on a busy machine a batch is often kept from its processor for longer
than it works, and a worker gives a batch that is really slow back after 20 ms anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET_SECONDS = 0.01
INLINE_SECONDS = 0.0003  # nothing is sent: a batch only spreads the bookkeeping, and the next output should come soon
TARGET_BYTES = 64 * 1024
MOST = 1024
_GROWTH = 4
THREADS_MOST = 64  # what is not sent is not weighed either, so only the number bounds what waits in memory
INLINE_MOST = 512  # what is pulled for a cheap batch must be worked off here even if it turns out dear


@dataclass(slots=True)
class BatchSize:
    """Grows fourfold from one item towards the targets: each round costs a trip to a worker and back.

    >>> size = BatchSize()
    >>> for _ in range(20):
    ...     size.observe(size.items, seconds=size.items * 50e-6, nbytes=size.items * 100)
    >>> size.items
    200
    >>> size.observe(1, seconds=0.02, nbytes=100)
    >>> size.items
    1
    """

    target: float = TARGET_SECONDS
    most: int = MOST
    items: int = 1
    seconds: float = 0.0  # of work an item, as believed now
    nbytes: float = 0.0  # an item, the larger of there and back

    def observe(self, count: int, seconds: float, nbytes: float) -> None:
        """`count` items took so long and so many bytes (of the way that carried more)."""
        if count <= 0:
            return
        self.seconds = _believe(self.seconds, seconds / count)
        self.nbytes = _believe(self.nbytes, nbytes / count)
        size = min(_GROWTH * self.items, self.most, MOST)
        if self.seconds > 0:
            size = min(size, int(self.target / self.seconds + 1e-6))
        if self.nbytes > 0:
            size = min(size, int(TARGET_BYTES / self.nbytes))
        self.items = max(1, size)


def _believe(old: float, new: float) -> float:
    if not old:
        return new
    weight = 0.5 if new > old else 0.25
    return (1 - weight) * old + weight * new

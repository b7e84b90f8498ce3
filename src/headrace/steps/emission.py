"""What an emitter process runs: it reads, packs items into messages and sends them."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from headrace.run import wire
from headrace.steps.batching import BatchSize

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator
    from typing import Any

    from headrace.run.shm import SlabWriter

BLOCK = 256  # items in a reader's turn
_PATIENCE = 0.005  # seconds after which a message leaves, however small it is


class Emission:
    """The body of an emitter process: built there, run once."""

    def __init__(self, reader: Any) -> None:
        """Read from this iterable."""
        self.reader = reader

    def __call__(self) -> Emission:
        """The factory is the instance."""
        return self

    @property
    def where(self) -> str:
        """For errors."""
        return f"reader {self.reader!r}"[:200]

    def run(self, sock: socket.socket, slab: SlabWriter | None) -> int:
        """Send every item; returns their number."""
        total = 0
        size = BatchSize()
        for items, seconds in batches(self.reader, size):
            parts = wire.encode(wire.Head(wire.ITEMS, b=len(items)), items, slab)
            size.observe(len(items), seconds, wire.frame_bytes(parts))
            wire.send(sock, parts)
            total += len(items)
        return total


def batches(reader: Any, size: BatchSize) -> Iterator[tuple[list[Any], float]]:
    """Lists of at most `size.items` items and the seconds it took to read them; none across the border of a turn.

    A slow reader's items leave after a few milliseconds, however few. An error comes after what was read before it.
    """
    left, items, begun = BLOCK, [], perf_counter()
    iterator = iter(reader)
    failed: BaseException | None = None
    while failed is None:
        try:
            items.append(next(iterator))
        except BaseException as error:  # noqa: BLE001 (raised again below, after what was read before it)
            failed = error
        seconds = perf_counter() - begun
        if items and (failed or len(items) >= min(size.items, left) or seconds > _PATIENCE):
            yield items, seconds
            left = left - len(items) or BLOCK
            items, begun = [], perf_counter()
    if not isinstance(failed, StopIteration):
        raise failed

"""`num_workers="auto"`: whether worker processes are worth it, from the first items.

Sending an item to another process and its result back costs microseconds for small objects and tens of microseconds
a megabyte, paid partly by the parent. Work below about twice that runs faster in the parent, however many cores
there are: three cheap steps on a small dict take 0.85 us in the parent and 1.8 us in the best pool.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

FACTOR = 2.0
_FIXED = 0.5e-6  # seconds of bookkeeping an item in a batch of many
_MESSAGE = 20e-6  # seconds a message; a batch holds items for about 5 ms, so small items share it
ENOUGH_SECONDS = 0.02
ENOUGH_ITEMS = 256


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision and its figures, seconds an item."""

    processes: bool
    work: float
    transport: float
    reason: str = ""

    def __str__(self) -> str:
        """One sentence for `explain()`."""
        figures = f"work {_us(self.work)} an item, transport {_us(self.transport)}"
        if self.reason:
            return f"in this process: {self.reason} ({figures})"
        if self.processes:
            return f"in worker processes: {figures}"
        return f"in this process: {figures}; below {FACTOR:g} times the transport a worker process only costs time"


def judge(work: float, samples: Sequence[Any], outputs: Sequence[Any]) -> Verdict:
    """Weigh `work` seconds an item against sending such items out and such outputs back."""
    try:
        transport = _transport(samples) + _transport(outputs) * len(outputs) / max(1, len(samples))
    except Exception as error:  # noqa: BLE001 (whatever pickling a user's object raises)
        return Verdict(False, work, float("inf"), f"the items or their outputs cannot be pickled ({error})")
    return Verdict(work > FACTOR * transport, work, transport)


def _transport(objects: Sequence[Any]) -> float:
    if not objects:
        return 0.0
    best = copies = float("inf")
    nbytes = 0
    for _ in range(3):
        buffers: list[pickle.PickleBuffer] = []
        started = perf_counter()
        data = pickle.dumps(list(objects), protocol=5, buffer_callback=buffers.append)
        pickle.loads(data, buffers=buffers)  # noqa: S301 (made on the line above)
        best = min(best, perf_counter() - started)
        started = perf_counter()
        for buffer in buffers:
            bytearray(buffer.raw())
        copies = min(copies, perf_counter() - started)
        nbytes = len(data) + sum(buffer.raw().nbytes for buffer in buffers)
    each = nbytes / len(objects)
    return best / len(objects) + _FIXED + 2 * copies / len(objects) + min(1.0, each / 65536) * _MESSAGE


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"

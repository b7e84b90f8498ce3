"""`num_workers="auto"`: whether worker processes are worth it, from the first items.

Sending an item to another process and its result back costs microseconds for small objects and tens of microseconds
a megabyte, paid partly by the parent. Work below about twice that runs faster in the parent, however many cores
there are: three cheap steps on a small dict take 0.85 us in the parent and 1.8 us in the best pool.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from sys import getsizeof
from time import perf_counter
from typing import Any

from headrace.run.executor import Paced, WorkerStatistics
from headrace.run.task import SLICE
from headrace.steps.source import IterableSource

Lists = Generator[list[Any], None, None]

FACTOR = 2.0
_FIXED = 0.5e-6  # seconds of bookkeeping an item in a batch of many
_MESSAGE = 20e-6  # seconds a message; a batch holds items for about 5 ms, so small items share it
_ENOUGH_SECONDS = 0.02  # of work, to decide, in so many stretches at least
_STRETCHES = 8
_CLEAR = 8.0  # times what would do: a case that needs no further evidence than the next two lines
_CLEAR_SECONDS = 0.002
_CLEAR_STRETCHES = 4
_AT_MOST_SECONDS = 0.1
_ENOUGH_ITEMS = 256
_LARGE = 1 << 16  # bytes; keeping many of such outputs makes every next one take cold memory, and look dear
_PATIENCE = 0.1  # seconds of work between two thoughts about whether staying still pays


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


def judge(
    work: float, samples: Sequence[Any], outputs: Sequence[Any], outputs_an_item: float, factor: float = FACTOR
) -> Verdict:
    """Weigh `work` seconds an item against `factor` times sending such items out and such outputs back."""
    try:
        transport = _transport(samples) + _transport(outputs) * outputs_an_item
    except Exception as error:  # noqa: BLE001 (whatever pickling a user's object raises)
        return Verdict(False, work, float("inf"), f"the items or their outputs cannot be pickled ({error})")
    return Verdict(work > factor * transport, work, transport)


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


class AtHome:
    """Runs the first items of a source in this process: to decide, to stay, or until workers have started."""

    def __init__(
        self,
        open_here: Callable[[], Paced],
        run: Callable[[Paced, IterableSource, int, Callable[[], bool]], Lists],
        source: IterableSource,
        verdict: Verdict | None,
    ) -> None:
        """`run(executor, source, index of the next item, enough)` runs a flow until `enough()`."""
        self._open_here = open_here
        self._run = run
        self._source = source
        self.verdict = verdict or Verdict(False, 0.0, 0.0)
        self.index = 0
        self.statistics = WorkerStatistics()

    def decide(self) -> Lists:
        """Run as many items as a decision needs, and make it."""
        samples: list[Any] = []
        costs: list[float] = []  # an item, in each stretch: the first ones also pay for cold memory and imports
        items, busy, given = 0, 0.0, 0
        looked, verdict = False, None

        def judged(factor: float) -> Verdict:
            work = sorted(costs)[(len(costs) - 1) // 2] if costs else 0.0
            outputs_an_item = given / max(1, self.statistics.items)
            return judge(work, self._source.samples, samples, outputs_an_item, factor)

        def enough() -> bool:
            nonlocal items, busy, looked, verdict
            stats = self.statistics
            if stats.items > items:
                costs.append((stats.busy - busy) / (stats.items - items))
                items, busy = stats.items, stats.busy
            if not looked and len(costs) >= _CLEAR_STRETCHES and stats.busy >= _CLEAR_SECONDS:
                looked = True
                if not any(getsizeof(each) > _LARGE for each in samples):  # to weigh large ones takes time
                    clear = judged(_CLEAR * FACTOR)
                    verdict = clear if clear.processes else None
            worked = stats.busy > (_ENOUGH_SECONDS if len(costs) >= _STRETCHES else _AT_MOST_SECONDS)
            return verdict is not None or (len(costs) > 1 and (worked or stats.items >= _ENOUGH_ITEMS))

        for out in self._until(enough):
            given += len(out)
            kept = samples or out[:1]
            enough_kept = 2 if kept and getsizeof(kept[0]) > _LARGE else len(self._source.samples)
            samples.extend(out[: max(0, enough_kept - len(samples))])
            yield out
        self.verdict = verdict or judged(FACTOR)

    def stay(self) -> Lists:
        """Run here for as long as that pays."""
        verdict = self.verdict
        items, busy = 0, 0.0

        def enough() -> bool:
            nonlocal items, busy
            stats = self.statistics
            more, longer = stats.items - items, stats.busy - busy
            if longer < _PATIENCE or not more:
                return False
            items, busy = stats.items, stats.busy
            if not verdict.reason and longer / more > 2 * FACTOR * verdict.transport:
                self.verdict = Verdict(True, longer / more, verdict.transport)
            return self.verdict.processes

        yield from self._until(enough)

    def meanwhile(self, ready: Callable[[], bool]) -> Lists:
        """Go on here until a worker process has started, unless one item takes as long as that."""
        if self.verdict.work <= SLICE:
            yield from self._until(ready)

    def _until(self, enough: Callable[[], bool]) -> Lists:
        executor = self._open_here()
        self.statistics = executor.statistics()
        try:
            yield from self._run(executor, self._source, self.index, enough)
        finally:
            executor.close()
            self.index += self.statistics.items

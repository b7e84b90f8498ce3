"""`num_workers="auto"`: whether worker processes are worth it, from the first items.

Sending an item to another process and its result back costs microseconds for small objects and tens of microseconds
a megabyte, paid partly by the parent. Work below about twice that runs faster in the parent, however many cores
there are: three cheap steps on a small dict take 0.85 us in the parent and 1.8 us in the best pool.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Sequence
from time import thread_time
from typing import Any

from headrace.run.executor import Paced, WorkerStatistics
from headrace.run.task import SLICE
from headrace.steps.evidence import LARGE, LOOKS, Evidence, Verdict
from headrace.steps.source import IterableSource

Lists = Generator[list[Any], None, None]

_FIXED = 0.5e-6  # seconds of bookkeeping an item in a batch of many
_MESSAGE = 20e-6  # seconds a message; a batch holds items for about 5 ms, so small items share it
_CLEAR = 8.0  # times what would do: a case that needs no further evidence than the next two lines
_CLEAR_SECONDS = 0.002
_CLEAR_STRETCHES = 4
_PATIENCE = 0.1  # seconds of work between two thoughts about whether staying still pays
_REPEATS = 3
_OUTPUTS = 16


def transport(objects: Sequence[Any], repeats: int = 1) -> tuple[float, float]:
    """Seconds and bytes that one of these costs on its way, in processor time; raises what pickling them raises."""
    best = copies = float("inf")
    nbytes = 0
    for _ in range(repeats):
        buffers: list[pickle.PickleBuffer] = []
        started = thread_time()
        data = pickle.dumps(list(objects), protocol=5, buffer_callback=buffers.append)
        pickle.loads(data, buffers=buffers)  # noqa: S301 (made on the line above)
        best = min(best, thread_time() - started)
        started = thread_time()
        for buffer in buffers:
            bytearray(buffer.raw())
        copies = min(copies, thread_time() - started)
        nbytes = len(data) + sum(buffer.raw().nbytes for buffer in buffers)
    each = nbytes / len(objects)
    return best / len(objects) + _FIXED + 2 * copies / len(objects) + min(1.0, each / LARGE) * _MESSAGE, each


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
        self._evidence = Evidence()
        self._given = 0  # outputs of this run
        self.verdict = verdict or Verdict(False, 0.0, 0.0)
        self.index = 0
        self.statistics = WorkerStatistics()

    def decide(self) -> Lists:
        """Run as many items as a decision needs, and make it."""
        evidence = self._evidence
        outputs: list[Any] = []  # small ones: to keep large ones makes every next one take cold memory, and look dear
        items, busy = 0, 0.0
        looked, verdict = False, None

        def judged(clear: float = 1.0) -> Verdict:
            if not evidence.large:
                self._weigh(self._source.samples, outputs, _REPEATS)
            return evidence.verdict(self._outputs_an_item(), clear)

        def enough() -> bool:
            nonlocal items, busy, looked, verdict
            stats, costs = self.statistics, evidence.work
            if stats.items > items:
                costs.append((stats.busy - busy) / (stats.items - items))
                items, busy = stats.items, stats.busy
            if not looked and len(costs) >= _CLEAR_STRETCHES and stats.busy >= _CLEAR_SECONDS:
                looked = True
                if not evidence.large:  # to weigh large ones takes time
                    clear = judged(_CLEAR)
                    verdict = clear if clear.processes else None
            return verdict is not None or evidence.enough(items, busy, self._outputs_an_item())

        for out in self._until(enough):
            self._given += len(out)
            if not evidence.there or (evidence.large and len(evidence.there) < LOOKS):
                self._weigh(self._source.samples[:1], out[:1])
            if not evidence.large:
                outputs.extend(out[: _OUTPUTS - len(outputs)])
            yield out
        self.verdict = verdict or judged()

    def stay(self) -> Lists:
        """Run here for as long as that pays."""
        verdict, evidence = self.verdict, self._evidence
        evidence.reason, evidence.large = verdict.reason, verdict.large
        self._given = 0
        items, busy, last = 0, 0.0, list[Any]()

        def enough() -> bool:
            nonlocal items, busy
            stats = self.statistics
            more, longer = stats.items - items, stats.busy - busy
            if longer < _PATIENCE or not more:
                return False
            items, busy = stats.items, stats.busy
            work = longer / more
            if evidence.reversed_by(work, verdict.transport):  # unless sending has become dearer as well
                self._weigh(self._source.samples[:1], last)
                now = max(verdict.transport, evidence.transport(self._outputs_an_item(), latest=True))
                if evidence.reversed_by(work, now):
                    self.verdict = Verdict(True, work, now, large=evidence.large)
            return self.verdict.processes

        for out in self._until(enough):
            self._given += len(out)
            last = out[:1]
            yield out

    def meanwhile(self, ready: Callable[[], bool]) -> Lists:
        """Go on here until a worker process has started, unless one item takes as long as that."""
        if self.verdict.work <= SLICE:
            yield from self._until(ready)

    def _weigh(self, samples: Sequence[Any], outputs: Sequence[Any], repeats: int = 1) -> None:
        """Measure the way there and back once more."""
        evidence = self._evidence
        try:
            for objects, costs in ((samples, evidence.there), (outputs, evidence.back)):
                if objects:
                    seconds, nbytes = transport(objects, repeats)
                    costs.append(seconds)
                    evidence.large = evidence.large or nbytes > LARGE
        except Exception as error:  # noqa: BLE001 (whatever pickling a user's object raises)
            evidence.reason = f"the items or their outputs cannot be pickled ({error})"

    def _outputs_an_item(self) -> float:
        return self._given / max(1, self.statistics.items)

    def _until(self, enough: Callable[[], bool]) -> Lists:
        executor = self._open_here()
        self.statistics = executor.statistics()
        try:
            yield from self._run(executor, self._source, self.index, enough)
        finally:
            executor.close()
            self.index += self.statistics.items

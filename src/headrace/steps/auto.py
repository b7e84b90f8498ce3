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
from headrace.steps.statistics import Ledger

Lists = Generator[list[Any], None, None]
Run = Generator[list[Any], None, int]

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


class Stretches:
    """Seconds of work an input, from one slice of the first stage to the next.

    Later stages go first, so all that they have to do with a slice is done when the next one begins. Counted are inputs of the
    pipeline, whatever the number of its stages.
    """

    def __init__(self, ledger: Ledger, workers: WorkerStatistics) -> None:
        """Begin the first one."""
        self._ledger = ledger
        self._workers = workers
        self._staged = len(ledger.names) > 1
        self._inputs = ledger.finished  # when the last slice of the first stage was seen to be done
        self._in_work = 0  # inputs of that slice, which later stages may have
        self._began = self._looked = workers.busy

    def ended(self) -> float | None:
        """Seconds an input in the stretch that has ended since the last look, if one has."""
        inputs, busy = self._ledger.finished, self._workers.busy
        if inputs == self._inputs:
            self._looked = busy
            return None
        until, count = (self._looked, self._in_work) if self._staged else (busy, inputs - self._inputs)
        seconds = until - self._began
        self._began, self._looked, self._in_work, self._inputs = until, busy, inputs - self._inputs, inputs
        return seconds / count if count else None

    def rest(self) -> float | None:
        """The same of the last one, once nothing is under way."""
        return (self._workers.busy - self._began) / self._in_work if self._staged and self._in_work else None


class AtHome:
    """Runs the first items of a source in this process: to decide, to stay, or until workers have started."""

    def __init__(
        self,
        open_here: Callable[[], Paced],
        run: Callable[[Paced, IterableSource, int, Callable[[], bool]], Run],
        source: IterableSource,
        ledger: Ledger,
        verdict: Verdict | None,
    ) -> None:
        """`open_here()`: the executor in this process, always the same, so that steps are set up once.

        `run(executor, source, index of the next item, enough)` runs a flow until `enough()`; it returns the number of its inputs.
        """
        self._open_here = open_here
        self._run = run
        self._source = source
        self._evidence = Evidence()
        self._ledger = ledger
        self._before = ledger.finished, ledger.delivered
        self.verdict = verdict or Verdict(False, 0.0, 0.0)
        self.index = 0

    def decide(self) -> Lists:
        """Run as many items as a decision needs, and make it."""
        evidence, ledger, workers = self._evidence, self._ledger, self._open_here().statistics()
        outputs: list[Any] = []  # small ones: to keep large ones makes every next one take cold memory, and look dear
        stretches = Stretches(ledger, workers)
        inputs, busy = ledger.finished, workers.busy  # at the start
        looked, verdict = False, None

        def judged(clear: float = 1.0) -> Verdict:
            if not evidence.large:
                self._weigh(self._source.samples, outputs, _REPEATS)
            return evidence.verdict(self._outputs_an_input(), clear)

        def enough() -> bool:
            nonlocal looked, verdict
            costs, worked = evidence.work, workers.busy - busy
            if (cost := stretches.ended()) is not None:
                costs.append(cost)
            if not looked and len(costs) >= _CLEAR_STRETCHES and worked >= _CLEAR_SECONDS:
                looked = True
                if not evidence.large:  # to weigh large ones takes time
                    clear = judged(_CLEAR)
                    verdict = clear if clear.processes else None
            return verdict is not None or evidence.enough(ledger.finished - inputs, worked, self._outputs_an_input())

        for out in self._until(enough):
            if not evidence.there or (evidence.large and len(evidence.there) < LOOKS):
                self._weigh(self._source.samples[:1], out[:1])
            if not evidence.large:
                outputs.extend(out[: _OUTPUTS - len(outputs)])
            yield out
        if (cost := stretches.rest()) is not None:
            evidence.work.append(cost)
        self.verdict = verdict or judged()

    def stay(self) -> Lists:
        """Run here for as long as that pays."""
        verdict, evidence, ledger, workers = self.verdict, self._evidence, self._ledger, self._open_here().statistics()
        evidence.reason, evidence.large = verdict.reason, verdict.large
        inputs, busy, last = ledger.finished, workers.busy, list[Any]()

        def enough() -> bool:
            nonlocal inputs, busy
            more, longer = ledger.finished - inputs, workers.busy - busy
            if longer < _PATIENCE or not more:
                return False
            inputs, busy = ledger.finished, workers.busy
            work = longer / more
            if evidence.reversed_by(work, verdict.transport):  # unless sending has become dearer as well
                self._weigh(self._source.samples[:1], last)
                now = max(verdict.transport, evidence.transport(self._outputs_an_input(), latest=True))
                if evidence.reversed_by(work, now):
                    self.verdict = Verdict(True, work, now, large=evidence.large)
            return self.verdict.processes

        for out in self._until(enough):
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

    def _outputs_an_input(self) -> float:
        finished, delivered = self._before
        return (self._ledger.delivered - delivered) / max(1, self._ledger.finished - finished)

    def _until(self, enough: Callable[[], bool]) -> Lists:
        self.index += yield from self._run(self._open_here(), self._source, self.index, enough)

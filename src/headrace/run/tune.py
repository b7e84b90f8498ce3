"""Autotune: move workers to the stage that needs them, while running. It moves threads and in-flight blocks, never data.

Each pooled stage has an allotment of workers; the allotments always add up to `max_workers`. A few times a second the driving
thread compares how busy the workers of each stage were since it last looked, and moves one worker from the idlest stage to
the busiest if they differ enough for it to pay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

EVERY_S: Final = 0.25
"""Seconds between looks."""
GAP: Final = 0.25
"""Difference in utilisation that is worth a move."""


class Throttle:
    """Lets at most `limit` threads of a stage work at once; the limit may change at any time."""

    def __init__(self, limit: int) -> None:
        self._limit, self._running = limit, 0
        self._changed = threading.Condition()

    def set(self, limit: int) -> None:
        """Change the limit."""
        with self._changed:
            self._limit = limit
            self._changed.notify_all()

    def wrap(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`function`, waiting its turn."""

        def call(task: Any) -> Any:
            with self._changed:
                while self._running >= self._limit:
                    self._changed.wait()
                self._running += 1
            try:
                return function(task)
            finally:
                with self._changed:
                    self._running -= 1
                    self._changed.notify()

        return call


def rebalance(allotment: Sequence[int], busy_s: Sequence[float], elapsed_s: float) -> list[int]:
    """The next allotment, from the seconds that each stage's workers were busy during `elapsed_s`. Moves at most one worker.

    >>> rebalance([3, 1], [0.2, 1.0], 1.0)
    [2, 2]
    >>> rebalance([1, 1], [0.1, 1.0], 1.0)
    [1, 1]
    """
    out = list(allotment)
    if len(out) < 2 or elapsed_s <= 0:
        return out
    load = [busy / (workers * elapsed_s) for busy, workers in zip(busy_s, allotment, strict=True)]
    to = max(range(len(out)), key=lambda i: load[i])
    givers = [i for i in range(len(out)) if out[i] > 1 and i != to]
    if not givers:
        return out
    source = min(givers, key=lambda i: load[i])
    if load[to] - load[source] >= GAP:
        out[source] -= 1
        out[to] += 1
    return out


class Tuner:
    """Looks at the stages now and then, and calls `apply(stage, workers)` for each change."""

    def __init__(
        self,
        allotment: dict[int, int],
        busy_ns: Callable[[int], int],
        apply: Callable[[int, int], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.allotment = dict(allotment)
        self._busy_ns, self._apply, self._clock = busy_ns, apply, clock
        self._then, self._busy_then = clock(), {i: busy_ns(i) for i in allotment}

    def look(self) -> None:
        """Compare and move, if it is time."""
        now = self._clock()
        if now - self._then < EVERY_S:
            return
        stages = list(self.allotment)
        busy = {i: self._busy_ns(i) for i in stages}
        spent = [(busy[i] - self._busy_then[i]) / 1e9 for i in stages]
        after = rebalance([self.allotment[i] for i in stages], spent, now - self._then)
        for stage, workers in zip(stages, after, strict=True):
            if workers != self.allotment[stage]:
                self.allotment[stage] = workers
                self._apply(stage, workers)
        self._then, self._busy_then = now, busy

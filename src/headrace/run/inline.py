"""The inline executor: the same results, order and errors, in the caller's own thread. For debugging, and for work
that is cheaper than sending it anywhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from headrace.core.reorder import Batch
from headrace.errors import InternalError
from headrace.run.executor import ExecutorConfig, Part, WorkerStatistics
from headrace.run.task import Function, run_slice
from headrace.run.wire import Packed


class InlineExecutor:
    """Runs one slice of the oldest batch of the latest group whenever it is asked for results."""

    def __init__(self, config: ExecutorConfig) -> None:
        """Build the function at once."""
        self._config = config
        self._functions = [Function(group.factory, interruptible=True) for group in config.groups]
        self._queue: deque[tuple[Batch, int]] = deque()
        self._stats = WorkerStatistics()
        self._words = [0, 0]
        self._open = True

    @property
    def background(self) -> bool:
        """Nothing happens unless somebody calls."""
        return False

    def ready(self) -> bool:
        """At once."""
        return True

    def free(self, group: int = 0) -> int:
        """One batch at a time in each group."""
        return 0 if any(batch.group == group for batch, _ in self._queue) else 1

    def set_limit(self, group: int, most: int | None) -> None:
        """Nothing travels: a slice of a batch ends by time alone."""

    def watch(self, source: Any, ready: Callable[[], bool] | None) -> None:
        """Nothing is waited for here."""
        raise InternalError("an inline executor has nothing to wait for")

    def wake(self) -> None:
        """Nobody ever waits here."""

    def submit(self, batch: Batch) -> None:
        """Queue a batch."""
        if not self._open:
            raise RuntimeError(f"{self._config.name}: the executor is closed")
        self._queue.append((batch, 0))
        self._stats.batches += 1

    def completed(self, timeout: float | None = None) -> list[Part]:
        """Run up to one time slice, and return what it finished."""
        del timeout
        if not self._queue:
            return []
        at = max(range(len(self._queue)), key=lambda n: self._queue[n][0].group)  # what is nearly done leaves first
        batch, start = self._queue[at]
        if isinstance(batch.items, Packed):
            batch.items = batch.items.decode()
        function = self._functions[batch.group]
        done = run_slice(function, batch.items, (start, batch.count), batch.first, self._words)
        if done.end < batch.count:
            self._queue[at] = (batch, done.end)
        else:
            del self._queue[at]
        self._stats.items += done.end - start
        self._stats.busy += done.seconds
        failure = done.failure
        if failure is not None and self._config.describe is not None:
            failure.item = self._config.describe(batch.items[done.end - 1])
        report = function.report() if function.report is not None else None
        return [Part(batch.key, start, done.end - start, done.values, failure, done.seconds, 0, report)]

    def take_back(self, owner: Any) -> list[tuple[Batch, int]]:
        """Batches of this owner that were not run to their end, and from which item on: they are forgotten here."""
        back = [entry for entry in self._queue if entry[0].key[0] is owner]
        self.abandon(owner)
        return back

    def abandon(self, owner: Any) -> None:
        """Forget the batches of this owner."""
        self._queue = deque(entry for entry in self._queue if entry[0].key[0] is not owner)

    def statistics(self) -> WorkerStatistics:
        """Counts since the start."""
        return self._stats

    def stop(self) -> None:
        """Take no more batches."""
        self._open = False

    def ending(self, began: float) -> Iterator[None]:
        """Tear the function down."""
        del began
        self.stop()
        self._queue.clear()
        functions, self._functions = self._functions, []
        yield
        for function in functions:
            function.close()

    def close(self) -> None:
        """Tear the function down."""
        for _ in self.ending(0.0):
            pass

"""The inline executor: the same results, order and errors, in the caller's own thread. For debugging, and for work
that is cheaper than sending it anywhere."""

from __future__ import annotations

from collections import deque

from headrace.core.reorder import Batch
from headrace.run.executor import ExecutorConfig, Part, WorkerStatistics
from headrace.run.task import Function, run_slice
from headrace.run.wire import Packed


class InlineExecutor:
    """Runs one slice of the oldest batch whenever it is asked for results."""

    def __init__(self, config: ExecutorConfig) -> None:
        """Build the function at once."""
        self._config = config
        self._function = Function(config.factory, interruptible=True)
        self._queue: deque[tuple[Batch, int]] = deque()
        self._stats = WorkerStatistics()
        self._words = [0, 0]
        self._open = True
        self.batch_limit: int | None = None

    @property
    def free(self) -> int:
        """One batch at a time."""
        return 0 if self._queue else 1

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
        batch, start = self._queue.popleft()
        if isinstance(batch.items, Packed):
            batch.items = batch.items.decode()
        function = self._function
        done = run_slice(function, batch.items, (start, batch.count), batch.first, self._words)
        if done.end < batch.count:
            self._queue.appendleft((batch, done.end))
        self._stats.items += done.end - start
        self._stats.busy += done.seconds
        failure = done.failure
        if failure is not None and self._config.describe is not None:
            failure.item = self._config.describe(batch.items[done.end - 1])
        report = function.report() if function.report is not None else None
        return [Part(batch.key, start, done.end - start, done.values, failure, done.seconds, 0, report)]

    def statistics(self) -> WorkerStatistics:
        """Counts since the start."""
        return self._stats

    def close(self) -> None:
        """Tear the function down."""
        if self._open:
            self._open = False
            self._queue.clear()
            self._function.close()

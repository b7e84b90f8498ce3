"""The thread executor: for work that waits or that releases the interpreter's lock, and nothing to send anywhere."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.core.reorder import Batch, Dispatch, Piece
from headrace.run.executor import ExecutorConfig, Part, WorkerStatistics
from headrace.run.failure import Failure, from_exception, shorten
from headrace.run.task import STARTED, Function, Slice, depth, new_work, run_slice
from headrace.run.wire import Packed

if TYPE_CHECKING:
    from headrace.run.task import Work

_TICK = 0.05
_LEAVE = (0.5, 1.0, 1.5)  # seconds that threads are waited for, in steps, before one that does not leave is left behind


@dataclass(eq=False, slots=True)
class _Lane:
    """One worker thread: what it is given, and the words that a supervisor may read."""

    index: int
    inbox: queue.SimpleQueue[Piece | None] = field(default_factory=queue.SimpleQueue)
    words: list[int] = field(default_factory=lambda: [0, 0])
    work: Work = field(default_factory=lambda: ([], None))  # of the slice that it runs
    function: Function | None = None
    acknowledged: int = 0
    seen: tuple[int, float] = (0, 0.0)
    thread: threading.Thread | None = None
    abandoned: bool = False

    @property
    def name(self) -> str:
        return f"thread {self.index}"


_Report = tuple[_Lane, Slice | Failure, bool, Any]


class ThreadExecutor:
    """Runs batches in threads of this process. Not thread-safe itself: one thread submits and asks for results."""

    def __init__(self, config: ExecutorConfig) -> None:
        """Start the threads; each builds its own instance of the function."""
        self._config = config
        self._dispatch = Dispatch([group.workers for group in config.groups], max_retries=config.max_retries)
        self._done: queue.SimpleQueue[_Report | None] = queue.SimpleQueue()
        self._parts: list[Part] = []
        self._stats = WorkerStatistics()
        self._stopping = threading.Event()
        self._fatal: BaseException | None = None
        self._watched = 0
        self._woken = False
        self._lanes = [self._start(index) for index in range(len(config.seats))]

    @property
    def background(self) -> bool:
        """Threads work while nobody calls."""
        return True

    def ready(self) -> bool:
        """At once."""
        return True

    def free(self, group: int = 0) -> int:
        """Batches that threads of this group could take at once."""
        return self._dispatch.free(group)

    def set_limit(self, group: int, most: int | None) -> None:
        """Inputs a thread is given at once."""
        self._dispatch.set_limit(group, most)

    def watch(self, source: Any, ready: Callable[[], bool] | None) -> None:
        """Wait also while no batch is in flight: somebody will `wake`. (There is nothing to call: threads deliver.)"""
        del source
        self._watched += 1 if ready is not None else -1

    def wake(self) -> None:
        """Make a waiting `completed` return."""
        self._done.put(None)

    def submit(self, batch: Batch) -> None:
        """Take a batch."""
        self._check()
        if isinstance(batch.items, Packed):
            batch.items = batch.items.decode()
        self._dispatch.submit(batch)
        self._stats.batches += 1
        self._send()

    def completed(self, timeout: float | None = None) -> list[Part]:
        """What has finished, waiting for at most `timeout` seconds if nothing has (None: as long as it takes)."""
        self._check()
        deadline = None if timeout is None else time.monotonic() + timeout
        limit = self._config.timeout
        self._woken = False
        while self._dispatch.busy or self._parts or self._watched:
            if self._parts or self._woken:
                self._take(0.0)
                break
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._take(wait if limit is None else _TICK if wait is None else min(wait, _TICK))
            if limit is not None:
                self._watch_clock(limit)
            self._check()
            if not self._parts and deadline is not None and time.monotonic() >= deadline:
                break
        parts, self._parts = self._parts, []
        return parts

    def abandon(self, owner: Any) -> None:
        """Run nothing more of this owner's batches; threads see the mark before they begin one."""
        self._dispatch.drop(lambda key: key[0] is owner)

    def statistics(self) -> WorkerStatistics:
        """Counts since the start."""
        return self._stats

    def stop(self) -> None:
        """Begin nothing more, and make whoever waits for results raise."""
        if self._fatal is None:
            self._fatal = RuntimeError(f"{self._config.name}: the executor is closed")
        self._stopping.set()
        for lane in self._lanes:
            lane.inbox.put(None)
        self.wake()

    def ending(self, began: float) -> Iterator[None]:
        """Let every thread finish its item and leave; one that does not is left behind (a daemon)."""
        self.stop()
        for seconds in _LEAVE:
            yield
            for lane in self._lanes:
                if lane.thread is not None and lane.thread is not threading.current_thread():
                    lane.thread.join(max(0.0, began + seconds - time.monotonic()))

    def close(self) -> None:
        """End the threads."""
        for _ in self.ending(time.monotonic()):
            pass

    def _take(self, wait: float | None) -> None:
        """Wait for a report, then take all that are there."""
        try:
            report = self._done.get(timeout=wait) if wait != 0.0 else self._done.get_nowait()
            while True:
                if report is None:
                    self._woken = True
                else:
                    self._handle(*report)
                report = self._done.get_nowait()
        except queue.Empty:
            pass
        self._send()

    def _handle(self, lane: _Lane, done: Slice | Failure, last: bool, report: Any) -> None:
        if lane.abandoned:
            return
        if isinstance(done, Failure):
            self._fatal = done.raised()
            return
        count = done.end - done.begin
        batch, start = self._dispatch.acknowledged(lane.index, count, last=last)
        if not count:
            return
        lane.acknowledged += count
        self._stats.items += count
        self._stats.busy += done.seconds
        failure = done.failure
        if failure is not None:
            failure.worker = lane.name
            failure.item = self._describe(batch, start + count - 1)
        self._dispatch.set_pace(lane.index, min(2, depth(done.seconds, count)))
        self._parts.append(Part(batch.key, start, count, done.values, failure, done.seconds, 0, report))

    def _send(self) -> None:
        while self._fatal is None and (order := self._dispatch.assign()) is not None:
            worker, piece = order
            self._lanes[worker].inbox.put(Piece(piece.batch, piece.start, piece.stop))

    def _watch_clock(self, limit: float) -> None:
        """Python cannot stop a thread: one that is too late is left behind, and another takes its place."""
        now = time.monotonic()
        for index, lane in enumerate(self._lanes):
            count, (seen, since) = lane.words[STARTED], lane.seen
            if count != seen or count == lane.acknowledged:
                lane.seen = (count, now)
            elif now - since > limit:
                begun = lane.words.pop()  # from here on it begins nothing more
                if begun == count:
                    self._leave_behind(index, lane, limit)
                else:  # it has just gone on to the next item
                    lane.words = [1, begun]
        self._send()

    def _leave_behind(self, index: int, lane: _Lane, limit: float) -> None:
        """Take what the thread has finished, fail the item that it is in, and give the rest to another thread.

        The thread leaves after its item. Whatever that still gives is nobody's, as is whatever the thread remembers.
        """
        lane.abandoned = True
        lane.inbox.put(None)
        report = lane.function.report() if lane.function is not None and lane.function.report is not None else None
        if done := lane.seen[0] - lane.acknowledged - 1:
            values, ends = lane.work
            batch, start = self._dispatch.acknowledged(index, done, last=False)
            self._stats.items += done
            outputs = values[: done if ends is None else ends[done - 1]]
            self._parts.append(Part(batch.key, start, done, outputs, report=report))
            report = None
        for given_up in self._dispatch.died(index, 1, retry=False):
            item = self._describe(given_up.batch, given_up.start)
            error = TimeoutError(
                f"{self._config.name}: item {item} took longer than {limit} s; its thread was left behind, still running"
            )
            failure = Failure(error, self._config.name, item, worker=lane.name, died=True)
            self._parts.append(Part(given_up.batch.key, given_up.start, 1, [], failure, report=report))
        self._lanes[index] = self._start(index)

    def _start(self, index: int) -> _Lane:
        lane = _Lane(index, seen=(0, time.monotonic()))
        lane.thread = threading.Thread(target=self._run, args=(lane,), name=f"{self._config.name}-{index}", daemon=True)
        lane.thread.start()
        return lane

    def _run(self, lane: _Lane) -> None:
        """The body of a thread."""
        try:
            lane.function = function = Function(self._config.seats[lane.index])
        except BaseException as error:  # noqa: BLE001 (a user's set-up; the owner's thread raises it)
            self._done.put((lane, from_exception(error, f"set-up of {self._config.name}", None), True, None))
            return
        while (piece := lane.inbox.get()) is not None and not self._stopping.is_set() and not lane.abandoned:
            begin = piece.start
            while begin < piece.stop:
                if piece.batch.dropped:
                    self._done.put((lane, Slice((begin, begin), [], [], None, 0.0), True, None))
                    break
                lane.work = work = new_work(function)
                done = run_slice(function, piece.batch.items, (begin, piece.stop), piece.batch.first, lane.words, work)
                if lane.abandoned:
                    break
                begin = done.end
                last = begin == piece.stop or self._config.hand_back
                report = function.report() if function.report is not None else None
                self._done.put((lane, done, last, report))
                if last or self._stopping.is_set():
                    break
        function.close()

    def _describe(self, batch: Batch, index: int) -> str:
        return self._config.describe(batch.items[index]) if self._config.describe else shorten(batch.items[index])

    def _check(self) -> None:
        if self._fatal is not None:
            raise self._fatal

"""What was enqueued and emitted, on its way through the steps to whoever asks for outputs.

* Whoever has the turn makes a step of the flow: those who enqueue (without waiting), dequeue or iterate. What comes out of
  it, outputs and errors of items and of readers, is put in one queue, in its place; only those who take from that queue
  see it. So an error reaches a consumer, whichever thread met it, and everything before it comes first.
* An error of an item or of a reader is given once, and what comes behind it follows. An error of the workers themselves
  (they cannot start, say) is the end: the pipeline takes no more, and everyone is told.
* A reader's error ends the readers that were given in the same call; what was enqueued goes on.
* Nobody waits with processor time: for workers in the executor, for the turn and for something to do on `Turn.news`.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Generator, Iterator
from time import monotonic
from typing import Any, TypeVar

from headrace.core.reorder import Stop
from headrace.errors import Cancelled
from headrace.run.executor import Paced
from headrace.steps.flow import Cancellation, Flow, StageFlow
from headrace.steps.source import Chained, QueueSource
from headrace.steps.statistics import Ledger
from headrace.steps.turn import Turn

T = TypeVar("T")


class Pump:
    """The queue behind `enqueue`, `emit`, `dequeue` and iteration."""

    def __init__(self, turn: Turn, executor: Paced, stages: list[StageFlow], most: int, ledger: Ledger) -> None:
        """`most` items may wait for workers; enqueueing collects no more than `most` lists of outputs."""
        self._turn = turn
        self._background = executor.background
        self._most = most
        self._queue = QueueSource(most)
        self._source = Chained([self._queue])
        self._flow = Flow(turn, executor, stages, self._source, 0, ledger)
        self._ledger = ledger
        # These are read and changed with `news` held.
        self._ready: deque[deque[Any] | Stop] = deque()  # outputs, none of them empty, and errors
        self._broken: Exception | None = None
        self._given = 0  # times that something was enqueued or a source was attached
        self._cancels = 0
        self._heard = 0  # the last cancel that anybody was told of

    @property
    def stages(self) -> list[StageFlow]:
        """For statistics."""
        return self._flow.stages

    def put(self, item: Any) -> None:
        """Take an item, and give workers what they have room for; never waits."""
        turn = self._turn
        with turn.news:
            turn.check()
            if self._broken is not None:
                raise self._broken
            self._queue.put(item)
            self._given += 1
            turn.ask()
        if self._background and len(self._ready) < self._most and turn.free and turn.take(0.0):
            try:
                self._collect(0.0)
            finally:
                turn.leave()

    def attach(self, make: Callable[[], Any]) -> None:
        """Add the source that `make` builds while no other thread uses the executor."""
        with self._turn.step(ask=True):
            self._source.sources.append(make())
            self._given += 1

    def get(self, timeout: float | None) -> Any:
        """The next output; waits while anything is under way, with a `timeout` also for what others may yet give."""
        got = self._next(self._one, self._heard, timeout)
        if got is None and timeout is None:
            raise queue.Empty("nothing is under way: enqueue something first, or give a timeout")
        if got is None:
            raise queue.Empty(f"no output within {timeout} s")
        return got[0]

    def lists(self) -> Generator[Iterator[Any], None, None]:
        """All outputs until nothing is under way. What the consumer leaves of a list is the next again."""
        heard, began = self._heard, monotonic()
        rest: Iterator[Any] | None = iter(())
        try:
            while (rest := self._next(self._list, heard, None)) is not None:
                yield rest
        finally:
            self._ledger.active += monotonic() - began
            self._give_back(deque(rest or ()))

    def cancel(self) -> None:
        """Make all who wait for outputs raise `Cancelled`, or the next who asks. What is under way stays so."""
        self._cancels += 1
        self._flow.cancelled = True

    def close(self) -> None:
        """Forget everything; sources end."""
        self._flow.close()
        self._ready.clear()

    def _next(self, take: Callable[[], T], heard: int, timeout: float | None) -> T | None:
        """`take` from what is ready as soon as something is; None if nothing will be, or the time is over."""
        turn = self._turn
        deadline = None if timeout is None else monotonic() + timeout
        looked, idle = False, -1
        while True:
            with turn.news:
                turn.check()
                if self._cancels != heard:
                    self._heard = self._cancels
                    raise Cancelled("the pipeline was cancelled")
                if self._ready:
                    return take()
                if self._broken is not None:
                    raise self._broken
                if looked and _left(deadline) == 0.0:
                    return None
                if idle == self._given:  # nothing is under way, and nobody gave anything since that was seen
                    if deadline is None:
                        return None
                    turn.news.wait(_left(deadline))
                    continue
            if turn.take(_left(deadline), ask=not looked):
                try:
                    turn.check()
                    if not self._ready:
                        idle = self._step(_left(deadline))
                finally:
                    turn.leave()
            looked = True

    def _step(self, wait: float | None) -> int:
        """One step. If nothing is under way after it: how often anything had been given before it, otherwise -1."""
        flow, given = self._flow, self._given
        if not flow.finished:
            self._collect(wait)
        if not flow.finished:
            return -1
        if (error := self._source.take_error()) is not None:
            with self._turn.news:
                self._ready.append(Stop(-1, error))
        return given

    def _collect(self, wait: float | None) -> None:
        try:
            out = self._flow.step(wait)
        except Cancellation:
            self._flow.cancelled = False  # whoever is to hear of it knows by the count
        except Exception as broken:  # noqa: BLE001 (no item's, which come as `Stop`: the workers' own, or a fault of ours)
            self._broken = broken
        else:
            if out is not None:
                with self._turn.news:
                    self._ready.append(out if isinstance(out, Stop) else deque(out))

    def _one(self) -> tuple[Any]:
        first = self._ready[0]
        if isinstance(first, Stop):
            self._ready.popleft()
            raise first.error
        out = first.popleft()
        if not first:
            self._ready.popleft()
        self._ledger.delivered += 1
        return (out,)

    def _list(self) -> Iterator[Any]:
        first = self._ready.popleft()
        if isinstance(first, Stop):
            raise first.error
        self._ledger.delivered += len(first)
        return iter(first)

    def _give_back(self, rest: deque[Any]) -> None:
        if rest:
            with self._turn.news:
                self._ready.appendleft(rest)
                self._ledger.delivered -= len(rest)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - monotonic())

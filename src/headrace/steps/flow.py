"""One pass of items through the stages of a pipeline: the only loop, and the contract it keeps.

* An input is submitted once and accounted for once: by its outputs (none is an answer), by an error, or as skipped.
* The flow is finished when its source has ended and every input that it gave has been taken. No sentinel travels
  through a queue, where it could overtake what it is meant to end.
* At most `limit` batches are outstanding in each stage, from the submission to the moment the consumer has taken the
  last output. So memory is bounded whatever the consumer, the source or a slow item does.
* Work that is nearly done goes first: outputs leave before inputs enter, later stages before earlier ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from headrace.core.reorder import Batch, Release, Stop, Window
from headrace.errors import InternalError
from headrace.run.executor import Paced, Part, route
from headrace.run.failure import Failure, from_exception
from headrace.run.inline import InlineExecutor
from headrace.run.task import DEEPEST
from headrace.run.wire import Packed, Unreadable
from headrace.steps.batching import INLINE_MOST, INLINE_SECONDS, MOST, TARGET_BYTES, THREADS_MOST, BatchSize
from headrace.steps.failed import Failed
from headrace.steps.settings import Settings
from headrace.steps.source import Pulled
from headrace.steps.statistics import Ledger
from headrace.steps.turn import Turn

AHEAD = 4  # batches outstanding for each that the workers can hold: how far others may run ahead of a slow one
_IN_WORK = 2
_FEW = 400  # items of a batch up to which a worker may hold many
_BARREN = 10_000


class StageFlow:
    """One stage's part of a flow. Its identity is in the key of each batch, so that results find their way."""

    def __init__(self, group: int, workers: range, settings: Settings, ledger: Ledger, background: bool) -> None:
        """Workers `workers` (their numbers in the executor) run this stage's steps, in the background or on request."""
        self.group = group
        self.workers = workers
        self.settings = settings
        self.ledger = ledger
        self.keyed = settings.assign is not None
        self.size = BatchSize(most=THREADS_MOST if settings.runner == "threads" else MOST)
        if not background:
            self.size = BatchSize(INLINE_SECONDS, INLINE_MOST)
        self.window: Window[Any] = Window(self.ahead(), ordered=settings.ordered)
        self.inbox: deque[Any] = deque()
        self.closed = False
        self._accounted = 0  # inputs

    def ahead(self) -> int:
        """Submissions that may be outstanding: more of small batches, of which a worker holds more."""
        if self.keyed:
            return 256 * AHEAD * len(self.workers)
        size = self.size
        small = size.items <= _FEW and 0 < size.items * size.nbytes <= 2 * TARGET_BYTES
        return AHEAD * (DEEPEST if small else 2) * len(self.workers)

    def submit(self, executor: Paced, pulled: Pulled, first: int) -> None:
        """Send items to this stage's workers."""
        if self.keyed:
            self._submit_keyed(executor, pulled, first)
            return
        index = self.window.submit(pulled.count)
        executor.submit(Batch((self, index), pulled.items, pulled.count, first + index, self.group))

    def _submit_keyed(self, executor: Paced, pulled: Pulled, first: int) -> None:
        """One batch for each worker that a key of these items belongs to. Every item keeps its own place in the order."""
        items = pulled.items.decode_apart() if isinstance(pulled.items, Packed) else pulled.items
        shares: dict[int, tuple[list[int], list[Any]]] = {}
        for item in items:
            place = self.window.submit()
            worker = self._worker_for(item)
            if isinstance(worker, Failure):
                self._account(Part((self, place), 0, 1, [], worker))
                self._failed(place, 0, worker)
                continue
            places, share = shares.setdefault(worker, ([], []))
            places.append(place)
            share.append((first + place, item))
        for worker, (places, share) in shares.items():
            executor.submit(Batch((self, tuple(places)), share, len(share), 0, self.group, worker))

    def _worker_for(self, item: Any) -> int | Failure:
        """The worker that the item's key belongs to; an item without a key has failed like one whose step raises."""
        assign = self.settings.assign
        assert assign is not None
        if type(item) is Unreadable:
            return item.failure("receiving the item", "the item from an emitter cannot be unpickled here")
        try:
            return self.workers[assign(item) % len(self.workers)]
        except Exception as error:  # noqa: BLE001 (whatever the user's function raises)
            return from_exception(error, "the function of assign=", item)

    def _account(self, part: Part) -> None:
        self.ledger.account(self.group, part)
        self._accounted += part.count

    def deliver(self, first: Any, part: Part) -> None:
        """A part of one of this stage's batches is done."""
        self._account(part)
        if self.closed:
            if self.group == 0:
                self.ledger.received += part.count  # it had begun when the others were given up
            return
        good = part.count - (part.failure is not None)
        self.size.observe(part.count, part.seconds, part.nbytes)
        if self.keyed:
            for n in range(good):
                self.window.finished(first[part.start + n], 0, 1, part.values[n])
        elif good:
            self.window.finished(first, part.start, good, part.values)
        if part.failure is not None:
            place, start = (first[part.start + good], 0) if self.keyed else (first, part.start + good)
            self._failed(place, start, part.failure)

    def close(self, executor: Paced) -> None:
        """Ignore what is under way, and let nothing run that has not begun: it counts as never received."""
        if self.closed:
            return
        self.closed = True
        if not self.window.idle:
            executor.abandon(self)
        if self.group == 0:
            self.ledger.received -= self.window.submitted - self._accounted

    def _failed(self, first: int, start: int, failure: Failure) -> None:
        """A failure that the steps themselves could not turn into a value: a death, a time limit, a result that cannot travel."""
        policy = self.settings.on_error
        if policy == "raise" or (failure.died and self.keyed):
            self.window.failed(first, start, failure)
            return
        self.ledger.lost(failure, returned=policy == "return")
        outputs = [Failed(failure)] if policy == "return" else []
        self.window.finished(first, start, 1, outputs)


class Flow:
    """Carries the items of one source through all stages."""

    def __init__(
        self, turn: Turn, executor: Paced, stages: list[StageFlow], source: Any, first: int, ledger: Ledger
    ) -> None:
        """`turn` is to be held around each step. `first`: the index of the source's first item in the whole input."""
        self._turn = turn
        self._executor = executor
        self.stages = stages
        self._ledger = ledger
        self._source = source
        self._first = first
        self._parting = False
        self._barren = 0  # rounds in a row in which nothing happened
        self.cancelled = False

    def outputs(self, enough: Callable[[], bool] | None = None) -> Generator[list[Any], None, None]:
        """Outputs, as they may leave, in lists; ends when the source has, or soon after `enough()` says so."""
        try:
            out = []
            while True:
                with self._turn.step(ask=out is not None):  # who comes back from the consumer has room for new inputs
                    out = self.step(wait=None, enough=enough)
                    finished = out is None and self.finished
                if isinstance(out, Stop):
                    raise out.error
                if out is not None:
                    yield out
                elif finished:
                    if (error := self._source.error) is not None and not self._parting:
                        raise error
                    return
        finally:
            with self._turn.closing():
                self.close()

    @property
    def finished(self) -> bool:
        """Whether the source has ended (or is being left) and nothing of it is under way."""
        stages = self.stages
        under_way = any(stage.inbox or not stage.window.idle for stage in stages)
        return (self._source.ended or self._parting) and not under_way

    def step(self, wait: float | None, enough: Callable[[], bool] | None = None) -> list[Any] | Stop | None:
        """Outputs that may leave now, or an error in their place; if there are none, wait for something to happen.

        It waits `wait` seconds at most. Whatever it raises is no item's: the flow cannot go on.
        """
        if self._executor.background:
            route(self._executor.completed(0.0))
        if self.cancelled:  # looked at behind that, which may take the wake-up away that came with it
            raise Cancellation
        if enough is not None and not self._parting and enough():
            self._part()
        self._fill()
        if (out := self._take()) is not None:
            return out
        if self.finished or wait == 0.0:
            return None
        parts = self._executor.completed(wait)
        route(parts)
        self._check_progress(parts, wait)
        return self._take()

    def _part(self) -> None:
        """Leave the source to somebody else, with what was pulled of it and not begun."""
        self._parting = True
        stage = self.stages[0]
        if not isinstance(self._executor, InlineExecutor) or stage.keyed:
            return
        for batch, start in self._executor.take_back(stage):
            stage.window.retract(batch.count - start)
            self._ledger.received -= batch.count - start
            self._source.give_back(batch.items[start:])

    def close(self) -> None:
        """Take no more, and give up what is still under way."""
        for stage in self.stages:
            stage.close(self._executor)
        if not self._parting:
            self._source.close()

    def _fill(self) -> None:
        """Give every stage what its workers can take, the last stage first."""
        for number in range(len(self.stages) - 1, -1, -1):
            stage = self.stages[number]
            if number > 0:
                self._pass_on(self.stages[number - 1], stage)
            self._executor.set_limit(stage.group, None if stage.keyed else stage.size.items)
            stage.window.limit = stage.ahead()
            while stage.window.room and self._executor.free(stage.group):
                pulled = self._pull(number, stage)
                if pulled is None:
                    break
                stage.submit(self._executor, pulled, self._first)

    def _pull(self, number: int, stage: StageFlow) -> Pulled | None:
        most = stage.size.items
        if number == 0:
            if self._parting or self._source.ended:
                return None
            pulled = self._source.pull(min(most * len(stage.workers), stage.window.room) if stage.keyed else most)
            if pulled is not None:
                self._ledger.received += pulled.count
            return pulled
        items: list[Any] = []
        while stage.inbox and len(items) < most:
            if isinstance(stage.inbox[0], _Passing):
                if items or not stage.window.room:
                    break
                stage.window.failed(stage.window.submit(), 0, stage.inbox.popleft())
            else:
                items.append(stage.inbox.popleft())
        return Pulled(items, len(items)) if items else None

    def _pass_on(self, stage: StageFlow, following: StageFlow) -> None:
        """Outputs of one stage become inputs of the next, as long as the next has use for them."""
        while len(following.inbox) < following.size.items * _IN_WORK * len(following.workers):
            out = stage.window.take()
            if out is None:
                return
            if isinstance(out, Release):
                following.inbox.extend(out.outputs)
            else:  # it goes on through the later stages, to be raised at its place
                following.inbox.append(_Passing(out.error, out.index))

    def _take(self) -> list[Any] | Stop | None:
        """What the last stage may release."""
        window = self.stages[-1].window
        while (out := window.take()) is not None:
            if isinstance(out, Stop):
                return Stop(out.index, _raised(out.error, out.index + self._first))
            if out.outputs:
                return out.outputs if isinstance(out.outputs, list) else list(out.outputs)
        return None

    def _check_progress(self, parts: list[Part], wait: float | None) -> None:
        """An executor that waits for nothing although inputs are under way has lost them: say so instead of spinning."""
        if parts or wait is not None or not self._source.ended or self._turn.asked:
            self._barren = 0
            return
        self._barren += 1
        if self._barren > _BARREN:
            raise InternalError("inputs are under way and no worker has them")


@dataclass(frozen=True, slots=True)
class _Passing:
    """A failure of an earlier stage, on its way to the end."""

    failure: Failure
    index: int  # in the input of the stage that failed


def _raised(failure: Failure | _Passing, index: int) -> BaseException:
    while isinstance(failure, _Passing):
        failure, index = failure.failure, failure.index
    return failure.raised(index)


class Cancellation(Exception):
    """Raised inside a flow that was cancelled."""

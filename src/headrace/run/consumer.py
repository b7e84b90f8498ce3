"""The training loop's side of a run: batches in order, and what a checkpoint holds.

It sees nothing but the messages that the engine hands over, so it is the same whether the engine runs in this process or
in another.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from headrace.core.block import Block
from headrace.core.checkpoint import LaneState, Snapshot, Span
from headrace.core.lanes import Topology, Turn
from headrace.core.message import Cut, End, Item, Message
from headrace.core.tokens import count_tokens
from headrace.observe.counters import Deliveries
from headrace.observe.summary import EngineSummary
from headrace.run.progress import LaneProgress
from headrace.run.uneven import Stream, is_delivery, is_masked
from headrace.run.uneven_plan import Ending


class Producer(Protocol):
    """An engine, here or elsewhere."""

    topology: Topology

    def start(self) -> None:
        """Begin."""
        ...

    def take(self) -> deque[tuple[Turn, Message]]:
        """Messages that are ready; `Finished` at the end."""
        ...

    def ready(self, within: float) -> bool:
        """Whether `take` returns within so many seconds; waits up to them for that."""
        ...

    def sources(self, lane: int) -> dict[int, dict[str, Any]]:
        """The work source's states, by chunk."""
        ...

    def released(self, lane: int) -> dict[int, list[Span]]:
        """Orders of release, by cut."""
        ...

    def drawn(self, lane: int) -> int:
        """Chunks handed out."""
        ...

    def summary(self) -> EngineSummary:
        """Counts of the engine."""
        ...

    def close(self) -> None:
        """Stop everything."""
        ...


class Consumer:
    """Follows the messages of a producer."""

    def __init__(
        self,
        producer: Producer,
        start: Mapping[int, LaneState],
        position: int,
        cut_every: int,
        ending: Ending | None = None,
        passed: int = 0,
    ) -> None:
        self.producer, self.topology, self.position = producer, producer.topology, position
        self.deliveries = Deliveries()
        self._passed = passed
        self._progress = {
            lane: LaneProgress(start[lane], producer.sources(lane), producer.released(lane), cut_every)
            for lane in self.topology.computed
        }
        self._numbers = {lane: self.topology.taken(position, lane) for lane in self.topology.computed}
        self._ended: set[int] = set()
        self._ahead: deque[tuple[Turn, Message]] = deque()
        """Seen on the way to the next batch of this rank, and no part of a checkpoint before that one is delivered."""
        self._offered: tuple[Turn, Block | Item] | None = None
        """Given by `next`, and not delivered yet."""
        self.begun = False
        """Whether a batch was delivered, or the end was met."""
        self.behind: tuple[int, ...] = ()
        """Lanes whose state in the last snapshot counts batches of other groups that have not come past here."""
        self._deadline: float | None = None
        self._lock = threading.Lock()
        self._pulling = threading.Lock()
        self._stream = Stream(self._take) if ending is None else ending.stream(self._take)

    def start(self) -> None:
        """Start the producer."""
        self.producer.start()
        self._stream.start()

    def close(self) -> None:
        """Stop the producer."""
        self._stream.close()
        self.producer.close()

    def _take(self) -> deque[tuple[Turn, Message]]:
        if self._deadline is not None and not self.producer.ready(self._deadline - time.monotonic()):
            raise TimeoutError
        return self.producer.take()

    def next(self) -> Block | Item:
        """The next batch for this rank, which counts when it is delivered; StopIteration at the end."""
        with self._pulling:
            while True:
                try:
                    turn, message = self._stream.pull()
                except StopIteration:
                    self.begun = True
                    self._count_left_over()
                    raise
                if self._account(turn, message):
                    assert isinstance(message, (Block, Item))
                    return message

    @property
    def following(self) -> int:
        """The position once the batch that `next` gave is delivered."""
        return self.position if self._offered is None else self.topology.after(self.position, self._offered[0])

    def deliver(self) -> None:
        """Count the batch that `next` gave and move behind it: the last act before the loop has it.

        Whatever fails before that leaves a checkpoint that stands before this batch.
        """
        assert self._offered is not None
        turn, message = self._offered
        masked = is_masked(message)
        tokens, following = 0 if masked else _tokens(message), self.following
        with self._lock:
            while self._ahead:
                self._follow(*self._ahead.popleft())
            self._follow(turn, message)
            self._passed += self.topology.passed(self.position, turn)
            self._offered, self.position, self.begun = None, following, True
            if masked:
                self.deliveries.padded += 1
            else:
                self.deliveries.add(message.origin, tokens)

    def _count_left_over(self) -> None:
        """What lies past the last step that every group can fill, each batch counted by the group that would have had it."""
        if self.topology.overhead > 1:
            self._catch_up()
        for turn, message in self._stream.rest():
            if isinstance(message, (Block, Item)) and turn.mine:
                left_over = self.deliveries.left_over = self.deliveries.left_over or Deliveries()
                left_over.add(message.origin, _tokens(message))

    def _account(self, turn: Turn, message: Message) -> bool:
        """Look at one message; true if it is a batch for this rank."""
        with self._lock:
            if turn.mine and isinstance(message, (Block, Item)):
                self._offered = turn, message
                return True
            if self._ahead or (is_delivery(message) and self.topology.number(turn) >= self.position):
                self._ahead.append((turn, message))
            else:
                self._follow(turn, message)
            return False

    def _follow(self, turn: Turn, message: Message) -> None:
        progress = self._progress[turn.lane]
        if isinstance(message, Cut):
            progress.passed(message)
        elif isinstance(message, End):
            self._ended.add(turn.lane)
        elif not is_masked(message):
            progress.took()
            self._numbers[turn.lane] = turn.number + 1

    def snapshot(self, within: float | None = None) -> Snapshot:
        """What a checkpoint holds now, also while another thread takes batches. Lanes shared with other groups are first brought
        up to this rank's position.

        within: seconds that may be waited for those of other groups, while a run is being closed; None: as long as they take.
        """
        if self.topology.overhead > 1 and self._pulling.acquire(blocking=False):
            self._deadline = None if within is None else time.monotonic() + within
            try:
                self._catch_up()
            finally:
                self._deadline = None
                self._pulling.release()
        with self._lock:
            self.behind = tuple(filter(self._untold, self._progress))
            lanes = {lane: progress.state(self._untold(lane)) for lane, progress in self._progress.items()}
            for lane, state in lanes.items():
                if 0 < state.reached <= self.position:
                    lanes[lane] = replace(state, reached=0)
            return Snapshot(self.position, lanes, self._passed)

    def _untold(self, lane: int) -> int:
        """Batches before this rank's position that other groups deliver and that have not come past here (yet)."""
        if self.topology.overhead == 1 or lane in self._ended:
            return 0
        return max(0, self.topology.taken(self.position, lane) - self._numbers[lane])

    def _catch_up(self) -> None:
        """Follow the batches of other groups before this rank's position, which are on their way."""
        with contextlib.suppress(Exception):  # whatever ended the engine: the loop raises it, a checkpoint need not
            while not self._ahead and self._offered is None and any(map(self._untold, self._progress)):
                try:
                    turn, message = self._stream.pull()
                except StopIteration:
                    break
                if self.topology.number(turn) >= self.position:
                    self._stream.put_back(turn, message)
                    return
                self._account(turn, message)

    def in_flight(self) -> dict[int, int]:
        """Chunks of each lane that were handed out and may still have records on their way."""
        return {
            lane: max(0, self.producer.drawn(lane) - min(progress.incomplete_from()))
            for lane, progress in self._progress.items()
        }


def _tokens(message: Block | Item) -> int:
    return count_tokens(message) if isinstance(message, Block) and message.columns is not None else 0

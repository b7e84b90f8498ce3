"""The training loop's side of a run: batches in order, and what a checkpoint holds.

It sees nothing but the messages that the engine hands over, so it is the same whether the engine runs in this process or
in another.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from headrace.core.block import Block
from headrace.core.checkpoint import LaneState, Span
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
    ) -> None:
        self.producer, self.topology, self.position = producer, producer.topology, position
        self.deliveries = Deliveries()
        self._progress = {
            lane: LaneProgress(start[lane], producer.sources(lane), producer.released(lane), cut_every)
            for lane in self.topology.computed
        }
        self._numbers = {lane: self.topology.taken(position, lane) for lane in self.topology.computed}
        self._ended: set[int] = set()
        self._ahead: deque[tuple[Turn, Message]] = deque()
        """Seen on the way to the next batch of this rank, and no part of a checkpoint before that one is delivered."""
        self._lock = threading.Lock()
        self._pulling = threading.Lock()
        self._stream = Stream(producer.take) if ending is None else ending.stream(producer.take)

    def start(self) -> None:
        """Start the producer."""
        self.producer.start()
        self._stream.start()

    def close(self) -> None:
        """Stop the producer."""
        self._stream.close()
        self.producer.close()

    def next(self) -> Block | Item:
        """The next batch for this rank; StopIteration at the end."""
        with self._pulling:
            while True:
                try:
                    turn, message = self._stream.pull()
                except StopIteration:
                    self._count_left_over()
                    raise
                if self._account(turn, message):
                    assert isinstance(message, (Block, Item))
                    return message

    def _count_left_over(self) -> None:
        """What lies past the last step that every group can fill, each batch counted by the group that would have had it."""
        if self.topology.overhead > 1:
            self._catch_up()
        for turn, message in self._stream.rest():
            if isinstance(message, (Block, Item)) and turn.mine:
                left_over = self.deliveries.left_over = self.deliveries.left_over or Deliveries()
                left_over.add(message.origin, _tokens(message))

    def _account(self, turn: Turn, message: Message) -> bool:
        """Follow one message; true if it is a batch that this rank delivers."""
        with self._lock:
            if turn.mine and is_delivery(message):
                while self._ahead:
                    self._follow(*self._ahead.popleft())
            elif self._ahead or (is_delivery(message) and self.topology.number(turn) >= self.position):
                self._ahead.append((turn, message))
                return False
            return self._follow(turn, message)

    def _follow(self, turn: Turn, message: Message) -> bool:
        progress = self._progress[turn.lane]
        if isinstance(message, Cut):
            progress.passed(message)
            return False
        if isinstance(message, End):
            self._ended.add(turn.lane)
            return False
        if not is_masked(message):
            progress.took()
            self._numbers[turn.lane] = turn.number + 1
        if not turn.mine:
            return False
        self.position = self.topology.after(self.position, turn)
        return True

    def lane_states(self) -> dict[int, LaneState]:
        """What a checkpoint holds now. Lanes shared with other groups are first brought up to the same position."""
        return self.snapshot()[1]

    def snapshot(self) -> tuple[int, dict[int, LaneState]]:
        """Position and lane states that belong together, also while another thread takes batches."""
        if self.topology.overhead > 1 and self._pulling.acquire(blocking=False):
            try:
                self._catch_up()
            finally:
                self._pulling.release()
        with self._lock:
            return self.position, {
                lane: progress.state(self._untold(lane)) for lane, progress in self._progress.items()
            }

    def _untold(self, lane: int) -> int:
        """Batches before this rank's position that other groups deliver and that have not come past here (yet)."""
        if self.topology.overhead == 1 or lane in self._ended:
            return 0
        return max(0, self.topology.taken(self.position, lane) - self._numbers[lane])

    def _catch_up(self) -> None:
        """Follow the batches of other groups before this rank's position, which are on their way."""
        with contextlib.suppress(Exception):  # whatever ended the engine: the loop raises it, a checkpoint need not
            while not self._ahead:
                try:
                    turn, message = self._stream.pull()
                except StopIteration:
                    break
                if self.topology.number(turn) >= self.position:
                    self._stream.put_back(turn, message)
                    return
                self._account(turn, message)

    def deliver(self, message: Block | Item) -> None:
        """Count a batch that goes to the loop."""
        if is_masked(message):
            self.deliveries.padded += 1
        else:
            self.deliveries.add(message.origin, _tokens(message))

    def in_flight(self) -> dict[int, int]:
        """Chunks of each lane that were handed out and may still have records on their way."""
        return {
            lane: max(0, self.producer.drawn(lane) - min(progress.incomplete_from()))
            for lane, progress in self._progress.items()
        }


def _tokens(message: Block | Item) -> int:
    return count_tokens(message) if isinstance(message, Block) and message.columns is not None else 0

"""The training loop's side of a run: batches in order, and what a checkpoint holds.

It sees nothing but the messages that the engine hands over, so it is the same whether the engine runs in this process or
in another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from headrace.core.block import Block, Origin
from headrace.core.checkpoint import LaneState, Span
from headrace.core.lanes import Topology, Turn
from headrace.core.message import Cut, Item, Message
from headrace.observe.counters import Deliveries
from headrace.observe.summary import EngineSummary
from headrace.run.handover import Finished
from headrace.run.progress import LaneProgress


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

    def __init__(self, producer: Producer, start: Mapping[int, LaneState], position: int) -> None:
        self.producer, self.topology, self.position = producer, producer.topology, position
        self.deliveries = Deliveries()
        self._progress = {
            lane: LaneProgress(start[lane], producer.sources(lane), producer.released(lane))
            for lane in self.topology.computed
        }
        self._numbers = {lane: self.topology.taken(position, lane) for lane in self.topology.computed}
        self._local: deque[tuple[Turn, Message]] = deque()
        self._over = False

    def next(self) -> Block | Item:
        """The next batch for this rank; StopIteration at the end."""
        while True:
            turn, message = self._pull()
            if self._account(turn, message):
                assert isinstance(message, (Block, Item))
                return message

    def _pull(self) -> tuple[Turn, Message]:
        if not self._local:
            if self._over:
                raise StopIteration
            try:
                self._local = self.producer.take()
            except Finished:
                self._over = True
                raise StopIteration from None
        return self._local.popleft()

    def _account(self, turn: Turn, message: Message) -> bool:
        """Follow one message; true if it is a batch that this rank delivers."""
        progress = self._progress[turn.lane]
        if isinstance(message, Cut):
            progress.passed(message)
            return False
        progress.took()
        self._numbers[turn.lane] = turn.number + 1
        if not turn.mine:
            return False
        self.position = self.topology.after(self.position, turn)
        return True

    def lane_states(self) -> dict[int, LaneState]:
        """What a checkpoint holds now. Lanes shared with other groups are first brought up to the same position."""
        if self.topology.overhead > 1:
            self._catch_up()
        return {lane: progress.state() for lane, progress in self._progress.items()}

    def _catch_up(self) -> None:
        """Follow the batches before this rank's position. What an engine that has failed cannot tell is counted instead."""
        try:
            while True:
                turn, message = self._pull()
                if self.topology.number(turn) >= self.position:
                    self._local.appendleft((turn, message))
                    return
                self._account(turn, message)
        except StopIteration:
            return
        except Exception:  # noqa: BLE001  whatever ended the engine: the loop raises it, a checkpoint need not
            for lane, progress in self._progress.items():
                progress.passed_over(self.topology.taken(self.position, lane) - self._numbers[lane])

    def deliver(self, origin: Origin, tokens: int) -> None:
        """Count a batch that goes to the loop."""
        self.deliveries.add(origin, tokens)

    def in_flight(self) -> dict[int, int]:
        """Chunks of each lane that were handed out and may still have records on their way."""
        return {
            lane: max(0, self.producer.drawn(lane) - min(progress.incomplete_from()))
            for lane, progress in self._progress.items()
        }

"""The end of finite data on the consumer's side: which of the engine's messages reach the loop, and when that is over.

`Stream` passes everything on (`uneven="keep"`). `DropStream` and `PadStream` end at the same step on every group. They look ahead
in what the engine has finished, tell an `Agreement` what they see of their own lanes, and ask it about a step only where the answer
is not known yet; in the steady state it is, because engines run ahead. See docs/decisions/0003-uneven-end.md.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from headrace.core.block import Block, Origin
from headrace.core.lanes import Topology, Turn
from headrace.core.message import Cut, End, Item, Message
from headrace.core.tokens import PADDING, column_lengths, find_tokens_field
from headrace.core.uneven import Standing, Steps
from headrace.errors import DataError, InternalError
from headrace.run.handover import Finished

Take = Callable[[], deque[tuple[Turn, Message]]]

_log = logging.getLogger("headrace")


class Agreement(Protocol):
    """What all members know together."""

    def start(self) -> None:
        """Begin to listen."""
        ...

    def publish(self, own: Standing) -> None:
        """Tell what this member knows. Never waits."""
        ...

    def wait(self, decide: Callable[[Standing], bool | None]) -> bool:
        """The decision from what all know, as soon as it is one. An error names members that are gone or silent."""
        ...

    def close(self) -> None:
        """This member takes no further part."""
        ...


class Known:
    """Nothing to agree on: the lengths of all lanes follow from the curriculum, or this member computes all of them."""

    def __init__(self, standing: Standing | None = None) -> None:
        self._fixed, self._own = standing is not None, standing

    def start(self) -> None:
        """Nothing to do."""

    def publish(self, own: Standing) -> None:
        """Keep it, if nothing better is known."""
        if not self._fixed:
            self._own = own

    def wait(self, decide: Callable[[Standing], bool | None]) -> bool:
        """At once."""
        decision = None if self._own is None else decide(self._own)
        if decision is None:
            raise InternalError(f"the end of the data is not known where it must be: {self._own}")
        return decision

    def close(self) -> None:
        """Nothing to do."""


class Stream:
    """The engine's messages, all of them."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._local: deque[tuple[Turn, Message]] = deque()
        self._over = False

    def start(self) -> None:
        """Begin to listen to other groups, if that is needed."""

    def pull(self) -> tuple[Turn, Message]:
        """The next message; StopIteration at the end."""
        if not self._local and not self._receive():
            raise StopIteration
        return self._local.popleft()

    def put_back(self, turn: Turn, message: Message) -> None:
        """Undo a `pull`."""
        self._local.appendleft((turn, message))

    def rest(self) -> Iterator[tuple[Turn, Message]]:
        """What is left over once `pull` has ended."""
        yield from ()

    def close(self) -> None:
        """No more will be asked for."""

    def _receive(self) -> bool:
        """More from the engine; False if it has no more."""
        if self._over:
            return False
        try:
            received = self._take()
        except Finished:
            self._over = True
            return False
        self._local.extend(received)
        return True


class EvenStream(Stream):
    """What both rules share: following this member's own lanes, ahead of what is delivered."""

    def __init__(
        self,
        take: Take,
        topology: Topology,
        position: int,
        steps: Steps,
        agreement: Agreement,
        lengths: Mapping[int, int] | None = None,
    ) -> None:
        """`lengths`: batches of each lane, where they are known beforehand."""
        super().__init__(take)
        self._topology, self._steps, self._agreement = topology, steps, agreement
        self._lengths = lengths or {}
        delivered = position // topology.groups * topology.groups if topology.mapping == "contiguous" else position
        self._own = Standing(topology.next_place(position - 1), reach=delivered)  # a step that was begun goes on
        self._at_start = position == 0
        self._open = set(topology.computed)
        self._stopped = False

    def start(self) -> None:
        """Begin to listen to the other members."""
        self._agreement.start()
        self._agreement.publish(self._own)

    def close(self) -> None:
        """Say that this member takes no further part."""
        self._agreement.close()

    def _receive(self) -> bool:
        before = len(self._local)
        more = super()._receive()
        for turn, message in list(self._local)[before:]:
            self._follow(turn, message)
        if more:
            self._agreement.publish(self._own)
        return more

    def _follow(self, turn: Turn, message: Message) -> None:
        place, own = self._topology.place(turn), self._own
        match message:
            case Block() | Item():
                self._check_length(turn, ended=False)
                self._own = replace(own, confirmed=self._topology.next_place(place), reach=place + 1)
            case End():
                self._check_length(turn, ended=True)
                self._open.discard(turn.lane)
                self._own = replace(own, gap=place if own.gap is None else own.gap, ended=not self._open)
            case _:
                pass

    def _check_length(self, turn: Turn, ended: bool) -> None:
        """The other groups rely on the length that was worked out, and would wait for batches that never come."""
        length = self._lengths.get(turn.lane)
        if length is None or ended == (turn.number >= length):
            return
        found = f"ended after {turn.number}" if ended else f"goes on after {length}"
        raise DataError(
            f"lane {turn.lane} has {length} batches by the curriculum, and {found}; the other groups would not end where this one "
            "does. A dataset leaves rows out, or adds some, and its every_row does not say so: make that False, and give all "
            "ranks a place to agree, options(aggregate_dir=...), or end each group by itself (uneven='keep')"
        )


class DropStream(EvenStream):
    """Ends before the first step that not every group can fill."""

    _allowed = 0

    def pull(self) -> tuple[Turn, Message]:
        """The next message; StopIteration at the end."""
        while not self._stopped:
            if not self._local and not self._receive():
                break
            turn, message = self._local[0]
            if isinstance(message, (Block, Item)) and not self._may(self._topology.place(turn)):
                break
            return self._local.popleft()
        if not self._stopped and self._at_start and not self._allowed:
            _log.warning(
                "uneven='drop': no step that every group can fill, and nothing is delivered. Lanes are dealt whole chunks; "
                "give the curriculum smaller chunks (chunk_size) or fewer lanes (canonical_replicas), or set uneven='pad'"
            )
        self._stopped = True
        raise StopIteration

    def _may(self, place: int) -> bool:
        end = self._steps.end(place)
        if end <= self._allowed:
            return True
        while self._own.can_fill(end) is None and self._receive():
            pass
        if self._own.can_fill(end) is False or not self._agreement.wait(lambda known: known.can_fill(end)):
            return False
        self._allowed = end
        return True

    def rest(self) -> Iterator[tuple[Turn, Message]]:
        """What the engine still has in lanes that are longer than others."""
        if not self._stopped or self._over:
            return
        begun, said = time.monotonic(), False
        while self._local or self._receive():
            yield self._local.popleft()
            if not said and time.monotonic() - begun > 5:
                said = True
                _log.info("the stream has ended at the last step that every group can fill; counting what is left over")


class PadStream(EvenStream):
    """Ends after the last step that holds a batch of any group; masked batches take the place of those that lack."""

    def __init__(
        self,
        take: Take,
        topology: Topology,
        position: int,
        steps: Steps,
        agreement: Agreement,
        lengths: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(take, topology, position, steps, agreement, lengths)
        self._turns = topology.turns(position)
        self._turn = next(self._turns)
        self._ended: dict[int, Block | Item | None] = {}
        self._latest: Block | None = None

    def pull(self) -> tuple[Turn, Message]:
        """The next message, or a masked batch in this group's turn; StopIteration at the end."""
        while not self._stopped:
            turn = self._turn
            if turn.lane in self._ended:
                if turn.mine and not self._padded(self._topology.place(turn)):
                    break
                self._turn = next(self._turns)
                if turn.mine:
                    return turn, self._mask(turn.lane)
                continue
            if not self._local and not self._receive():
                break
            return self._passed(*self._local.popleft())
        self._stopped = True
        raise StopIteration

    def put_back(self, turn: Turn, message: Message) -> None:
        """Undo a `pull`, also of a masked batch."""
        if isinstance(message, End):
            del self._ended[turn.lane]
        if isinstance(message, (Block, Item)):
            rest, self._turns = self._turns, iter(())
            self._turns = _chain(self._turn, rest)
            self._turn = turn
            if is_masked(message):
                return
        super().put_back(turn, message)

    def _passed(self, turn: Turn, message: Message) -> tuple[Turn, Message]:
        match message:
            case End():
                self._ended[turn.lane] = message.last
            case Block() | Item():
                self._turn = next(self._turns)
                if isinstance(message, Block):
                    self._latest = message
            case _:
                pass
        return turn, message

    def _padded(self, place: int) -> bool:
        begin = self._steps.begin(place)
        while self._own.goes_on(begin) is None and self._receive():
            pass
        return self._own.goes_on(begin) is True or self._agreement.wait(lambda known: known.goes_on(begin))

    def _mask(self, lane: int) -> Block:
        last = self._ended[lane]
        candidates = [last, *self._ended.values(), self._latest]
        found = next((block for block in candidates if isinstance(block, Block)), None)
        if found is None:
            raise DataError(
                f"uneven='pad': lane {lane} holds not a single batch that could be repeated with its labels masked; give the "
                "curriculum fewer lanes (canonical_replicas) or smaller chunks, or set uneven='drop'"
            )
        return masked(found, lane)


def _chain(first: Turn, rest: Iterator[Turn]) -> Iterator[Turn]:
    yield first
    yield from rest


def masked(block: Block, lane: int) -> Block:
    """A batch of the same shape whose rows are padding all over: no label counts, and no sample is in it."""
    columns: dict[str, Any] = dict(block.as_columns())
    name = find_tokens_field(columns)
    lengths = None if name is None else column_lengths(columns[name], len(block))
    if lengths is not None:
        columns[PADDING] = lengths.astype(np.int32)
    nobody = Origin(np.empty((0, block.origin.ids.shape[1]), np.int64), np.zeros(len(block) + 1, np.int64), _NO_SPANS)
    return Block(lane, nobody, columns)


_NO_SPANS = np.empty((0, 2), np.int64)


def is_masked(message: Message) -> bool:
    """Whether this is a batch that only fills a step."""
    if not isinstance(message, Block):
        return False
    origin = message.origin
    return origin.rows is not None and not len(origin.ids) and len(origin) > 0


def is_delivery(message: Message) -> bool:
    """Whether this is a batch or record at all."""
    return not isinstance(message, (Cut, End))

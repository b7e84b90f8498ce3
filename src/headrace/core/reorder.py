"""Order, credit and retry, as two machines without threads, sockets or clocks.

`Window` answers "may I submit more, and what may the consumer have now". Results come back in any order and
in parts (a worker acknowledges a *prefix* of a batch), and leave in the order of their inputs. The key is the
index of an *input*, never of an output: a step may yield zero or many outputs, and counting inputs is the one
count that stays right for all of them.

`Dispatch` answers "which worker gets what, and what now that this one is dead". It holds every input until
that input is acknowledged, so a death costs a re-run of at most the unacknowledged part.

Contract, kept by both: if the code differs from the following, the code is wrong.

* Every input that was submitted is released exactly once: with outputs (perhaps none) or with its error.
* In ordered mode releases leave in input order, and an error leaves at its input's place.
* At most `limit` submissions are outstanding; a submission gives its credit back when the consumer took the
  last of its inputs.
* A worker's death is held against the one input it was busy with. Others are run again without blame; the
  culprit is run again `max_retries` times and is then given up. A worker that dies before it has loaded its
  function blames nobody, and a seat on which that happens again and again is barren.
* Inputs whose owner has dropped them are not given to a worker any more, whatever becomes of the one that holds them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from headrace.errors import InternalError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Release(Generic[T]):
    """`count` inputs from `index` on are done; these are their outputs."""

    index: int
    count: int
    outputs: Sequence[T]


@dataclass(frozen=True, slots=True)
class Stop:
    """Input `index` failed with `error`; it counts as one input."""

    index: int
    error: Any
    count: int = 1


class Window(Generic[T]):
    """Puts finished inputs back in order and bounds how many are outstanding.

    >>> window = Window(limit=2)
    >>> first, second = window.submit(), window.submit()
    >>> window.room
    0
    >>> window.finished(second, 0, 1, ["b"]); window.take() is None
    True
    >>> window.finished(first, 0, 1, ["a"]); window.take().outputs, window.take().outputs
    (['a'], ['b'])
    >>> window.room
    2
    """

    def __init__(self, limit: int, *, ordered: bool = True) -> None:
        """Allow `limit` submissions at a time; `ordered=False` releases as finished."""
        self.limit = limit
        self.ordered = ordered
        self.submitted = 0
        self.taken = 0
        self._next = 0  # the lowest input that was not released
        self._open: dict[int, int] = {}  # first input of a submission -> its inputs not yet taken
        self._waiting: dict[int, tuple[int, Release[T] | Stop]] = {}
        self._ready: deque[tuple[int, Release[T] | Stop]] = deque()

    @property
    def room(self) -> int:
        """How many submissions may be made now (never negative)."""
        return max(0, self.limit - len(self._open))

    @property
    def idle(self) -> bool:
        """Whether everything submitted was taken."""
        return not self._open

    def __len__(self) -> int:
        """Submissions that are outstanding."""
        return len(self._open)

    def submit(self, count: int = 1) -> int:
        """Enter one submission of `count` inputs; returns the index of its first input."""
        first = self.submitted
        self.submitted += count
        self._open[first] = count
        return first

    def retract(self, count: int) -> None:
        """Take back the last `count` inputs of the newest submission: nobody has begun them, and nobody will."""
        first = next(reversed(self._open))
        self._open[first] -= count
        self.submitted -= count
        if not self._open[first]:
            del self._open[first]

    def finished(self, first: int, start: int, count: int, outputs: Sequence[T]) -> None:
        """Inputs `start .. start + count` of the submission that began at `first` are done."""
        self._enter(first, Release(first + start, count, outputs))

    def failed(self, first: int, start: int, error: Any) -> None:
        """Input `start` of the submission that began at `first` has failed for good."""
        self._enter(first, Stop(first + start, error))

    def take(self) -> Release[T] | Stop | None:
        """What the consumer gets next, or None if nothing may leave yet."""
        if not self._ready:
            return None
        first, out = self._ready.popleft()
        self.taken += out.count
        left = self._open[first] - out.count
        if left:
            self._open[first] = left
        else:
            del self._open[first]
        return out

    def _enter(self, first: int, part: Release[T] | Stop) -> None:
        index = part.index
        if first not in self._open or (self.ordered and index < self._next) or index in self._waiting:
            raise InternalError(f"input {index} was acknowledged twice")
        if not self.ordered:
            self._ready.append((first, part))
            return
        self._waiting[index] = (first, part)
        while (entry := self._waiting.pop(self._next, None)) is not None:
            self._ready.append(entry)
            self._next += entry[1].count


@dataclass(slots=True)
class Batch:
    """Inputs that travel together. `key` is the owner's name for them and comes back with each result.

    `items` is a sequence, or bytes that only a worker can read (`count` says how many items are in them).
    `first` is the index of the first item in the whole input, `item_bytes` what an item weighed when it was sent.
    Only workers of `group` may run the batch, and only `worker` if it is given.
    """

    key: Any
    items: Any
    count: int
    first: int = 0
    group: int = 0
    worker: int | None = None
    item_bytes: float = 0.0
    dropped: bool = False  # nobody wants it any more


@dataclass(slots=True)
class Piece:
    """The part `start .. stop` of a batch: what is sent, acknowledged, handed back and retried."""

    batch: Batch
    start: int
    stop: int

    def __len__(self) -> int:
        """Number of inputs."""
        return self.stop - self.start


@dataclass(slots=True)
class GiveUp:
    """Input `start` of `batch` was being worked on in `attempts` deaths: it is not tried again."""

    batch: Batch
    start: int
    attempts: int


@dataclass(slots=True)
class _Seat:
    """One worker: the pieces sent to it, oldest first, and the batches that only it may run."""

    group: int
    held: deque[Piece] = field(default_factory=deque)
    bound: deque[Piece] = field(default_factory=deque)
    barren: int = 0  # workers in a row that died before they could begin


@dataclass(slots=True)
class _Group:
    """Workers that run the same function, and what waits for any of them."""

    workers: range
    depth: int
    pending: deque[Piece] = field(default_factory=deque)
    most: int | None = None


class Dispatch:
    """Gives pieces to workers, oldest input first, to the least loaded; takes back what a death left."""

    def __init__(self, workers: Sequence[int], *, depth: int = 2, max_retries: int = 2) -> None:
        """`workers` in each group; `depth` pieces may be with a worker: one in work and the others on the way."""
        self.max_retries = max_retries
        self.retries = 0
        self._seats: list[_Seat] = []
        self._groups: list[_Group] = []
        for group, count in enumerate(workers):
            self._groups.append(_Group(range(len(self._seats), len(self._seats) + count), depth))
            self._seats.extend(_Seat(group) for _ in range(count))
        self._deaths: dict[tuple[Hashable, int], int] = {}

    @property
    def busy(self) -> bool:
        """Whether any input is pending or with a worker."""
        return any(group.pending for group in self._groups) or any(seat.held or seat.bound for seat in self._seats)

    def free(self, group: int = 0) -> int:
        """Batches that workers of this group could take at once."""
        members = self._groups[group]
        seats = (self._seats[worker] for worker in members.workers)
        room = sum(max(0, members.depth - len(seat.held)) - len(seat.bound) for seat in seats)
        return max(0, room - len(members.pending))

    def set_pace(self, worker: int, depth: int) -> None:
        """How many pieces workers of this one's group may hold from now on."""
        self._groups[self._seats[worker].group].depth = depth

    def set_limit(self, group: int, most: int | None) -> None:
        """How many inputs a piece of this group may have from now on."""
        self._groups[group].most = most

    def holds(self, worker: int) -> list[Piece]:
        """Pieces that this worker holds, oldest first."""
        return list(self._seats[worker].held)

    def submit(self, batch: Batch) -> None:
        """Take a batch in; `assign` hands it out."""
        self._queue(batch).append(Piece(batch, 0, batch.count))

    def assign(self, most: int | None = None) -> tuple[int, Piece] | None:
        """The next piece to send and the worker to send it to, or None; `most` inputs at once."""
        for worker, seat in enumerate(self._seats):
            members = self._groups[seat.group]
            if seat.bound and len(seat.held) < members.depth:
                return worker, self._cut(seat.bound, seat, most or members.most)
        for members in self._groups:
            if not members.pending:
                continue
            worker = min(members.workers, key=lambda w: len(self._seats[w].held))
            seat = self._seats[worker]
            if len(seat.held) < members.depth:
                return worker, self._cut(members.pending, seat, most or members.most)
        return None

    def acknowledged(self, worker: int, count: int, *, last: bool) -> tuple[Batch, int]:
        """`count` more inputs of the worker's oldest piece are done; returns their batch and start.

        `last` says that the worker is through with the piece. What it left undone goes to the front of the
        queue, for whoever is free.
        """
        seat = self._seats[worker]
        piece = seat.held[0]
        start = piece.start
        piece.start += count
        for index in range(start, piece.start) if self._deaths else ():
            self._deaths.pop((piece.batch.key, index), None)
        if last:
            seat.held.popleft()
            if piece and not piece.batch.dropped:
                self._queue(piece.batch).appendleft(piece)
        elif not piece:
            raise InternalError("a worker acknowledged a whole piece and still holds it")
        return piece.batch, start

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Forget the batches whose key is `unwanted`; those that workers hold are marked, and not tried again."""
        for queue in (*(group.pending for group in self._groups), *(seat.bound for seat in self._seats)):
            kept = [piece for piece in queue if not unwanted(piece.batch.key)]
            queue.clear()
            queue.extend(kept)
        for seat in self._seats:
            for piece in seat.held:
                piece.batch.dropped = piece.batch.dropped or unwanted(piece.batch.key)
        self._deaths = {place: deaths for place, deaths in self._deaths.items() if not unwanted(place[0])}

    def withdraw(self, worker: int, *, drop: bool = False) -> Piece:
        """Take back the piece that was assigned last, before it was sent: it is pending again, or dropped."""
        piece = self._seats[worker].held.pop()
        if not drop:
            self._queue(piece.batch).appendleft(piece)
        return piece

    def died(self, worker: int, begun: int | None, *, retry: bool = True, with_memory: bool = False) -> list[GiveUp]:
        """The worker is gone. `begun` inputs were started since its last acknowledgement (0: between items).

        Everything it held is pending again, except an input that has now been in work at more than
        `max_retries` deaths (or at this one, with `retry=False`). `begun=None`: no input is to blame, because the worker
        had not loaded its function yet. `with_memory`: the inputs that it did before this one and did not acknowledge are given
        up as well, for another worker would do them without what it remembered; the input in work is the last of the list.
        """
        seat = self._seats[worker]
        seat.barren = seat.barren + 1 if begun is None else 0
        given_up: list[GiveUp] = []
        pieces = list(seat.held)
        seat.held.clear()
        if pieces and begun is not None and not pieces[0].batch.dropped:
            piece = pieces.pop(0)
            culprit = min(piece.start + max(begun - 1, 0), piece.stop - 1)
            attempts = self._deaths.get((piece.batch.key, culprit), 0) + 1
            if retry and attempts <= self.max_retries:
                self._deaths[piece.batch.key, culprit] = attempts
                self.retries += 1
                pieces.insert(0, piece)
            else:
                self._deaths.pop((piece.batch.key, culprit), None)
                first = piece.start if with_memory else culprit
                given_up += [GiveUp(piece.batch, index, attempts) for index in range(first, culprit + 1)]
                around = (Piece(piece.batch, piece.start, first), Piece(piece.batch, culprit + 1, piece.stop))
                pieces[:0] = [part for part in around if part]
        for piece in reversed(pieces):
            if not piece.batch.dropped:
                self._queue(piece.batch).appendleft(piece)
        return given_up

    def barren(self, worker: int) -> bool:
        """Whether workers on this seat died again and again before they could begin: they cannot even start."""
        return self._seats[worker].barren > self.max_retries + 1

    def _queue(self, batch: Batch) -> deque[Piece]:
        if batch.worker is not None:
            return self._seats[batch.worker].bound
        return self._groups[batch.group].pending

    def _cut(self, queue: deque[Piece], seat: _Seat, most: int | None) -> Piece:
        piece = queue.popleft()
        if most is not None and len(piece) > most:
            queue.appendleft(Piece(piece.batch, piece.start + most, piece.stop))
            piece = Piece(piece.batch, piece.start, piece.start + most)
        seat.held.append(piece)
        return piece

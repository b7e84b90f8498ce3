"""The process executor: one duplex socket and one slab per worker, one event loop in the parent.

No shared queue, lock, feeder thread or manager: each of those lost items or dead-locked when a worker was killed
in the trials. The parent never blocks on a write, so a worker that wants to deliver a large result cannot wait for a
parent that wants to hand it a large input. A worker's death is the end of its stream; its wait status says how, and
two words in shared memory say at which item.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from headrace.core.reorder import Batch, Dispatch, GiveUp, Piece
from headrace.errors import WorkerDied
from headrace.run import spawn, supervise, wire
from headrace.run.executor import ExecutorConfig, Part, WorkerStatistics
from headrace.run.failure import Failure, shorten, unpack
from headrace.run.shm import KEEP_MEMORY_LOADS, Recycler
from headrace.run.task import DROPPED, DROPPED_BITS, RUNNING, STARTED, depth

_DEEP = 5.0
_TICK = 0.05  # seconds between two looks at the clock of a running item, where items have a time limit
_LEAVE = 0.5  # seconds that a thread that waits for results may take to leave once the executor is stopped


class ProcessExecutor:
    """Runs batches in worker processes. Not thread-safe: one thread submits and asks for results."""

    def __init__(self, config: ExecutorConfig) -> None:
        """Start the workers; they load the function while the parent goes on."""
        self._config = config
        self._dispatch = Dispatch([group.workers for group in config.groups], max_retries=config.max_retries)
        self._parts: list[Part] = []
        self._recycler = Recycler()
        self._selector = selectors.DefaultSelector()
        self._children: list[supervise.Child] = []
        self._begun: list[int] = [0] * len(config.seats)  # inputs acknowledged by each worker since it was born
        self._seen: list[tuple[int, float]] = [(0, 0.0)] * len(config.seats)
        self._stats = WorkerStatistics()
        self._fatal: BaseException | None = None
        self._lost: WorkerDied | None = None  # to be raised once
        self._least = (
            2.0  # pieces a worker may hold: more when workers run dry, as they do where this process must wait
        )
        self._singly = 0  # inputs to be sent one by one, because one of them cannot be pickled
        self._watched: dict[Any, Callable[[], bool]] = {}
        self._woken = self._ready = False
        self._bell: tuple[socket.socket, socket.socket] = socket.socketpair()
        self._inside = threading.RLock()  # held while waiting for results: a closed selector wakes nobody
        self._owner = os.getpid()
        self._starter = spawn.starter(len(config.seats), config.start_method)
        self._shut = weakref.finalize(
            self, _close, self._children, self._starter, self._selector, self._bell, self._owner
        )
        for end in self._bell:
            end.setblocking(False)
        self._selector.register(self._bell[0], selectors.EVENT_READ, self._answer)
        try:
            self._factories = {id(factory): wire.dumps(factory) for factory in config.seats}  # a server boots meanwhile
            for index in range(len(config.seats)):
                self._children.append(self._start(index))
        except BaseException:  # whatever it is, nothing stays open
            self.close()
            raise

    @property
    def starter(self) -> spawn.Starter:
        """What starts its workers, for others that belong to the same pipeline."""
        return self._starter

    @property
    def background(self) -> bool:
        """Processes work while nobody calls."""
        return True

    def ready(self) -> bool:
        """Whether a worker has loaded its function. Looks, and does not wait."""
        if not self._ready:
            self._poll(0.0)
            self._check()
        return self._ready

    def free(self, group: int = 0) -> int:
        """Batches that workers of this group could take at once."""
        return self._dispatch.free(group)

    def set_limit(self, group: int, most: int | None) -> None:
        """Inputs a message, also for what comes back from slow batches."""
        self._dispatch.set_limit(group, most)

    def watch(self, source: Any, ready: Callable[[], bool] | None) -> None:
        """Call `ready` when the socket `source` can be read; it says whether `completed` is to return."""
        if source in self._watched:
            self._selector.unregister(source)
            del self._watched[source]
        if ready is not None:
            self._selector.register(source, selectors.EVENT_READ, ready)
            self._watched[source] = ready

    def wake(self) -> None:
        """Make a waiting `completed` return; any thread and any signal handler may call it."""
        with contextlib.suppress(OSError):  # it is full of rings already, or closed
            self._bell[1].send(b"x")

    def _answer(self) -> bool:
        self._bell[0].recv(4096)
        return True

    def submit(self, batch: Batch) -> None:
        """Take a batch; it is sent as soon as a worker has room."""
        self._check()
        self._dispatch.submit(batch)
        self._send()

    def completed(self, timeout: float | None = None) -> list[Part]:
        """What has finished, waiting for at most `timeout` seconds if nothing has (None: as long as it takes)."""
        with self._inside:
            return self._completed(timeout)

    def _completed(self, timeout: float | None) -> list[Part]:
        self._check()
        self._send()
        deadline = None if timeout is None else time.monotonic() + timeout
        self._woken = False
        while True:
            idle = not self._dispatch.busy and not self._watched
            wait = 0.0 if self._parts or self._woken or idle else _until(deadline)
            if self._config.timeout is not None and (wait is None or wait > _TICK):
                wait = _TICK
            self._poll(wait)
            self._check()
            idle = not self._dispatch.busy and not self._watched
            if self._parts or self._woken or idle or (deadline is not None and time.monotonic() >= deadline):
                parts, self._parts = self._parts, []
                return parts

    def abandon(self, owner: Any) -> None:
        """Run nothing more of this owner's batches: workers pass over those that were sent already."""
        self._dispatch.drop(lambda key: key[0] is owner)
        for child in self._children:
            self._mark(child)

    def _mark(self, child: supervise.Child) -> None:
        """Tell a worker which of the pieces that it holds nobody wants."""
        bits = 0
        for number, piece in enumerate(self._dispatch.holds(child.index), child.answered):
            bits |= piece.batch.dropped << number % DROPPED_BITS
        child.arena.words[DROPPED] = bits

    def statistics(self) -> WorkerStatistics:
        """Counts since the start."""
        hits = [child.slab for child in self._children if child.slab is not None]
        self._stats.retries = self._dispatch.retries
        self._stats.slab_hits = sum(slab.hits for slab in hits)
        self._stats.slab_misses = sum(slab.misses for slab in hits)
        return self._stats

    def stop(self) -> None:
        """Begin nothing more, and make whoever waits for results raise."""
        self._fatal = self._fatal or RuntimeError(f"{self._config.name}: the executor is closed")
        if self._shut.alive and os.getpid() == self._owner:  # a fork has the parent's bell, and nobody who waits
            self.wake()

    def ending(self, began: float) -> Iterator[None]:
        """`close` in steps; see the shutdown contract in `supervise`."""
        self.stop()
        if self._inside.acquire(timeout=max(0.0, began + _LEAVE - time.monotonic())):
            self._inside.release()
        try:
            yield from supervise.ending(self._children, self._owner, began)
        finally:
            self._shut()

    def close(self) -> None:
        """End every worker."""
        for _ in self.ending(time.monotonic()):
            pass

    # -- the event loop ---------------------------------------------------------------------------------------

    def _poll(self, wait: float | None) -> None:
        events = self._selector.select(wait)
        for key, mask in events:
            if not isinstance(key.data, supervise.Child):
                self._woken = key.data() or self._woken
                continue
            child = key.data
            if self._children[child.index] is not child:
                continue
            if mask & selectors.EVENT_WRITE and supervise.send_some(child):
                self._selector.modify(child.sock, selectors.EVENT_READ, child)
            if mask & selectors.EVENT_READ:
                alive = supervise.read_frames(child, lambda frame, child=child: self._handle(child, frame))
                if not alive and self._fatal is None:
                    self._bury(child)
        if self._config.timeout is not None:
            self._watch_clock(self._config.timeout)
        self._send()

    def _send(self) -> None:
        while self._fatal is None:
            order = self._dispatch.assign(1 if self._singly else None)
            if order is None:
                return
            worker, piece = order
            self._singly = max(0, self._singly - len(piece))
            child = self._children[worker]
            batch = piece.batch
            packed = isinstance(batch.items, wire.Packed)
            begin = piece.start if packed else 0
            head = wire.Head(wire.ITEMS, 0, begin, len(piece), batch.first + piece.start - begin)
            items = batch.items
            if not packed and len(piece) < batch.count:
                items = items[piece.start : piece.stop]
            try:
                parts = wire.encode(head, items, child.slab)
            except Exception as error:  # noqa: BLE001 (whatever pickling a user's item raises)
                self._unsendable(worker, piece, error)
                continue
            nbytes = wire.frame_bytes(parts)
            batch.item_bytes = nbytes / (batch.count if packed else len(piece))
            self._stats.bytes_out += nbytes
            self._stats.batches += 1
            if not supervise.post(child, parts):
                self._selector.modify(child.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, child)

    def _unsendable(self, worker: int, piece: Piece, error: Exception) -> None:
        """Something in this piece cannot be pickled: its items are sent one by one, and the culprit fails alone."""
        if len(piece) > 1:
            self._singly = len(piece)
            self._dispatch.withdraw(worker)
            return
        self._dispatch.withdraw(worker, drop=True)
        error.add_note("headrace: the item cannot be pickled, so it cannot be sent to a worker process")
        failure = Failure(error, self._config.name, self._describe(piece.batch, piece.start))
        self._parts.append(Part(piece.batch.key, piece.start, 1, [], failure))

    # -- what workers say -------------------------------------------------------------------------------------

    def _handle(self, child: supervise.Child, frame: wire.Frame) -> None:
        if frame.kind == wire.FAILED_START:
            self._fatal = unpack(frame.decode()).raised()
            return
        if frame.kind == wire.READY:
            self._ready = child.ready = True
            return
        unread = False
        try:
            values, ends, packed, report = frame.decode()
        except Exception:  # noqa: BLE001 (a user's class that unpickles in the worker and not here; told item by item)
            values, ends, packed, report = frame.salvage()
            unread = True
        batch, start = self._dispatch.acknowledged(child.index, frame.a, last=bool(frame.flags & wire.LAST))
        if frame.flags & wire.LAST:
            child.answered += 1
            if child.arena.words[DROPPED]:
                self._mark(child)
        if not frame.a:
            return
        self._begun[child.index] += frame.a
        self._stats.bytes_in += frame.nbytes
        self._stats.busy += frame.seconds
        self._stats.items += frame.a
        failure = None
        if packed is not None:
            failure = unpack(packed)
            failure.worker = child.name
            failure.item = self._describe(batch, start + frame.a - 1) or failure.item
        nbytes = int(max(frame.nbytes, batch.item_bytes * frame.a))
        part = Part(batch.key, start, frame.a, values, failure, frame.seconds, nbytes, report)
        dry = not self._dispatch.holds(child.index)
        self._least = min(_DEEP, self._least + 1.0) if dry else max(2.0, self._least - 0.01)
        self._dispatch.set_pace(child.index, depth(frame.seconds, frame.a, int(self._least)))
        if unread:
            from headrace.run.salvage import readable  # only a failure pays for it

            self._parts.extend(readable(part, ends, child.name, lambda index: self._describe(batch, index)))
        else:
            self._parts.append(part)

    def _bury(self, child: supervise.Child) -> None:
        """A worker's stream has ended and we did not end it."""
        self._selector.unregister(child.sock)
        worker = child.index
        begun = self._blamed(child)
        how = supervise.how_it_ended(child)
        self._stats.deaths += 1
        held = [
            self._describe(piece.batch, index)
            for piece in self._dispatch.holds(worker)
            for index in range(piece.start, min(piece.stop, piece.start + 8))
        ]
        late = child.reason == "timeout"
        kept = not self._config.hand_back  # what it remembered of items counts: their owner must be told
        lost = self._dispatch.died(worker, begun, retry=not late, with_memory=kept)
        if lost:
            failure = self._too_late(lost[-1]) if late else self._died(child, lost[-1], how, held)
            self._parts.extend(Part(each.batch.key, each.start, 1, [], failure) for each in lost)
        elif kept and self._begun[worker]:
            self._lost = WorkerDied(
                f"{self._config.name}: {child.name} {how} between items, and what it remembered is gone"
            )
        if self._dispatch.barren(worker):
            self._fatal = WorkerDied(
                f"{self._config.name}: {child.name} {how}, as did those before it, before it could begin. "
                "Look at its output above, or run with the inline runner."
            )
            return
        self._children[worker] = self._start(worker)

    def _blamed(self, child: supervise.Child) -> int | None:
        """Items begun and not acknowledged, the last of which its death is held against; None: no item is to blame."""
        started = child.arena.words[STARTED]
        begun = started - self._begun[child.index]
        if not child.ready:
            return None
        if child.reason == "timeout" and (not begun or started != self._seen[child.index][0]):
            return None  # the item was done after all, between the look at the clock and the end
        return begun

    def _died(self, child: supervise.Child, given_up: GiveUp, how: str, held: list[str]) -> Failure:
        item = self._describe(given_up.batch, given_up.start)
        others = [text for text in held if text and text != item]
        rest = f"; it also held {', '.join(others[:7])}" if others else ""
        place = f"{given_up.batch.first + given_up.start} ({item})" if self._config.hand_back else item
        error = WorkerDied(
            f"{self._config.name}: {child.name} {how} while working on item {place}, after {given_up.attempts} attempts{rest}"
        )
        return Failure(error, self._config.name, item, worker=child.name, died=True)

    def _too_late(self, given_up: GiveUp) -> Failure:
        item = self._describe(given_up.batch, given_up.start)
        error = TimeoutError(
            f"{self._config.name}: item {item} took longer than {self._config.timeout} s; its worker was replaced"
        )
        return Failure(error, self._config.name, item, died=True)

    def _watch_clock(self, limit: float) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.reason:
                continue
            words = child.arena.words
            count = words[STARTED]
            seen, since = self._seen[child.index]
            if count != seen or not words[RUNNING]:
                self._seen[child.index] = (count, now)
            elif now - since > limit:
                child.reason = "timeout"
                child.process.kill()

    # -- small things -----------------------------------------------------------------------------------------

    def _start(self, index: int) -> supervise.Child:
        config = self._config
        factory = self._factories[id(config.seats[index])]
        child = supervise.start_child(
            index,
            None if config.zero_copy else self._recycler,
            config.slab_bytes,
            self._starter,
            (*config.modules, *([KEEP_MEMORY_LOADS] * config.keep_memory), *spawn.modules_to_read(factory)),
        )
        self._begun[index] = 0
        self._seen[index] = (0, time.monotonic())
        settings = {
            "factory": factory,
            "hand_back": config.hand_back,
            "name": config.name,
            "keep_memory": config.keep_memory,
        }
        events = selectors.EVENT_READ
        if not supervise.post(child, wire.encode(wire.Head(wire.INIT), settings, None)):
            events |= selectors.EVENT_WRITE
        self._selector.register(child.sock, events, child)
        return child

    def _describe(self, batch: Batch, index: int) -> str:
        items = batch.items
        if isinstance(items, wire.Packed):
            items = items.decode_apart()
        return self._config.describe(items[index]) if self._config.describe else shorten(items[index])

    def _check(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if self._lost is not None:
            error, self._lost = self._lost, None
            raise error


def _until(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _close(
    children: list[supervise.Child],
    starter: spawn.Starter,
    selector: selectors.BaseSelector,
    bell: tuple[socket.socket, socket.socket],
    owner: int,
) -> None:
    selector.close()
    for end in bell:
        end.close()
    supervise.stop_children(children, owner)
    starter.close(owner)

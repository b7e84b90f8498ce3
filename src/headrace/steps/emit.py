"""Emitters: readers in processes of their own, which know nothing of workers, for a pipeline that knows nothing of files.

A reader is any iterable that can be pickled. Its emitter sends messages of items; the parent passes them on to workers
as they are, without reading them. An emitter that gets too far ahead is simply not read from, so its own socket stops
it. Its last message says how many items it sent: a reader that was killed is an error, never an early end.

Order (with `ordered=True`): items of one reader keep their order, and readers take turns of `BLOCK` items in the order
in which they were given, whatever their speed. So the sequence is a function of the readers alone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import ConfigError, InternalError, WorkerDied
from headrace.run import spawn, supervise, wire
from headrace.run.executor import Paced
from headrace.run.failure import from_exception, unpack
from headrace.run.shm import Recycler
from headrace.steps.batching import THREADS_MOST, BatchSize
from headrace.steps.emission import BLOCK, Emission, batches
from headrace.steps.source import IterableSource, Pulled

if TYPE_CHECKING:
    from headrace.steps.pipeline import Pipeline

_AHEAD = 4  # messages of an emitter that wait in the parent
_LEAVE = 0.5  # seconds that emitter threads may take to leave, all together; the workers' own follow


def emit(readers: Iterable[Any], pipeline: Pipeline, *, seed: int | None = None) -> None:
    """Start one emitter for each reader; iterate over `pipeline` for the outputs.

    With the process runner an emitter is a process, with the thread runner a thread, and inline the readers are read in
    turn by the consumer. `seed` shuffles the order of the readers.
    """
    chosen = list(readers)
    if isinstance(readers, (str, bytes)) or not all(hasattr(reader, "__iter__") for reader in chosen):
        raise ConfigError("emit() takes a list of readers: iterables, such as FileReader(path, pos, num_lines)")
    if seed is not None:
        random.Random(seed).shuffle(chosen)
    pipeline.attach(lambda executor, kind: EmitterSource(executor, kind, chosen, ordered=pipeline.settings.ordered))


class Port(Protocol):
    """One emitter as the source sees it."""

    error: BaseException | None

    @property
    def ended(self) -> bool:
        """Whether it has ended and all it sent was pulled."""
        ...

    def next(self, most: int) -> Pulled | None:
        """The next message, or None if none is here."""
        ...

    @staticmethod
    def close_all(ports: Sequence[Any]) -> None:
        """End several of its kind at once: those that do not want to take their time together."""
        ...


class EmitterSource:
    """Takes turns among emitters."""

    def __init__(self, executor: Paced, kind: str, readers: Sequence[Any], *, ordered: bool) -> None:
        """Start the emitters."""
        self._ordered = ordered
        self._turn = 0
        self._in_turn = 0
        self.error: BaseException | None = None
        self._kind: Any = {"process": ProcessPort, "threads": ThreadPort, "inline": InlinePort}[kind]
        self._all: list[Port] = []
        try:
            for number, reader in enumerate(readers):
                self._all.append(self._kind(number, reader, executor))
        except BaseException:  # whatever it is, nothing keeps running
            self._kind.close_all(self._all)
            raise
        self._ports = list(self._all)

    @property
    def ended(self) -> bool:
        """Whether every emitter has ended and all it sent was pulled (or one has failed)."""
        while self._ports and self.error is None and (port := self._ports[self._turn]).ended:
            self._leave(port)
        return not self._ports or self.error is not None

    def pull(self, most: int) -> Pulled | None:
        """The next message by the rule of turns; `most` is a wish that an emitter need not know of."""
        for _ in range(len(self._ports)):
            if self.ended:
                return None
            port = self._ports[self._turn]
            pulled = port.next(min(most, BLOCK - self._in_turn))
            if pulled is not None:
                self._in_turn += pulled.count
                if self._in_turn >= BLOCK or not self._ordered:
                    self._pass_turn()
                return pulled
            if self._ordered and not port.ended:
                return None
            if not self._ordered:
                self._pass_turn()
        return None

    def close(self) -> None:
        """End all emitters."""
        self._kind.close_all(self._all)
        self._ports.clear()

    def _pass_turn(self) -> None:
        self._turn = (self._turn + 1) % max(1, len(self._ports))
        self._in_turn = 0

    def _leave(self, port: Port) -> None:
        """An emitter has ended: the next one takes over its turn."""
        if port.error is not None:
            self.error = port.error
            return
        self._ports.pop(self._turn)
        self._turn %= max(1, len(self._ports))
        self._in_turn = 0


class ProcessPort:
    """A reader in a process of its own."""

    def __init__(self, number: int, reader: Any, executor: Paced) -> None:
        """Start the process, as the workers were, and let it read."""
        from headrace.run.process import ProcessExecutor

        assert isinstance(executor, ProcessExecutor)
        self._executor = executor
        self._messages: deque[Pulled] = deque()
        self._number = number
        self._received = 0
        self._watched = False
        self._done = False
        self.error: BaseException | None = None
        factory = wire.dumps(Emission(reader))
        self._owner = os.getpid()
        self._child = child = supervise.start_child(
            number, Recycler(), starter=executor.starter, modules=spawn.modules_to_read(factory)
        )
        self._shut = weakref.finalize(self, supervise.stop_children, [child], self._owner)
        settings = {
            "factory": factory,
            "hand_back": True,
            "name": f"emitter {number}",
            "keep_memory": False,
        }
        child.sock.setblocking(True)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dead; reading says so
            wire.send(child.sock, wire.encode(wire.Head(wire.INIT), settings, None))
            wire.send(child.sock, wire.encode(wire.Head(wire.EMIT), None, None))
        child.sock.setblocking(False)
        self._watch(True)

    @property
    def ended(self) -> bool:
        """Whether it has said so and all it sent was pulled."""
        return self._done and not self._messages

    def next(self, most: int) -> Pulled | None:
        """The oldest message."""
        del most
        if not self._messages:
            return None
        pulled = self._messages.popleft()
        if not self._done and len(self._messages) < _AHEAD:
            self._watch(True)
        return pulled

    @staticmethod
    def close_all(ports: Sequence[ProcessPort]) -> None:
        """End the processes."""
        for port in ports:
            port._watch(False)
            port._done = True
            port._messages.clear()
        open_ports = [port for port in ports if port._shut.detach() is not None]
        if open_ports:
            supervise.stop_children([port._child for port in open_ports], open_ports[0]._owner)

    def _watch(self, on: bool) -> None:
        if on != self._watched:
            self._watched = on
            self._executor.watch(self._child.sock, self._ready if on else None)

    def _ready(self) -> bool:
        """The process has sent something."""
        alive = supervise.read_frames(self._child, self._handle, most=1)
        if not alive and not self._done:
            how = supervise.how_it_ended(self._child) if self._watched else "ended"
            self._finish(
                WorkerDied(
                    f"emitter {self._number}: {self._child.name} {how} after {self._received} items; what its reader "
                    "had left was not read"
                )
            )
        elif len(self._messages) >= _AHEAD:
            self._watch(False)
        return True

    def _handle(self, frame: wire.Frame) -> None:
        if frame.kind == wire.ITEMS:
            message = wire.Packed(bytes(frame.body), frame.buffers)
            if frame.let_go is not None:
                frame.let_go()
            self._received += frame.b
            self._messages.append(Pulled(message, frame.b))
            return
        if frame.kind == wire.READY:
            return
        if frame.kind == wire.FAILED_START:
            self._finish(unpack(frame.decode()).raised())
            return
        sent, failure = frame.decode()
        error = unpack(failure).raised() if failure is not None else None
        if error is None and sent != self._received:
            error = InternalError(f"emitter {self._number} sent {sent} items and {self._received} arrived")
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        self.error = error
        self._watch(False)
        self._done = True
        self._child.sock.close()  # now it leaves; `close` collects it


class ThreadPort:
    """A reader in a thread."""

    def __init__(self, number: int, reader: Any, executor: Paced) -> None:
        """Start the thread."""
        self._executor = executor
        self._messages: queue.Queue[Pulled | None] = queue.Queue(_AHEAD)
        self._stop = threading.Event()
        self._done = False
        self.error: BaseException | None = None
        self._reader = reader
        executor.watch(self, bool)
        self._thread = threading.Thread(target=self._run, name=f"emitter-{number}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether it has ended and all it read was pulled."""
        return self._done

    def next(self, most: int) -> Pulled | None:
        """The oldest message."""
        del most
        try:
            pulled = self._messages.get_nowait()
        except queue.Empty:
            return None
        if pulled is None and not self._done:
            self._done = True
            self._executor.watch(self, None)
        return pulled

    @staticmethod
    def close_all(ports: Sequence[ThreadPort]) -> None:
        """Let every thread end at its next item; one that does not in time is left behind (a daemon)."""
        for port in ports:
            port._stop.set()
            while not port._messages.empty():
                port._messages.get_nowait()
            if not port._done:
                port._done = True
                port._executor.watch(port, None)
        deadline = time.monotonic() + _LEAVE
        for port in ports:
            port._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            size = BatchSize(most=THREADS_MOST)
            for items, seconds in batches(self._reader, size):
                size.observe(len(items), seconds, 0)
                self._put(Pulled(items, len(items)))
                if self._stop.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 (the reader's own; the consumer's thread raises it)
            self.error = from_exception(error, f"reader {self._reader!r}"[:200], None).error
        self._put(None)

    def _put(self, message: Pulled | None) -> None:
        while not self._stop.is_set():
            try:
                self._messages.put(message, timeout=0.1)
                break
            except queue.Full:
                continue
        self._executor.wake()


class InlinePort(IterableSource):
    """A reader that the consumer reads itself."""

    def __init__(self, number: int, reader: Any, executor: Paced) -> None:
        """Begin the iteration."""
        del number, executor
        super().__init__(reader)

    def next(self, most: int) -> Pulled | None:
        """Up to `most` items."""
        return self.pull(most)

    @staticmethod
    def close_all(ports: Sequence[InlinePort]) -> None:
        """Nothing runs: close generators."""
        for port in ports:
            port.close()

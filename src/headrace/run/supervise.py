"""Starts worker processes, notices when they end, and makes sure that none is left.

The shutdown contract (if the code differs from it, the code is wrong):

1. Closing starts by closing our end of every socket. An idle worker sees the end of the stream, runs the user's
   tear-down and leaves.
2. After `GRACE` seconds a worker that is still there gets SIGTERM, after `GRACE` more SIGKILL. A fork server that does
   not tell of its end within `ANSWER` seconds is killed itself. Nothing is left two seconds after closing began,
   whichever of them were stopped, hung or killed.
3. A worker whose parent dies, by whatever signal, is killed by the kernel (`worker.die_with_parent`).
4. Ctrl-C reaches the parent only. A fork of the parent never closes or kills the parent's workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headrace.run import spawn, wire
from headrace.run.shm import Arena, Recycler, SlabReader, SlabWriter, create_arena

GRACE = 0.6  # seconds between the end of the stream, SIGTERM and SIGKILL
ANSWER = 0.3  # seconds between SIGKILL and the news of the end, while closing
_PATIENCE = 2.0  # the same while work goes on: a busy server is not given up lightly
SLAB_BYTES = 64 * 1024 * 1024  # per worker and direction; pages exist from their first use on
_SOCKET_BYTES = 1 << 20


@dataclass(slots=True)
class Child:
    """A worker process as its parent sees it."""

    index: int
    process: spawn.Process
    sock: socket.socket
    lifeline: socket.socket
    arena: Arena
    slab: SlabWriter | None
    inbox: wire.Inbox
    outgoing: list[memoryview] = field(default_factory=list)
    incoming: bytearray = field(default_factory=lambda: bytearray(1 << 18))
    filled: int = 0
    answered: int = 0  # pieces that it is through with
    ready: bool = False  # it has loaded its function
    reason: str = ""  # why we killed it, if we did

    @property
    def name(self) -> str:
        """For messages."""
        return f"worker {self.index} (pid {self.process.pid})"


def start_child(
    index: int,
    recycler: Recycler | None,
    slab_bytes: int = SLAB_BYTES,
    starter: spawn.Starter | None = None,
    modules: Sequence[str] = (),
) -> Child:
    """Start a process that serves `worker.main` on a socket pair; `starter`: how, by default in an interpreter of its own.

    Large arrays that come back are copied into memory of `recycler`, or leased where they lie if there is none.
    `modules`: of ours, that it will load.
    """
    arena = create_arena(slab_bytes)
    ours, theirs = socket.socketpair()
    line, their_line = socket.socketpair()
    try:
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        fds = (theirs.fileno(), their_line.fileno(), arena.fd)
        process = (starter or spawn.Fresh()).start(fds, arena.pages, modules)
    except BaseException:  # whatever it is, nothing stays open
        for end in (ours, line):
            end.close()
        arena.close()
        raise
    finally:
        theirs.close()
        their_line.close()
    arena.close()
    ours.setblocking(False)
    reader = SlabReader(arena.slab(1)) if arena.pages else None
    writer = SlabWriter(arena.slab(0)) if arena.pages else None
    return Child(
        index,
        process,
        ours,
        line,
        arena,
        writer,
        wire.Inbox(reader, recycler.copy if recycler is not None else None, writable=False),
    )


def send_some(child: Child) -> bool:
    """Write what the socket takes; True when nothing is left to send."""
    while child.outgoing:
        try:
            sent = child.sock.sendmsg(child.outgoing[:512])
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            child.outgoing.clear()  # it is dead; reading will say so
            return True
        child.outgoing = wire.unsent(child.outgoing, sent)
    return True


def post(child: Child, parts: list[wire.Bytes]) -> bool:
    """Queue a frame and write what the socket takes; True when nothing is left to send."""
    child.outgoing.extend(memoryview(part).cast("B") for part in parts if len(part))
    return send_some(child)


def read_frames(child: Child, handle: Callable[[wire.Frame], None], *, most: int = 16) -> bool:
    """Handle the frames that have arrived; False when the worker's end is closed."""
    for _ in range(most):
        try:
            count = child.sock.recv_into(memoryview(child.incoming)[child.filled :])
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        if not count:
            return False
        child.filled += count
        full = child.filled == len(child.incoming)
        _parse_frames(child, handle)
        if not full:
            return True
    return True


def _parse_frames(child: Child, handle: Callable[[wire.Frame], None]) -> None:
    at = need = 0
    view = memoryview(child.incoming)
    while at < child.filled:
        got = wire.parse(view[at : child.filled], child.inbox)
        if isinstance(got, int):
            need = got
            break
        frame, length = got
        handle(frame)
        at += length
    left = child.filled - at
    if need > len(child.incoming):
        child.incoming = bytearray(need)
        child.incoming[:left] = view[at : child.filled]
    elif at:
        child.incoming[:left] = view[at : child.filled]
    child.filled = left


def how_it_ended(child: Child) -> str:
    """Wait for a worker whose socket is closed, and say how it ended."""
    try:
        code = child.process.wait(GRACE)
    except subprocess.TimeoutExpired:  # it closed the socket itself and hangs in its exit
        child.process.kill()
        try:
            code = child.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:  # its server hangs, and will be replaced
            spawn.force(child.process)
            code = child.process.wait()
    discard(child)
    if code == spawn.UNKNOWN:
        return "ended, as did the process that started it"
    if code >= 0:
        return f"ended with exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = "; the kernel kills this way when memory runs out" if -code == signal.SIGKILL and not child.reason else ""
    return f"was killed by {name} (signal {-code}{hint})"


def discard(child: Child) -> None:
    """Close our ends."""
    child.outgoing.clear()
    child.sock.close()
    child.lifeline.close()


def stop_children(children: Iterable[Child], owner: int) -> None:
    """The shutdown contract."""
    for _ in ending(children, owner, time.monotonic()):
        pass


def ending(children: Iterable[Child], owner: int, began: float) -> Iterator[None]:
    """The shutdown contract in steps, so that several pools can be closed at the same time; closing began at `began`.

    Only the process that started the workers may do it; a fork of it closes its copies.
    """
    rest = list(children)
    for child in rest:
        child.outgoing.clear()
        with contextlib.suppress(OSError):
            child.sock.close()
    if os.getpid() != owner:
        for child in rest:
            spawn.forget(child.process)
            child.lifeline.close()
        return
    yield
    rest = _still_there(rest, began + GRACE)
    for child in rest:
        child.process.terminate()
    yield
    rest = _still_there(rest, began + 2 * GRACE)
    for child in rest:
        child.process.kill()
    yield
    rest = _still_there(rest, began + 2 * GRACE + ANSWER)
    for child in rest:
        spawn.force(child.process)
    rest = _still_there(rest, time.monotonic() + 10.0)
    for child in rest:
        child.lifeline.close()


def _still_there(children: list[Child], deadline: float) -> list[Child]:
    while True:
        gone = [child for child in children if child.process.poll() is not None]
        for child in gone:
            child.lifeline.close()
        children = [child for child in children if child.process.returncode is None]
        left = deadline - time.monotonic()
        if not children or left <= 0:
            return children
        spawn.wait_for_any([child.process for child in children], left)

"""How a worker process comes to be: a fresh interpreter, or a fork of a server that is one.

Never a fork of the user's process. A pool of one worker starts it directly; one of several has a fork server (`run.forkserver`).
Either way the owner holds something that it can wait for and signal, like a `subprocess.Popen`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from headrace.run.forkserver import REQUEST, SIGNAL, START, STATUS

UNKNOWN: Final = 1 << 16
"""The return code of a worker whose fork server ended before it did."""
_SERVER_ENDS_WITHIN = 0.6  # seconds

Fds = tuple[int, int, int]
"""A worker's ends: socket, lifeline, arena."""


class Process(Protocol):
    """A worker process, in the eyes of its owner."""

    returncode: int | None

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def poll(self) -> int | None:
        """How it ended, as `subprocess.Popen.poll` says it; None while it is there."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, waiting for that. TimeoutExpired."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...


class Starter(Protocol):
    """Starts workers, and may outlive them by a moment."""

    def start(self, fds: Fds, pages: int, modules: Sequence[str]) -> Process:
        """A worker on these descriptors, whose arena has so many pages; `modules` of ours it will load."""
        ...

    def close(self, owner: int) -> None:
        """End what helps to start workers, after the workers themselves."""
        ...


def starter(workers: int, method: str) -> Starter:
    """What suits a pool of so many workers: with method "forkserver", a server where it saves anything."""
    return ForkServer() if method == "forkserver" and workers > 1 and sys.platform == "linux" else Fresh()


class Fresh:
    """Every worker is an interpreter of its own."""

    def start(self, fds: Fds, pages: int, modules: Sequence[str]) -> Process:
        """Start one."""
        del modules
        return _popen(program("worker", *fds, pages), fds)

    def close(self, owner: int) -> None:
        """Nothing to end."""


class ForkServer:
    """The owner's side of `run.forkserver`."""

    def __init__(self) -> None:
        """Start the server; it loads its program while the owner goes on."""
        self._control, self._process = self._serve()

    @staticmethod
    def _serve() -> tuple[socket.socket, subprocess.Popen[Any]]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            return ours, _popen(program("forkserver", theirs.fileno()), (theirs.fileno(),))
        except BaseException:  # whatever it is, nothing stays open
            ours.close()
            raise
        finally:
            theirs.close()

    def start(self, fds: Fds, pages: int, modules: Sequence[str]) -> Process:
        """Ask for a worker. A server that somebody has killed is replaced."""
        request = REQUEST.pack(START, pages, 0) + " ".join(modules).encode()
        ours, theirs = os.pipe()
        try:
            try:
                socket.send_fds(self._control, [request], [*fds, theirs])
            except (BrokenPipeError, ConnectionResetError):
                self.close(os.getpid())
                self._control, self._process = self._serve()
                socket.send_fds(self._control, [request], [*fds, theirs])
        except BaseException:  # as above
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return Forked(self._control, self._process, ours)

    def close(self, owner: int) -> None:
        """End the server. A fork of the owner closes its copies only."""
        self._control.close()
        if os.getpid() != owner:
            self._process.returncode = 0  # not this process's child
            return
        try:
            self._process.wait(_SERVER_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Forked:
    """A worker that a fork server has started, or is about to."""

    def __init__(self, control: socket.socket, server: subprocess.Popen[Any], pipe: int) -> None:
        """`pipe` brings the worker's number and, when it has ended, how."""
        self._control = control
        self._server = server
        self.pipe = pipe
        self._pid: int | None = None
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Its number; waits until the server has started it. -1: it never was."""
        if self._pid is None:
            self._hear(None)
        return -1 if self._pid is None else self._pid

    def poll(self) -> int | None:
        """How it ended, or None."""
        while self.returncode is None and self._hear(0.0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, waiting for that. TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._hear(left) and not left:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def end_server(self) -> None:
        """End a server that does not answer: signals then go straight to the worker, and the pipe ends with it."""
        self._server.kill()
        self._server.wait()

    def _signal(self, number: int) -> None:
        if self.poll() is not None:
            return
        if self._pid is None:  # not started yet: if it ever is, it finds its ends closed and leaves by itself
            if number == signal.SIGKILL:
                self._end(UNKNOWN)
            return
        try:
            self._control.send(REQUEST.pack(SIGNAL, self._pid, number), socket.MSG_DONTWAIT)
        except OSError:  # the server is gone, or has not read anything for long
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _hear(self, wait: float | None) -> bool:
        """Take one word from the pipe; False if there is none in time."""
        if self.returncode is not None:
            return False
        poll = select.poll()
        poll.register(self.pipe, select.POLLIN)
        if not poll.poll(None if wait is None else wait * 1e3):
            return False
        word = os.read(self.pipe, STATUS.size)
        if not word:
            self._end(UNKNOWN)
        elif self._pid is None:
            (self._pid,) = STATUS.unpack(word)
        else:
            self._end(*STATUS.unpack(word))
        return True

    def _end(self, code: int) -> None:
        self.returncode = code
        os.close(self.pipe)

    def forget(self) -> None:
        """In a fork of the owner: close this copy."""
        if self.returncode is None:
            self._end(0)


def modules_to_read(data: bytes) -> tuple[str, ...]:
    """What this pickle of a function needs to be read, if it was pickled by value."""
    return ("cloudpickle",) if b"cloudpickle" in data else ()


def wait_for_any(processes: Sequence[Process], seconds: float) -> None:
    """Return when one of these ends, or after so many seconds."""
    poll = select.poll()
    opened: list[int] = []
    try:
        for process in processes:
            if isinstance(process, Forked):
                poll.register(process.pipe, select.POLLIN)
            else:
                opened.append(os.pidfd_open(process.pid))
                poll.register(opened[-1], select.POLLIN)
    except (OSError, AttributeError):  # a system without them, or it has ended
        seconds = min(seconds, 0.002)
    poll.poll(seconds * 1e3)
    for fd in opened:
        os.close(fd)


def force(process: Process) -> None:
    """Kill a process of which a first SIGKILL was not seen to be the end, whoever was to pass that on."""
    if isinstance(process, Forked):
        process.end_server()
    process.kill()


def forget(process: Process) -> None:
    """A fork of the owner lets go of a worker that is not its own: nothing to wait for, nothing to warn about."""
    if isinstance(process, Forked):
        process.forget()
    else:
        process.returncode = 0


def program(module: str, *arguments: int) -> list[str]:
    """The command of a fresh interpreter that runs `main` of a module of `headrace.run`, with this one's paths and warnings."""
    here = [path or os.getcwd() for path in sys.path]
    call = ", ".join(map(str, arguments))
    code = f"import sys; sys.path[:] = {here!r}; from headrace.run.{module} import main; main({call})"
    return [sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-c", code]


def _popen(command: list[str], fds: Sequence[int]) -> subprocess.Popen[Any]:
    """Ctrl-C is blocked over the start and stays so until the process ignores it: none dies noisily while it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=tuple(fds))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

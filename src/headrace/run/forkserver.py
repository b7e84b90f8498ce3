"""The fork server of a pool: one fresh interpreter that has loaded the worker's program and forks the workers from itself.

An interpreter that loads the worker's program costs tens of milliseconds of processor time, a fork of it about one, so that a
pool of many workers starts at the price of one. A request for a worker names modules that it would load anyway; the server loads
them first. Nothing of the user's is loaded before a fork: what a library does to a process (threads, handles, random state) it
does in each worker. A server that has threads all the same, started by a site hook, starts
fresh interpreters instead.

The server is the workers' parent in the eyes of the kernel: it collects their exit statuses and passes them on, and signals them on
request, since only who collects a status can be sure that a number still means the same process. It ends when the pool's
owner closes the control socket, or is gone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys

from headrace.run import worker

REQUEST = struct.Struct("<BqI")  # kind | pages or pid | 0 or signal; after START, names of modules
STATUS = struct.Struct("<q")  # in a worker's pipe: its pid, then how it ended, as subprocess.Popen.returncode says it
START, SIGNAL = 1, 2
_NAMES_BYTES = 4096

Begin = tuple[int, int, int, int]
"""What a worker's program takes: socket, lifeline, arena, pages."""


def main(control: int) -> None:
    """Serve until the owner closes its end; in a worker, do a worker's work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    with socket.socket(fileno=control) as owner:
        begin = _Server(owner).serve()
    if begin is None:
        os._exit(0)  # nothing was printed here, and nobody has registered anything for the end
    worker.main(*begin)


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pipes: dict[int, int] = {}  # pid of a worker: where its status goes
        self._bell, self._ring = os.pipe()
        for end in (self._bell, self._ring):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, _noticed)
        signal.set_wakeup_fd(self._ring, warn_on_full_buffer=False)

    def serve(self) -> Begin | None:
        _freeze()
        while True:
            ready, _, _ = select.select([self._control, self._bell], [], [])
            if self._bell in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._bell, 4096)
                self._collect()
            if self._control not in ready:
                continue
            message, fds, _, _ = socket.recv_fds(self._control, REQUEST.size + _NAMES_BYTES, 4)
            if not message:
                return None
            kind, value, detail = REQUEST.unpack_from(message)
            if kind == SIGNAL:
                if value in self._pipes:
                    os.kill(value, detail)
            elif (begin := self._start(fds, value, message[REQUEST.size :].decode().split())) is not None:
                return begin

    def _start(self, fds: list[int], pages: int, modules: list[str]) -> Begin | None:
        sock, lifeline, arena, pipe = fds
        begin = sock, lifeline, arena, pages
        if missing := [name for name in modules if name not in sys.modules]:
            for name in missing:
                importlib.import_module(name)
            _freeze()
        pid = os.fork() if _alone() else _fresh(begin)
        if not pid:
            self._leave()
            return begin
        for fd in (sock, lifeline, arena):
            os.close(fd)
        self._pipes[pid] = pipe
        _tell(pipe, pid)
        return None

    def _leave(self) -> None:
        """In a worker: be nobody's server. Its own pipe stays open, so that the pipe ends with the last who could speak of it."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for fd in (self._bell, self._ring, *self._pipes.values()):
            os.close(fd)

    def _collect(self) -> None:
        while self._pipes:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if (pipe := self._pipes.pop(pid, None)) is not None:
                _tell(pipe, os.waitstatus_to_exitcode(status))
                os.close(pipe)


def _freeze() -> None:
    """Keep collections in workers from what is here: they would copy every page that they walk over."""
    gc.collect()
    gc.freeze()


def _noticed(*_: object) -> None:
    """Having a handler is what makes the wake-up descriptor ring."""


def _tell(pipe: int, value: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the owner no longer wants to know
        os.write(pipe, STATUS.pack(value))


def _alone() -> bool:
    """Whether this process has one thread: only then may it fork."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        threads = sys.modules.get("threading")
        return threads is None or threads.active_count() == 1


def _fresh(begin: Begin) -> int:
    """Start a worker in an interpreter of its own; its pid."""
    import subprocess

    from headrace.run.spawn import program

    process = subprocess.Popen(program("worker", *begin), pass_fds=begin[:3])
    process.returncode = 0  # collected by this server, like the others
    return process.pid

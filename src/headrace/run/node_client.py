"""A rank's side of an engine that the ranks of a node share: a producer like `Engine`, fed from a socket.

What a checkpoint holds is decided here from the same messages as without sharing, so saving asks nobody and cannot be lost with
the engine. The engine's process is told by a byte that this rank has room for another packet.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from headrace.core.lanes import Turn
from headrace.core.message import Message
from headrace.errors import ConfigError, WorkerDied
from headrace.run import wire
from headrace.run.failure import unpack
from headrace.run.host import EngineSpec, RemoteEngine
from headrace.run.node import FAILED, HELLO, WELCOME, Hello
from headrace.run.node_place import LocalPlace, local_place, messages_beside, next_session, socket_path

PACKETS: Final = 2
"""Packets that may be on their way."""
_RETRY_S: Final = 0.02
_LEAVE_S: Final = 0.3

_servers: list[subprocess.Popen[bytes]] = []
"""Engine processes that this one started: they end by themselves, and are only to be collected."""


class NodeEngine(RemoteEngine):
    """This rank's connection to the engine of its node. `state` is where its run starts, as a checkpoint."""

    def __init__(self, spec: EngineSpec, state: dict[str, Any]) -> None:
        super().__init__(spec.topology, spec.start)
        self._spec, self._state = spec, state
        self._place = local_place(spec.options)
        self._path = socket_path(next_session(spec.options.run_id))
        self._sock: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._inbox = wire.Inbox(None)

    def start(self) -> None:
        """Connect; the leader first starts the engine's process. The first `take` waits for the other ranks."""
        path = self._path
        timeout_s = self._spec.options.aggregate_timeout_s
        if self._place.leads:
            self._server = start_server(path, self._place, timeout_s)
        self._sock = connect(path, self._place, timeout_s)
        spec = self._spec
        hello = Hello(self._place.rank, spec.topology, self._state, spec.plan.cut_every, self._packed_spec())
        try:
            wire.send(self._sock, [*wire.encode(wire.Head(HELLO), hello, None), b"+" * PACKETS])
        except OSError:
            raise self._ended() from None

    @property
    def messages(self) -> tuple[str, int]:
        """A folder that the ranks of this node share for as long as they share the engine, and how many they are."""
        return str(messages_beside(self._path)), self._place.size

    def _packed_spec(self) -> bytes | None:
        if not self._place.leads:
            return None
        options = self._spec.options.updated(share=None, mtp_mode=False, progress=False)
        return wire.dumps(replace(self._spec, options=options, start={}))

    def take(self) -> deque[tuple[Turn, Message]]:
        """What the engine has ready for this rank."""
        assert self._sock is not None
        frame = wire.receive(self._sock, self._inbox)
        if frame is not None and frame.kind == WELCOME:
            self._pid = frame.decode()
            frame = wire.receive(self._sock, self._inbox)
        if frame is None:
            raise self._ended()
        if frame.kind == FAILED:
            failure = unpack(frame.decode())
            failure.worker = f"pid {self._pid}" if self._pid else ""
            raise failure.raised()
        with contextlib.suppress(OSError):  # if it has ended, the next receive says so
            self._sock.send(b"+")
        return self._received(frame.decode())

    def ready(self, within: float) -> bool:
        """Whether a packet has begun to arrive, or does so in time."""
        assert self._sock is not None
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(max(0.0, within) * 1000))

    def _ended(self) -> WorkerDied:
        how = "ended"
        if self._server is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._server.wait(_LEAVE_S)
                how = f"ended with exit status {code}" if code >= 0 else f"was killed by signal {-code}"
        return WorkerDied(
            f"the engine that the ranks of this node share (pid {self._pid or 'unknown'}) {how}, so local rank "
            f"{self._place.rank} receives nothing more. Look at its output above, or run without share='node'; a checkpoint "
            "taken now is exact"
        )

    def close(self) -> None:
        """Leave. The engine's process goes on for the other ranks, and ends with the last one."""
        if self._sock is not None:
            self._sock.close()
        if self._server is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(_LEAVE_S)
        _collect()


def start_server(path: Path, place: LocalPlace, timeout_s: float) -> subprocess.Popen[bytes]:
    """Start the engine's process with a socket that listens already, so that no rank comes too early."""
    _collect()
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(path))
        raise ConfigError(
            f"share='node': ranks of another run meet at {path} right now; give each run on this machine a run_id of its own"
        )
    with socket.socket(socket.AF_UNIX) as listener:
        fresh = path.with_suffix(f".{os.getpid()}")
        listener.bind(str(fresh))
        listener.listen(place.size)
        os.rename(fresh, path)  # takes the place of a socket that a killed run left behind
        here = [folder or os.getcwd() for folder in sys.path]
        code = (
            f"import sys; sys.path[:] = {here!r}; from headrace.run.node import main; "
            f"main({listener.fileno()}, {str(path)!r}, {place.size}, {timeout_s!r})"
        )
        command = [sys.executable, *(f"-W{option}" for option in sys.warnoptions), "-c", code]
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(listener.fileno(),), start_new_session=True
        )
    _servers.append(server)
    return server


def connect(path: Path, place: LocalPlace, timeout_s: float) -> socket.socket:
    """Connect to the engine's process, waiting for local rank 0 to start it."""
    deadline = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(path))
            return sock
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            sock.close()
        except BaseException:  # whatever it is, nothing stays open
            sock.close()
            raise
        if time.monotonic() > deadline:
            raise ConfigError(
                f"share='node': local rank {place.rank} found no engine at {path} within {timeout_s:g} s. Local rank 0 starts "
                "it when it iterates the pipeline; every rank of the node must do so, in the same order, with the same run_id"
            )
        time.sleep(_RETRY_S)


def _collect() -> None:
    _servers[:] = [server for server in _servers if server.poll() is None]


@atexit.register
def _let_go() -> None:
    _collect()
    for server in _servers:
        server.returncode = 0  # it goes on for other ranks: nothing to wait for, nothing to warn about

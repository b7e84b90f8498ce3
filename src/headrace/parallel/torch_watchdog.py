"""Every rank learns at once that one has failed, and where in the schedule it stood.

The transports tell only the neighbours of a dead rank, and a rank that waits for another neighbour waits until its
time-out. So each rank keeps one socket to rank 0 (the hub), apart from all tensor traffic:

* a process that ends, however it ends, has its sockets closed by the kernel: the hub sees the end of the stream within
  milliseconds and tells every rank;
* if the hub's own process ends, every rank sees its stream end;
* a rank whose stage raised says so itself, with the message;
* a rank that falls silent for `silence` seconds (host lost, process stopped) is declared lost.

What each rank then does is its callback's affair: abort its process groups, so that blocked calls return. Only sockets
and threads here, no torch.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

logger = logging.getLogger("headrace.parallel")

HEARTBEAT = 0.2  # seconds between two signs of life


class Failure(msgspec.Struct, frozen=True):
    """Which rank failed, why, and the last schedule position that it told."""

    rank: int
    reason: str
    position: str


_FAREWELL = Failure(-1, "the hub closed in good order", "")


class _Message(msgspec.Struct, omit_defaults=True):
    """What goes over the wire: one JSON object a line."""

    rank: int
    position: str = ""
    token: str = ""
    failed: str = ""
    bye: bool = False


@dataclass(frozen=True)
class Address:
    """Where the hub listens, and the word that a client must say."""

    host: str
    port: int
    token: str


@dataclass
class _Peer:
    """One connected rank, as the hub sees it."""

    connection: socket.socket
    rank: int = -1
    buffer: bytes = b""
    position: str = "not in a step"
    heard: float = field(default_factory=time.monotonic)


class Hub:
    """Runs in a thread on rank 0: listens to every rank and spreads the first failure."""

    def __init__(self, host: str, silence: float) -> None:
        """Listen on `host`, a port of the system's choice."""
        self._server = socket.create_server((host, 0))
        self.address = Address(host, self._server.getsockname()[1], secrets.token_hex(16))
        self._silence = silence
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._peers: dict[socket.socket, _Peer] = {}
        self._failure: Failure | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; ranks that are still connected have said goodbye, or learn that the hub is gone."""
        self._closing.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closing.is_set():
            for key, _ in self._selector.select(timeout=HEARTBEAT):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._read(self._peers[key.fileobj])  # type: ignore[index]
            now = time.monotonic()
            for peer in list(self._peers.values()):
                if now - peer.heard > self._silence:
                    self._lost(peer, f"it has been silent for {self._silence:g} s (host lost, or process stopped)")
        for peer in list(self._peers.values()):
            self._send(peer, _FAREWELL)
        for connection in [*self._peers, self._server]:
            connection.close()
        self._selector.close()

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        connection.settimeout(1)
        self._peers[connection] = _Peer(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._lost(peer, "its process ended (killed, crashed or out of memory)")
            return
        peer.heard = time.monotonic()
        *lines, peer.buffer = (peer.buffer + data).split(b"\n")
        for line in lines:
            if not self._handle(peer, line):
                break

    def _handle(self, peer: _Peer, line: bytes) -> bool:
        """One message; false if the connection is done."""
        try:
            message = msgspec.json.decode(line, type=_Message)
        except msgspec.MsgspecError:
            self._drop(peer)
            return False
        if peer.rank < 0:
            if not secrets.compare_digest(message.token, self.address.token):
                self._drop(peer)
                return False
            peer.rank = message.rank
            if self._failure is not None:
                self._send(peer, self._failure)
        peer.position = message.position or peer.position
        if message.bye:
            self._drop(peer)
            return False
        if message.failed:
            self._spread(Failure(peer.rank, message.failed, peer.position))
        return True

    def _lost(self, peer: _Peer, reason: str) -> None:
        self._drop(peer)
        if peer.rank >= 0:
            self._spread(Failure(peer.rank, reason, peer.position))

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.connection, None) is not None:
            self._selector.unregister(peer.connection)
            peer.connection.close()

    def _spread(self, failure: Failure) -> None:
        if self._failure is None:  # what fails after the first is its consequence
            self._failure = failure
            for peer in list(self._peers.values()):
                self._send(peer, failure)

    def _send(self, peer: _Peer, failure: Failure) -> None:
        with contextlib.suppress(OSError):  # a rank that is gone needs no news
            peer.connection.sendall(msgspec.json.encode(failure) + b"\n")


class Watchdog:
    """One rank's end: tells where it stands, learns who failed.

    `position` is called, on the watchdog's own thread, for the text of the current schedule position. `on_failure` is
    called once, on that thread too, when another rank has failed.
    """

    def __init__(
        self, rank: int, address: Address, position: Callable[[], str], on_failure: Callable[[Failure], None]
    ) -> None:
        """Connect to the hub and say hello."""
        self.rank = rank
        self.failure: Failure | None = None
        self._position = position
        self._on_failure = on_failure
        self._known = threading.Event()
        self._closing = threading.Event()
        self._sending = threading.Lock()
        self._socket = socket.create_connection((address.host, address.port), timeout=10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._say(_Message(rank, position(), token=address.token))
        self._thread = threading.Thread(target=self._run, name="headrace-watchdog", daemon=True)
        self._thread.start()

    def wait_for_news(self, seconds: float) -> Failure | None:
        """Wait until a failure is known: an error of the transport is mostly the echo of one."""
        self._known.wait(seconds)
        return self.failure

    def report(self, reason: str) -> None:
        """Tell every rank that this one has failed."""
        with contextlib.suppress(OSError):  # the hub is gone: then they know
            self._say(_Message(self.rank, self._position(), failed=reason))

    def close(self) -> None:
        """Say goodbye, so that the end of this process is no failure."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._say(_Message(self.rank, bye=True))
        self._thread.join(timeout=5)
        self._socket.close()

    def _say(self, message: _Message) -> None:
        with self._sending:
            self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def _run(self) -> None:
        buffer = b""
        said = ""
        beat = 0.0
        self._socket.settimeout(HEARTBEAT / 4)
        while not self._closing.is_set():
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                now, here = time.monotonic(), self._position()
                if here != said or now - beat > HEARTBEAT:
                    said, beat = here, now
                    with contextlib.suppress(OSError):  # recv says it next
                        self._say(_Message(self.rank, here))
                continue
            except OSError:
                data = b""
            if not data:
                self._learn(Failure(0, "its process, which runs the watchdog's hub, ended", "an unknown position"))
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                failure = msgspec.json.decode(line, type=Failure)
                if failure.rank < 0:  # the hub closed in good order: nobody watches any more
                    return
                self._learn(failure)

    def _learn(self, failure: Failure) -> None:
        if self._closing.is_set() or self.failure is not None:
            return
        self.failure = failure
        self._known.set()
        if failure.rank != self.rank:
            logger.error(
                "rank %d failed: %s. It stood at %s; this rank %d stands at %s",
                failure.rank,
                failure.reason,
                failure.position,
                self.rank,
                self._position(),
            )
            self._on_failure(failure)


def own_address(peer: str, port: int) -> str:
    """The address under which a host that this one can reach (`peer`) reaches this one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, port))
        return str(probe.getsockname()[0])

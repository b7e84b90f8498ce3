"""One engine for all ranks of a node: the process that runs it.

Local rank 0 starts it, and every local rank connects to its socket. It compares what the ranks say of themselves, computes every
lane that any of them needs once, and hands each rank what its own engine would have handed it: cuts and batches in the same
order. Ranks of one data-parallel group receive the same batch. A batch that a rank computes without delivering it (a lane shared
with another group) arrives as an empty mark, so that checkpoints count it.

Contract (if the code differs from it, the code is wrong):

1. Each rank has a bounded buffer. Ranks may be apart by what it holds; past that the fastest waits for the slowest.
2. A rank that has left, by whatever signal, is passed over; the others go on.
3. An error of the engine is raised on every rank, with its traceback. When this process ends unasked, every rank sees the end of
   its stream at once.
4. This process belongs to no rank. It ends when the last rank has left (whatever a user function is doing, and whether or not
   all have come), or when not all have come in time.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from headrace.core.block import Block, Origin
from headrace.core.checkpoint import LaneState, differences
from headrace.core.lanes import Topology, Turn
from headrace.core.message import Item, Message
from headrace.errors import ConfigError, WorkerDied
from headrace.run import wire
from headrace.run.failure import from_exception, pack
from headrace.run.handover import Closed, Finished, Handover
from headrace.run.host import SUMMARY_S, EngineSpec, Packet, portable, tell
from headrace.run.node_place import messages_beside

HELLO, WELCOME, PACKET, FAILED = range(101, 105)
"""Kinds of frames: from a rank, and to it."""
HELLO_S: Final = 30.0
"""Seconds without a byte from a rank that has connected."""
SEND_BYTES: Final = 1 << 20
JOIN_S: Final = 1.0
"""Seconds that a user function may go on once the last rank has left."""
_HUNG_UP: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says first: who it is, and where its run starts, as a checkpoint. The leader adds the engine."""

    local_rank: int
    topology: Topology
    state: dict[str, Any]
    cut_every: int
    spec: bytes | None = None


class EngineFailed(Exception):
    """The engine's own error in a form that any number of ranks can be sent."""

    def __init__(self, error: BaseException) -> None:
        failure = from_exception(error, "the engine of this node", None)
        failure.item = ""
        self.packed = pack(failure)
        super().__init__(str(error))


@dataclass(eq=False)
class Client:
    """A rank as the engine's process sees it."""

    sock: socket.socket
    hello: Hello
    buffer: Handover = field(default_factory=lambda: Handover(2, 2))
    news: Packet = field(default_factory=Packet)
    lock: threading.Lock = field(default_factory=threading.Lock)
    gone: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return f"local rank {self.hello.local_rank}"

    def learn(self, lane: int, news: Packet) -> None:
        """Add what the engine told of one of this rank's lanes; it goes out with the next packet."""
        with self.lock:
            self.news.sources.setdefault(lane, {}).update(news.sources[lane])
            self.news.released.setdefault(lane, {}).update(news.released.get(lane, {}))
            self.news.drawn[lane] = news.drawn[lane]

    def packet(self) -> Packet:
        """What is ready for this rank, at least one message; a failure of the engine is raised."""
        try:
            messages, finished = list(self.buffer.take()), False
        except Finished:
            messages, finished = [], True
        with self.lock:
            news, self.news = self.news, Packet()
        news.messages, news.finished = messages, finished
        return news

    def tell(self, error: EngineFailed) -> None:
        """The rank raises the engine's error."""
        with contextlib.suppress(OSError):
            wire.send(self.sock, wire.encode(wire.Head(FAILED), error.packed, None))

    def leave(self) -> None:
        """The rank has left."""
        self.gone = True
        self.buffer.close()


# ---------------------------------------------------------------------------------------------------
# Before the engine: all ranks come, and agree
# ---------------------------------------------------------------------------------------------------


def gather(listener: socket.socket, size: int, timeout_s: float, clients: dict[int, Client]) -> None:
    """Wait for every local rank; `clients` by local rank. An error names those that did not come."""
    deadline = time.monotonic() + timeout_s
    while len(clients) < size:
        wait = deadline - time.monotonic()
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        here = [client for client in clients.values() if not client.gone]
        for client in here:
            poll.register(client.sock, _HUNG_UP)
        ready = {fd for fd, _ in poll.poll(max(0.0, wait) * 1000)}
        for client in here:
            client.gone = client.sock.fileno() in ready
        if listener.fileno() in ready:
            _welcome(listener.accept()[0], size, clients)
        elif clients and all(client.gone for client in clients.values()):
            raise WorkerDied(f"share='node': ranks left again before all {size} ranks of this node had come")
        elif wait <= 0:
            missing = ", ".join(str(rank) for rank in range(size) if rank not in clients)
            raise ConfigError(
                f"share='node': local ranks {missing} of {size} did not come within {timeout_s:g} s. Every rank of the node "
                "must iterate the pipeline; local_world_size says how many do, aggregate_timeout_s how long to wait"
            )


def _welcome(sock: socket.socket, size: int, clients: dict[int, Client]) -> None:
    sock.settimeout(HELLO_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    try:
        frame = wire.receive(sock, wire.Inbox(None))
    except TimeoutError:
        frame = None
    if frame is None or frame.kind != HELLO:
        sock.close()  # whoever it was has left, or says nothing
        return
    sock.settimeout(None)
    hello = frame.decode()
    client = Client(sock, hello)
    if hello.local_rank in clients or not 0 <= hello.local_rank < size:
        refusal = ConfigError(
            f"share='node': {client.name} of {size} has come twice, or is none of them; give every process of this node a "
            "local_rank of its own"
        )
        client.tell(EngineFailed(refusal))
        raise refusal
    clients[hello.local_rank] = client
    with contextlib.suppress(OSError):  # it has left already; the poll says so
        wire.send(sock, wire.encode(wire.Head(WELCOME), os.getpid(), None))


def require_agreement(hellos: Sequence[Hello]) -> dict[int, LaneState]:
    """The lanes of all ranks; ConfigError lists every difference between what ranks run."""
    first, lanes, problems = hellos[0], dict[str, Any](), list[str]()
    for hello in hellos:
        who = f"local ranks {first.local_rank} and {hello.local_rank}"
        for name, mine, other in (
            ("dp_degree", first.topology.groups, hello.topology.groups),
            ("canonical_replicas", first.topology.lanes, hello.topology.lanes),
            ("mapping_strategy", first.topology.mapping, hello.topology.mapping),
            ("cut_every", first.cut_every, hello.cut_every),
            ("position", first.state["position"], hello.state["position"]),
        ):
            if mine != other:
                problems.append(f"{who}: {name}: {mine!r} and {other!r}")
        problems += [f"{who}: recipe: {line}" for line in differences(first.state["recipe"], hello.state["recipe"])]
        for lane, state in hello.state["lanes"].items():
            if lanes.setdefault(lane, state) != state:
                problems.append(f"{who}: lane {lane} starts elsewhere")
    if problems:
        raise ConfigError(
            "share='node': the ranks of this node do not run the same pipeline, so they cannot share an engine:\n  - "
            + "\n  - ".join(problems)
        )
    return {int(lane): LaneState.decode(state) for lane, state in lanes.items()}


# ---------------------------------------------------------------------------------------------------
# The engine, and what goes to whom
# ---------------------------------------------------------------------------------------------------


class NodeServer:
    """Runs one engine for these clients."""

    def __init__(self, clients: Sequence[Client]) -> None:
        hellos = [client.hello for client in clients]
        start = require_agreement(hellos)
        (packed,) = [hello.spec for hello in hellos if hello.spec is not None]
        spec: EngineSpec = wire.Packed(packed, []).decode()
        groups = tuple(sorted({hello.topology.group for hello in hellos}))
        topology = replace(hellos[0].topology, group=groups[0], node=groups)
        self._spec = replace(spec, topology=topology, start=start, position=int(hellos[0].state["position"]))
        self._clients = clients
        self._needs = {
            lane: [client for client in clients if lane in client.hello.topology.computed] for lane in topology.computed
        }
        share = spec.options.prefetch_bytes // len(clients)
        for client in clients:
            client.buffer = Handover(spec.plan.prefetch, share)
        self._engine = self._spec.build()
        self._told = 0.0

    def run(self) -> None:
        """Until the last rank has left."""
        threads = [threading.Thread(target=self._drive, daemon=True)]
        threads += [threading.Thread(target=serve, args=(client,), daemon=True) for client in self._clients]
        for thread in threads:
            thread.start()
        self._wait_for_the_last()
        threads[0].join(JOIN_S)
        with contextlib.suppress(ValueError):  # an inline engine that is inside a user's function
            self._engine.close()

    def _wait_for_the_last(self) -> None:
        poll = select.poll()
        here = {client.sock.fileno(): client for client in self._clients}
        for fd in here:
            poll.register(fd, _HUNG_UP)
        while here:
            for fd, _ in poll.poll():
                poll.unregister(fd)
                here.pop(fd).leave()

    def _drive(self) -> None:
        try:
            self._engine.start()
            while not all(client.gone for client in self._clients):
                messages = self._engine.take()
                self._learn()
                for turn, message in messages:
                    self._route(turn, portable(message))
        except Finished:
            self._learn(over=True)
            for client in self._clients:
                client.buffer.finish()
        except BaseException as error:  # noqa: BLE001  every rank raises it
            failed = EngineFailed(error)
            for client in self._clients:
                client.buffer.fail(failed)

    def _learn(self, *, over: bool = False) -> None:
        news, now = Packet(), time.perf_counter()
        tell(self._engine, news)
        for lane in self._spec.topology.computed:
            if news.sources[lane] or news.released.get(lane):
                for client in self._needs[lane]:
                    client.learn(lane, news)
        if over or now - self._told > SUMMARY_S:
            self._told = now
            summaries = {group: self._engine.summary(group) for group in self._spec.topology.here}
            for client in self._clients:
                client.news.summary = summaries[client.hello.topology.group]

    def _route(self, turn: Turn, message: Message) -> None:
        """A batch to the ranks of its group, a mark to those that only count it, anything else to all with this lane."""
        batch = isinstance(message, (Block, Item))
        owner = self._spec.topology.owner(turn) if batch else -1
        nbytes = message.nbytes() if isinstance(message, (Block, Item)) else 0
        for client in self._needs[turn.lane]:
            mine = owner == client.hello.topology.group
            with contextlib.suppress(Closed):
                if mine:
                    client.buffer.put((turn._replace(mine=True), message), 1, nbytes)
                else:
                    other = Item(turn.lane, None, Origin.empty()) if batch else message
                    client.buffer.put((turn._replace(mine=False), other))


def serve(client: Client) -> None:
    """Answer each byte that a rank sends with a packet."""
    with contextlib.suppress(OSError):
        while client.sock.recv(1):
            try:
                packet = client.packet()
            except EngineFailed as error:
                client.tell(error)
                return
            wire.send(client.sock, wire.encode(wire.Head(PACKET), packet, None))
            if packet.finished:
                return


def main(fd: int, path: str, size: int, timeout_s: float) -> None:
    """Serve one session on the listening socket `fd`, whose name is `path`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    clients: dict[int, Client] = {}
    try:
        server = _prepare(socket.socket(fileno=fd), path, size, timeout_s, clients)
        if server is not None:
            server.run()
    finally:
        for client in clients.values():
            client.sock.close()
        shutil.rmtree(messages_beside(Path(path)), ignore_errors=True)
    os._exit(0)  # a thread that is stuck in a user's function must not keep the process


def _prepare(
    listener: socket.socket, path: str, size: int, timeout_s: float, clients: dict[int, Client]
) -> NodeServer | None:
    """The server once all have come and agree; None if they do not, after telling each why."""
    try:
        with listener:
            try:
                gather(listener, size, timeout_s, clients)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        return NodeServer([clients[rank] for rank in sorted(clients)])
    except BaseException as error:  # noqa: BLE001  the ranks raise it
        failed = EngineFailed(error)
        for client in clients.values():
            client.tell(failed)
        return None

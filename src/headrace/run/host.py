"""`mtp_mode`: the engine in a process of its own, so that it never competes with the training loop for the GIL.

The child is an ordinary worker process whose one function hands over what its engine has ready; large arrays cross in shared
memory. What a checkpoint holds is decided here from the same messages as without `mtp_mode`, so saving asks the child nothing
and cannot be lost with it. Errors arrive with the child's traceback; a child that dies is a `WorkerDied`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from headrace.core.block import Block
from headrace.core.checkpoint import LaneState, Span
from headrace.core.lanes import Topology, Turn
from headrace.core.message import End, Message
from headrace.core.plan import Plan
from headrace.observe.summary import EngineSummary
from headrace.options import RuntimeOptions
from headrace.run.engine import Engine
from headrace.run.executor import SLAB_BYTES, Executor, make_executor, ordered_map
from headrace.run.handover import Finished
from headrace.types import compact

PACKETS: Final = 3
"""Requests that wait in the child, so that it never waits for the parent to ask."""
SUMMARY_S: Final = 0.25
"""Seconds between the counts that travel along."""
KEPT_INTERVALS: Final = 64


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an engine is built from; crosses to the child once."""

    plan: Plan
    options: RuntimeOptions
    topology: Topology
    work_source: Any
    start: Mapping[int, LaneState]
    position: int

    def build(self) -> Engine:
        """An engine that has not started."""
        source, lanes = self.work_source, self.topology.lanes
        return Engine(
            self.plan,
            self.options,
            self.topology,
            dict(source.datasets_by_id),
            lambda lane: source.lane(lane, lanes),
            self.start,
            self.position,
        )

    def __call__(self) -> HostedFunction:
        """What the child runs."""
        return HostedFunction(self)


@dataclass(slots=True)
class Packet:
    """What the child hands over at once."""

    messages: list[tuple[Turn, Message]] = field(default_factory=list)
    sources: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    released: dict[int, dict[int, list[Span]]] = field(default_factory=dict)
    drawn: dict[int, int] = field(default_factory=dict)
    summary: EngineSummary | None = None
    finished: bool = False


class HostedFunction:
    """The child's side: an engine, and what of it has been told already."""

    def __init__(self, spec: EngineSpec) -> None:
        self._engine = spec.build()
        self._engine.start()
        self._then = 0.0
        self.where = "engine"

    def __call__(self, most: int) -> Packet:
        """Up to about `most` messages, at least one unless the run is over."""
        packet = Packet()
        try:
            packet.messages = [(turn, portable(message)) for turn, message in self._engine.take()]
        except Finished:
            packet.finished = True
        tell(self._engine, packet)
        now = time.perf_counter()
        if packet.finished or now - self._then > SUMMARY_S:
            self._then, packet.summary = now, self._engine.summary()
        return packet

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def tell(engine: Engine, packet: Packet) -> None:
    """Add what the other side needs beside the messages and has not been told, and forget it here."""
    for lane in engine.topology.computed:
        sources, released = engine.sources(lane), engine.released(lane)
        packet.drawn[lane] = engine.drawn(lane)
        packet.sources[lane] = {chunk: sources[chunk] for chunk in list(sources)}
        for chunk in packet.sources[lane]:
            del sources[chunk]
        if not engine.plan.deterministic:
            packet.released[lane] = {at: list(released[at]) for at in list(released)}
            for at in list(released)[:-KEPT_INTERVALS]:
                del released[at]


def portable(message: Message) -> Message:
    """A message as it crosses to another process: without the rest of the arrays that it is a view of."""
    match message:
        case Block():
            return compact(message)
        case End(last=Block() as last):
            return replace(message, last=compact(last))
        case _:
            return message


class RemoteEngine:
    """A producer like `Engine`, fed with the packets of one that runs in another process: what they have told so far."""

    def __init__(self, topology: Topology, start: Mapping[int, LaneState]) -> None:
        self.topology = topology
        self._sources = {lane: dict(start[lane].sources) for lane in topology.computed}
        self._released: dict[int, dict[int, list[Span]]] = {lane: {} for lane in topology.computed}
        self._drawn: dict[int, int] = dict.fromkeys(topology.computed, 0)
        self._summary = EngineSummary()

    def _received(self, packet: Packet) -> deque[tuple[Turn, Message]]:
        """The messages of a packet; `Finished` after the last."""
        for lane in self.topology.computed:
            self._sources[lane].update(packet.sources.get(lane, {}))
            self._released[lane].update(packet.released.get(lane, {}))
        self._drawn.update(packet.drawn)
        self._summary = packet.summary or self._summary
        if packet.finished:
            raise Finished
        return deque(packet.messages)

    def ready(self, within: float) -> bool:
        """Not known: the other side may be in a user's function."""
        del within
        return False

    def sources(self, lane: int) -> dict[int, dict[str, Any]]:
        """The work source's states, as the other side last told them."""
        return self._sources[lane]

    def released(self, lane: int) -> dict[int, list[Span]]:
        """Orders of release, as the other side last told them."""
        return self._released[lane]

    def drawn(self, lane: int) -> int:
        """Chunks handed out, as the other side last told."""
        return self._drawn[lane]

    def summary(self) -> EngineSummary:
        """The other side's counts, at most a quarter of a second old while it hands batches over."""
        return self._summary


def _for_child(spec: EngineSpec) -> EngineSpec:
    """What the child builds: an engine with the buffer that the `mtp_` options ask for."""
    options = spec.options
    batches, nbytes = options.mtp_buffer or options.prefetch_batches, options.mtp_buffer_bytes or options.prefetch_bytes
    inside = options.updated(mtp_mode=False, progress=False, prefetch_batches=batches, prefetch_bytes=nbytes)
    return replace(spec, options=inside, plan=replace(spec.plan, prefetch=batches or spec.plan.prefetch))


class HostedEngine(RemoteEngine):
    """The parent's side of `mtp_mode`."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec.topology, spec.start)
        self._spec = _for_child(spec)
        self._executor: Executor | None = None
        self._stream: Iterator[Packet] | None = None
        self._closed = False

    def start(self) -> None:
        """Start the child."""
        options = self._spec.options
        self._executor = make_executor(
            "process",
            self._spec,
            name="engine (mtp_mode)",
            max_retries=0,
            start_method=options.start_method,
            slab_bytes=SLAB_BYTES if options.shm_enabled else 0,
        )
        self._stream = ordered_map(self._executor, itertools.repeat(self._spec.plan.prefetch), PACKETS)

    def take(self) -> deque[tuple[Turn, Message]]:
        """What the child has ready."""
        assert self._stream is not None
        try:
            packet = next(self._stream)
        except RuntimeError:
            if self._closed:  # by another thread
                raise Finished from None
            raise
        return self._received(packet)

    def close(self) -> None:
        """End the child."""
        self._closed = True
        if self._executor is not None:
            self._executor.close()

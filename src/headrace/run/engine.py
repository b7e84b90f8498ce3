"""The engine: the one loop that drives lanes and hands finished batches over.

A thread (none with runner "inline") walks the lanes in the order of the run's global batches, pulls the next batch of each
from its chain of stages, and puts it into a bounded buffer. The consumer (`consumer.py`) takes batches and cuts from there,
and knows from them alone what a checkpoint holds.

Shutdown contract. `close()` may be called at any time, from any thread, more than once. It empties the buffer, which ends the
driving thread at its next batch; stops the workers of all stages, which ends it where it waits for one; then waits for all of them
at the same time. It returns within two seconds whatever a user function is doing in a thread or process of ours (a thread cannot
be killed: one that is stuck in user code is left behind as a daemon). An iterator that is dropped, an exception in the training
loop, and the end of the interpreter all come down to `close()`.
"""

from __future__ import annotations

import atexit
import inspect
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from headrace.core.block import DATASET, ROW, SHARD, Block
from headrace.core.checkpoint import LaneState, Span
from headrace.core.lanes import Topology, Turn
from headrace.core.message import Cut, End, Item, Message
from headrace.core.plan import Node, Plan, Stage
from headrace.errors import DataError, OperatorError, RecordError
from headrace.observe.counters import Counters, OperatorCounters
from headrace.observe.summary import EngineSummary, summarize_engine
from headrace.options import RuntimeOptions
from headrace.run.faults import FaultLog
from headrace.run.feed import LaneSource
from headrace.run.handover import Closed, Finished, Handover
from headrace.run.lane import Lane, Workshop
from headrace.run.pools import Pools
from headrace.run.stage import RecordFault, StageResult
from headrace.run.tune import Tuner

JOIN_S = 1.5
"""Seconds after the beginning of `close` until which it waits for the driving thread."""

_live: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for engine in list(_live):
        engine.close()


def _is_ours(node: Node) -> bool:
    op = node.op
    return type(op).__module__.startswith("headrace.ops.") and not hasattr(op, "fn") and not hasattr(op, "predicate")


class Engine:
    """Runs a plan over the lanes of one rank, from a fresh start or from saved lane states."""

    def __init__(
        self,
        plan: Plan,
        options: RuntimeOptions,
        topology: Topology,
        datasets: Mapping[int, Any],
        lane_source: Callable[[int], LaneSource],
        start: Mapping[int, LaneState],
        position: int = 0,
    ) -> None:
        self.plan, self.options, self.topology = plan, options, topology
        self._position = position
        self.counters = Counters(
            [OperatorCounters(node.op.name) for node in plan.nodes],
            {i: d.name for i, d in datasets.items()},
            shared=topology.overhead > 1 or len(topology.here) > 1,
        )
        self._datasets = datasets
        self._faults = FaultLog(options.max_errors, options.quarantine_file, self._locate)
        self.counters.log = self._faults.add
        self._pools = Pools(plan, options)
        self._stats = {id(node): count for node, count in zip(plan.nodes, self.counters.operators, strict=True)}
        shop = Workshop(
            plan=plan,
            pools=self._pools.all,
            counters=self.counters,
            settle=self._settle,
            windows=[max(1, stage.window // len(topology.computed)) for stage in plan.stages],
            lane_source=lane_source,
            groups=self._groups,
            keep_last=options.uneven == "pad",
            digested=options.digest,
            stats=self._stats,
        )
        self.lanes = {lane: Lane(lane, shop, start[lane]) for lane in topology.computed}
        self._threaded = any(stage.pooled for stage in plan.stages)
        self.buffer = Handover(plan.prefetch, options.prefetch_bytes, fixed=options.prefetch_batches is not None)
        self._inline: Generator[tuple[Turn, Message]] | None = None
        self._inline_s = 0.0
        self._thread: threading.Thread | None = None
        self._closed = False
        pooled = {i: stage.workers for i, stage in enumerate(plan.stages) if stage.pooled}
        tuned = plan.allocation == "autotune" and len(pooled) > 1
        self.tuner = Tuner(pooled, self._busy_ns, self._pools.allot) if tuned else None
        _live.add(self)

    # -- driving -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers and, unless everything runs inline, the driving thread."""
        self._pools.start()
        if self._threaded:
            self._thread = threading.Thread(target=self._pump, name="headrace-engine", daemon=True)
            self._thread.start()
        else:
            self._inline = self._drive()

    def _pump(self) -> None:
        drive = self._drive()
        try:
            for turn, message in drive:
                if isinstance(message, (Block, Item)):
                    self.buffer.put((turn, message), 1, message.nbytes())
                else:
                    self.buffer.put((turn, message))
            self.buffer.finish()
        except Closed:
            pass
        except BaseException as error:  # noqa: BLE001  the consumer's thread raises it
            if not self._closed:  # workers that were stopped are no error
                self.buffer.fail(error)
        finally:
            drive.close()

    def _drive(self) -> Generator[tuple[Turn, Message]]:
        """Cuts and batches of the computed lanes, in global order. A lane that has ended says so and loses its turns."""
        streams = {lane: self.lanes[lane].messages() for lane in self.topology.computed}
        try:
            for turn in self.topology.turns(self._position):
                stream = streams.get(turn.lane)
                if stream is None:
                    continue
                for message in stream:
                    if isinstance(message, (Block, Item)):
                        yield turn, message
                        break
                    if isinstance(message, Cut):
                        yield turn, message
                else:
                    del streams[turn.lane]
                    yield turn, End(turn.lane, self.lanes[turn.lane].last)
                    if not streams:
                        return
        finally:
            for stream in streams.values():
                stream.close()  # type: ignore[attr-defined]

    def _groups(self, lane: int) -> Iterator[int]:
        """The groups that the batches of a lane go to, from the run's position on."""
        topology = self.topology
        if not self.counters.shared:
            return itertools.repeat(topology.group)
        numbers = itertools.count(topology.taken(self._position, lane))
        return (topology.owner(Turn(lane, number, mine=True)) for number in numbers)

    def _busy_ns(self, stage: int) -> int:
        return sum(self._stats[id(node)].busy_ns for node in self.plan.stages[stage].nodes)

    def _settle(self, result: StageResult, stage: Stage) -> Block:
        """Count what a stage did to one block. What it dropped and refused is on the lane's account."""
        for node, stat in zip(stage.nodes, result.stats, strict=True):
            self._stats[id(node)].add(stat.rows_in, stat.rows_out, stat.busy_ns)
        if self.tuner is not None:
            self.tuner.look()
        return result.block

    def take(self) -> deque[tuple[Turn, Message]]:
        """Messages that are ready, at least one; `Finished` at the end."""
        try:
            if self._inline is None:
                return self.buffer.take()
            before = time.perf_counter()
            for item in self._inline:
                self._inline_s = time.perf_counter() - before
                return deque([item])
        except RecordFault as fault:
            raise self._explain(fault) from fault.original
        raise Finished

    def ready(self, within: float) -> bool:
        """Whether `take` returns within so many seconds; waits up to them for that.

        Inline it goes by what the last one took, and does not rely on it where functions of the user run.
        """
        if self._inline is None:
            return self.buffer.ready(within)
        return self._inline_s <= within and all(map(_is_ours, self.plan.nodes))

    # -- what a consumer needs beside the messages ---------------------------------------------------

    def sources(self, lane: int) -> dict[int, dict[str, Any]]:
        """The work source's state before each chunk drawn in a lane; the consumer forgets what it no longer needs."""
        return self.lanes[lane].sources

    def released(self, lane: int) -> dict[int, list[Span]]:
        """Orders of release, with deterministic=False."""
        return self.lanes[lane].released

    def drawn(self, lane: int) -> int:
        """Chunks handed out in a lane."""
        return self.lanes[lane].feed.drawn

    def summary(self, group: int | None = None) -> EngineSummary:
        """Counts of this side for this group, or for another one that it works for."""
        own = self.topology.group if group is None else group
        for lane in self.lanes.values():
            lane.account.settle()
        return summarize_engine(self.counters, own, self.buffer, self.plan.prefetch, self.allotment())

    def allotment(self) -> dict[str, int]:
        """Workers of each pooled stage, as autotune has settled them."""
        now = {} if self.tuner is None else self.tuner.allotment
        return {stage.label: now.get(i, stage.workers) for i, stage in enumerate(self.plan.stages) if stage.pooled}

    # -- errors and shutdown -------------------------------------------------------------------------

    def _locate(self, ids: list[int]) -> str:
        if not ids:
            return "an unknown sample"
        dataset = self._datasets[ids[DATASET]]
        names = getattr(dataset, "shard_names", None)
        shard = names[ids[SHARD]] if names is not None and ids[SHARD] < len(names) else ids[SHARD]
        return f"dataset {dataset.name!r}, shard {shard!r}, row {ids[ROW]}"

    def _explain(self, fault: RecordFault) -> Exception:
        message = (
            f"operator {fault.operator!r} failed on {self._locate(fault.ids)}: {fault.cause}. "
            "Fix the record, or let it pass with on_error='skip' or 'quarantine'."
        )
        error = (RecordError if isinstance(fault.original, DataError) else OperatorError)(message)
        if fault.original is None or fault.original.__traceback__ is None:
            error.add_note(fault.trace)
        return error

    def close(self) -> None:
        """Stop everything; see the module's contract."""
        if self._closed:
            return
        self._closed, began = True, time.monotonic()
        self.buffer.close()
        # Another thread may be inside it, in a user's function; it takes nothing more.
        if self._inline is not None and inspect.getgeneratorstate(self._inline) != inspect.GEN_RUNNING:
            self._inline.close()
        self._pools.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, began + JOIN_S - time.monotonic()))
        self._faults.close()
        _live.discard(self)

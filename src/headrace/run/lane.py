"""One lane: the chain of stages from the work source to finished batches.

Each stage is a generator over messages. Stateless stages hand blocks to workers through an ordered window and let cuts pass at
their place; stateful operators run here, on the thread that drives the lane. Pulling a batch from the end of the chain pulls
just what it needs from the beginning, so a lane is bounded by its windows and needs no queue of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from headrace.core.block import Block, Origin
from headrace.core.checkpoint import LaneState, OperatorState, Span
from headrace.core.digest import digested
from headrace.core.message import Cut, End, Item, Message
from headrace.core.op import Accumulator
from headrace.core.plan import Node, Plan, Stage
from headrace.errors import CheckpointError, OperatorError
from headrace.observe.counters import Counters, OperatorCounters
from headrace.ops.batch import Batch
from headrace.ops.returning import InTurn
from headrace.run.account import Account
from headrace.run.change import Changed, Successive, Transitions
from headrace.run.feed import LaneFeed, LaneSource
from headrace.run.pools import Pool
from headrace.run.released import recorded
from headrace.run.restore import locate, refetch, refetch_in_turn
from headrace.run.stage import StageResult
from headrace.run.stretch import Stretch
from headrace.run.undelivered import Held


@dataclass(slots=True)
class Workshop:
    """What the lanes of an engine share: the plan, the workers of each stage, and where results are counted."""

    plan: Plan
    pools: list[Pool]
    counters: Counters
    settle: Callable[[StageResult, Stage], Block]
    windows: list[int]
    lane_source: Callable[[int], LaneSource]
    groups: Callable[[int], Iterator[int]]
    """To whom the batches of a lane are delivered, from where the run begins."""
    keep_last: bool = False
    digested: bool = False
    stats: dict[int, OperatorCounters] = field(default_factory=dict)
    stretch: Stretch = field(init=False)

    def __post_init__(self) -> None:
        """Watch for a long stretch without a batch."""
        self.stretch = Stretch(self.counters)


class Lane:
    """Drives one lane from a fresh start or from a saved state."""

    def __init__(self, lane: int, shop: Workshop, start: LaneState) -> None:
        self.lane, self._shop, self._start = lane, shop, start
        self.sources: dict[int, dict[str, Any]] = dict(start.sources)
        self.released: dict[int, list[Span]] = {}
        """With deterministic=False: the order in which blocks were released, by the position of the cut before them."""
        self._caught_up = not start.taken or bool(start.released)
        self.last: Block | Item | None = None
        """The newest batch, delivered or not, where somebody wants to repeat it (`keep_last`)."""
        self._source = shop.lane_source(lane)
        self.feed = LaneFeed(lane, self._source, shop.plan, self.sources)
        self.account = Account(shop.counters, start, shop.groups(lane))

    def messages(self) -> Iterator[Message]:
        """Batches (or single records) and cuts, after those that were delivered before the state was saved."""
        start = self._start
        changed = Changed(self._shop.plan, start.changes)
        accumulators, held = self._restored(changed)
        self._source.load(self.sources[start.chunk])
        stream: Iterator[Message] = self.feed.messages(
            start.chunk, start.offset, start.position, self.account.hand_out, start.changes
        )
        if not changed.stages:
            stream, taken = self._chain(0, accumulators, stream), start.taken_in_all
        else:
            stream, taken = self._changed_on_purpose(changed, accumulators, held, stream), start.taken
        if self._shop.keep_last:
            stream = self._remembering(stream)
        return self._after(stream, taken)

    def _remembering(self, stream: Iterator[Message]) -> Iterator[Message]:
        for message in stream:
            if isinstance(message, (Block, Item)):
                self.last = message
            yield message

    def _chain(
        self,
        begin: int,
        accumulators: Mapping[int, Accumulator],
        stream: Iterator[Message],
        first: Sequence[Block] = (),
        end: int | None = None,
    ) -> Iterator[Message]:
        """A stream through stages `begin` to `end`; to the last, and so to what is delivered, by default.

        `first` has left the operator of the first stage already.
        """
        plan = self._shop.plan
        for index, stage in list(enumerate(plan.stages))[begin:end]:
            node = stage.nodes[0]
            if self._shop.digested and isinstance(node.op, Batch) and index == len(plan.stages) - 1:
                stream = digested(stream)
            if node.stateful:
                stream = self._stateful(index, accumulators[index], stream, first if index == begin else ())
            elif index == 0 and stage.pooled and not plan.deterministic:
                stream = self._as_finished(stream)
            else:
                stream = self._stateless(index, stream)
        return stream if plan.batched or end is not None else _one_by_one(stream)

    def _after(self, stream: Iterator[Message], taken: int) -> Iterator[Message]:
        """Without the first `taken` deliverables, which are counted from the cut that the run began at, and cuts among them."""
        for message in stream:
            if isinstance(message, (Block, Item)):
                self.account.deliver(message.origin)
                self._shop.stretch.ended()
                if taken:
                    taken -= 1
                    continue
            elif isinstance(message, Cut):
                self.account.passed(message)
                self._shop.stretch.grows()
                if taken:
                    continue
            self._caught_up = True
            yield message
        self.account.close()

    # -- restoring -----------------------------------------------------------------------------------

    def _restored(self, changed: Changed) -> tuple[dict[int, Accumulator], dict[int, Held]]:
        """Accumulators by stage as they stood at the cut, and what they were given to hold."""
        made = changed.accumulators(0, 0, self.lane)
        stages = sorted(made)
        held: dict[int, Held] = {}
        saved = self._start.operators
        if saved and len(saved) != len(stages):
            names = ", ".join(self._shop.plan.stages[stage].nodes[0].op.name for stage in stages)
            raise CheckpointError(
                f"the checkpoint has {len(saved)} stateful operators, the pipeline {len(stages)}: {names}"
            )
        for stage, state in zip(stages, saved, strict=False):
            origin = locate(state.held, self._source, self.sources)
            before, in_turn = changed.before(stage), getattr(made[stage], "restore_in_turn", None)
            rows = None
            if in_turn is not None and origin.rows is None:
                in_turn(state.state, origin, self._reader_in_turn(before))
            else:
                rows = refetch(origin, before, self.lane, self._run_again)
                made[stage].restore(state.state, rows)
            held[stage] = Held(origin, rows)
        return made, held

    def _run_again(self, nodes: Sequence[Node], blocks: list[Block]) -> list[Block]:
        """Apply stateless operators to blocks, with their stages' own workers."""
        return list(self._stream_again(nodes, iter(blocks)))

    def _stream_again(self, nodes: Sequence[Node], blocks: Iterator[Block]) -> Iterator[Block]:
        """The same as a stream. It neither counts nor logs: that was done when the records came first."""

        def unwrapped(results: Iterable[StageResult]) -> Iterator[Block]:
            for result in results:
                if result.failure is not None:
                    raise result.failure
                yield result.block

        wanted = {id(node) for node in nodes}
        for index, stage in enumerate(self._shop.plan.stages):
            if id(stage.nodes[0]) in wanted:
                blocks = unwrapped(self._shop.pools[index](blocks, self._shop.windows[index]))
        return blocks

    def _reader_in_turn(self, before: Sequence[Node]) -> InTurn:
        return lambda origins: refetch_in_turn(origins, before, self.lane, self._stream_again)

    # -- operators changed on purpose ----------------------------------------------------------------

    def _changed_on_purpose(
        self, changed: Changed, accumulators: dict[int, Accumulator], held: dict[int, Held], stream: Iterator[Message]
    ) -> Iterator[Message]:
        """What follows the batches that operators gave as they were before. Those come once more, and are not counted again."""

        def fetch(origin: Origin, before: Sequence[Node]) -> Block | None:
            return refetch(origin, before, self.lane, self._run_again)

        rests = {stage: changed.rest_at_cut(stage, accumulators, held, fetch) for stage in changed.stages}
        transitions = Transitions(changed, self.lane, self._chain, accumulators, rests, self.account)
        yield from transitions.messages(self._chain(0, accumulators, stream, end=changed.stages[0]))

    # -- stages --------------------------------------------------------------------------------------

    def _stateless(self, index: int, upstream: Iterator[Message]) -> Iterator[Message]:
        """Blocks through the stage's workers; cuts pass after everything that was submitted before them."""
        passing: deque[tuple[int, Message]] = deque()
        submitted = 0
        if index == 0 and self._start.released:
            upstream = recorded(upstream, self._start.released)

        def tasks() -> Iterator[Block]:
            nonlocal submitted
            for message in upstream:
                if isinstance(message, Block):
                    submitted += 1
                    yield message
                else:
                    passing.append((submitted, message))

        for released, result in enumerate(self._shop.pools[index](tasks(), self._shop.windows[index])):
            while passing and passing[0][0] <= released:
                yield passing.popleft()[1]
            if isinstance(result, Item):
                yield result
            else:
                yield from self._settled([result], index)
        for _, message in passing:
            yield message

    def _as_finished(self, upstream: Iterator[Message]) -> Iterator[Message]:
        """Blocks of the first stage as they finish. A cut is a barrier, and the order since the last one is kept.

        After a restore the interval that was begun is released in its recorded order first. What a deterministic run had begun
        goes on in order until all that it delivered has come again. So does a run that was changed on purpose: as long as its
        checkpoints rest on the cut before the change, they know only the order behind that cut.
        """
        barrier: Message | None = None
        begun = self._start.changes[-1].until if self._start.changes else 0

        def interval() -> Iterator[Block]:
            nonlocal barrier
            for message in upstream:
                if not isinstance(message, Block):
                    barrier = message
                    return
                yield message

        pool, window = self._shop.pools[0], self._shop.windows[0]
        position = self._start.position
        log = self.released.setdefault(position, list(self._start.released))
        tasks = interval()
        if log:
            upstream = recorded(upstream, list(log))
            count = len(log)
            tasks = interval()
            yield from self._settled(pool(islice(tasks, count), window), 0)
        while True:
            for result in pool(tasks, window, position < begun or not self._caught_up):
                log.append(result.span)
                yield from self._settled([result], 0)
            if barrier is None:
                return
            yield barrier
            if not isinstance(barrier, Cut):
                return
            position = barrier.position
            log = self.released.setdefault(position, [])
            barrier, tasks = None, interval()

    def _settled(self, results: Iterable[StageResult], index: int) -> Iterator[Block]:
        for result in results:
            self.account.finished(result, index)
            block = self._shop.settle(result, self._shop.plan.stages[index])
            if len(block):
                yield block
            if result.failure is not None:
                raise result.failure

    def _stateful(
        self, stage: int, accumulator: Accumulator, upstream: Iterator[Message], first: Sequence[Block]
    ) -> Iterator[Message]:
        """Blocks through the accumulator; a cut takes the accumulator's state along. `first` has left it already."""
        node = self._shop.plan.stages[stage].nodes[0]
        count, clock = self._shop.stats[id(node)], time.perf_counter_ns
        successive = accumulator if isinstance(accumulator, Successive) else None
        yield from self._counted([*first, *(successive.reach(self._start.position) if successive else ())], stage)
        for message in upstream:
            before, rows_in = clock(), 0
            match message:
                case Block():
                    rows_in = len(message)
                    out = accumulator.push(message)
                case Cut():
                    out = accumulator.end() if message.end else accumulator.flush() if message.flush else []
                    if successive is not None:
                        out += successive.reach(message.position)
                case End():
                    out = accumulator.end()
                case _:
                    raise OperatorError(f"{node.op.name} cannot follow map_batch")
            rows_out = sum(map(len, out))
            count.add(rows_in, rows_out, clock() - before)
            yield from self._counted(out, stage)
            if isinstance(message, Cut):
                yield message.with_state(OperatorState(accumulator.state(), accumulator.held()))
            elif isinstance(message, End):
                yield message

    def _counted(self, blocks: Sequence[Block], stage: int) -> Iterator[Block]:
        """Blocks that have rows, with their drops on the run's account."""
        for block in blocks:
            if block.drops:
                self.account.drop(block.drops, stage)
                block.drops = ()
            if len(block):
                yield block


def _one_by_one(stream: Iterator[Message]) -> Iterator[Message]:
    """Rows as blocks of one, for pipelines without `batch`."""
    for message in stream:
        if isinstance(message, Block) and len(message) != 1:
            for i in range(len(message)):
                yield message.slice(i, i + 1)
        else:
            yield message

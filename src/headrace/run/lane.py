"""One lane: the chain of stages from the work source to finished batches.

Each stage is a generator over messages. Stateless stages hand blocks to workers through an ordered window and let cuts pass at
their place; stateful operators run here, on the thread that drives the lane. Pulling a batch from the end of the chain pulls
just what it needs from the beginning, so a lane is bounded by its windows and needs no queue of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from headrace.core.block import CHUNK, OFFSET, Block, concat_blocks
from headrace.core.checkpoint import LaneState, OperatorState, Span
from headrace.core.message import Cut, End, Item, Message
from headrace.core.op import Accumulator
from headrace.core.plan import Node, Plan, Stage
from headrace.errors import CheckpointError, OperatorError
from headrace.observe.counters import Counters, OperatorCounters
from headrace.run.feed import LaneFeed, LaneSource
from headrace.run.pools import Pool
from headrace.run.restore import locate, refetch
from headrace.run.stage import StageResult


@dataclass(slots=True)
class Workshop:
    """What the lanes of an engine share: the plan, the workers of each stage, and where results are counted."""

    plan: Plan
    pools: list[Pool]
    counters: Counters
    settle: Callable[[StageResult, Stage], Block]
    windows: list[int]
    lane_source: Callable[[int], LaneSource]
    keep_last: bool = False
    stats: dict[int, OperatorCounters] = field(default_factory=dict)


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

    def messages(self) -> Iterator[Message]:
        """Batches (or single records) and cuts, after those that were delivered before the state was saved."""
        start = self._start
        accumulators = self._accumulators()
        self._source.load(self.sources[start.chunk])
        stream: Iterator[Message] = self.feed.messages(
            start.chunk, start.offset, start.position, self._shop.counters.hand_out
        )
        for index, stage in enumerate(self._shop.plan.stages):
            node = stage.nodes[0]
            if node.stateful:
                stream = self._stateful(node, accumulators[id(node)], stream)
            elif index == 0 and stage.pooled and not self._shop.plan.deterministic:
                stream = self._as_finished(stage, stream)
            else:
                stream = self._stateless(index, stage, stream)
        if not self._shop.plan.batched:
            stream = _one_by_one(stream)
        if self._shop.keep_last:
            stream = self._remembering(stream)
        return self._after(stream, start.taken)

    def _remembering(self, stream: Iterator[Message]) -> Iterator[Message]:
        for message in stream:
            if isinstance(message, (Block, Item)):
                self.last = message
            yield message

    def _after(self, stream: Iterator[Message], taken: int) -> Iterator[Message]:
        for message in _after(stream, taken):
            self._caught_up = True
            yield message

    # -- restoring -----------------------------------------------------------------------------------

    def _accumulators(self) -> dict[int, Accumulator]:
        nodes = self._shop.plan.nodes
        stateful = [node for node in nodes if node.stateful]
        made = {id(node): node.op.accumulator(self.lane) for node in stateful}
        saved = self._start.operators
        if not saved:
            return made
        if len(saved) != len(stateful):
            raise CheckpointError(
                f"the checkpoint has {len(saved)} stateful operators, the pipeline {len(stateful)}: "
                + ", ".join(node.op.name for node in stateful)
            )
        for node, state in zip(stateful, saved, strict=True):
            before = nodes[: next(i for i, n in enumerate(nodes) if n is node)]
            held = locate(state.held, self._source, self.sources)
            made[id(node)].restore(state.state, refetch(held, before, self.lane, self._run_again))
        return made

    def _run_again(self, nodes: Sequence[Node], blocks: list[Block]) -> list[Block]:
        """Apply stateless operators to blocks, with their stages' own workers."""
        wanted = {id(node) for node in nodes}
        for index, stage in enumerate(self._shop.plan.stages):
            if id(stage.nodes[0]) in wanted:
                results = self._shop.pools[index](blocks, self._shop.windows[index])
                blocks = [result.block for result in results]
        return blocks

    # -- stages --------------------------------------------------------------------------------------

    def _stateless(self, index: int, stage: Stage, upstream: Iterator[Message]) -> Iterator[Message]:
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
                yield from self._settled([result], stage)
        for _, message in passing:
            yield message

    def _as_finished(self, stage: Stage, upstream: Iterator[Message]) -> Iterator[Message]:
        """Blocks of the first stage as they finish. A cut is a barrier, and the order since the last one is kept.

        After a restore the interval that was begun is released in its recorded order first. What a deterministic run had begun
        goes on in order until all that it delivered has come again.
        """
        barrier: Message | None = None

        def interval() -> Iterator[Block]:
            nonlocal barrier
            for message in upstream:
                if not isinstance(message, Block):
                    barrier = message
                    return
                yield message

        pool, window = self._shop.pools[0], self._shop.windows[0]
        log = self.released.setdefault(self._start.position, list(self._start.released))
        tasks = interval()
        if log:
            upstream = recorded(upstream, list(log))
            count = len(log)
            tasks = interval()
            yield from self._settled(pool(islice(tasks, count), window), stage)
        while True:
            for result in pool(tasks, window, not self._caught_up):
                log.append(result.span)
                yield from self._settled([result], stage)
            if barrier is None:
                return
            yield barrier
            if not isinstance(barrier, Cut):
                return
            log = self.released.setdefault(barrier.position, [])
            barrier, tasks = None, interval()

    def _settled(self, results: Iterable[StageResult], stage: Stage) -> Iterator[Block]:
        for result in results:
            block = self._shop.settle(result, stage)
            if len(block):
                yield block
            if result.failure is not None:
                raise result.failure

    def _stateful(self, node: Node, accumulator: Accumulator, upstream: Iterator[Message]) -> Iterator[Message]:
        """Blocks through the accumulator; a cut takes the accumulator's state along."""
        count, counters = self._shop.stats[id(node)], self._shop.counters
        clock = time.perf_counter_ns
        for message in upstream:
            before, rows_in = clock(), 0
            match message:
                case Block():
                    rows_in = len(message)
                    out = accumulator.push(message)
                case Cut():
                    out = accumulator.flush() if message.flush else []
                case End():
                    out = accumulator.end()
                case _:
                    raise OperatorError(f"{node.op.name} cannot follow map_batch")
            rows_out = sum(map(len, out))
            count.add(rows_in, rows_out, clock() - before)
            for block in out:
                if block.drops:
                    counters.drop(block.drops)
                    block.drops = ()
                if len(block):
                    yield block
            if isinstance(message, Cut):
                yield message.with_state(OperatorState(accumulator.state(), accumulator.held()))
            elif isinstance(message, End):
                yield message


def recorded(upstream: Iterator[Message], spans: Sequence[Span]) -> Iterator[Message]:
    """The stream with its first samples as blocks of `spans`, in that order, before those that were left out between them.

    Cuts inside the recorded part (of a run that now cuts more often) are passed over.
    """
    last = max((chunk, offset + count) for chunk, offset, count in spans)
    blocks: list[Block] = []
    for message in upstream:
        if not isinstance(message, Block):
            if isinstance(message, Cut) and _reach(blocks) < last:
                continue
            yield from (block for part in regroup(blocks, spans) for block in part)
            yield message
            break
        blocks.append(message)
        if _reach(blocks) >= last:
            yield from (block for part in regroup(blocks, spans) for block in part)
            break
    yield from upstream


def _reach(blocks: Sequence[Block]) -> tuple[int, int]:
    """Chunk and offset behind the last sample of these blocks."""
    if not blocks:
        return (-1, 0)
    chunk, offset = blocks[-1].origin.ids[-1, [CHUNK, OFFSET]].tolist()
    return (chunk, offset + 1)


def regroup(blocks: Sequence[Block], spans: Sequence[Span]) -> tuple[list[Block], list[Block]]:
    """The samples of `blocks` as blocks of these spans, and the others as they were."""
    whole = concat_blocks(blocks)
    place = {(c, o): i for i, (c, o) in enumerate(whole.origin.ids[:, [CHUNK, OFFSET]].tolist())}
    left = np.ones(len(whole), bool)
    first = []
    for chunk, offset, count in spans:
        at = place[chunk, offset]
        first.append(whole.slice(at, at + count))
        left[at : at + count] = False
    runs = np.flatnonzero(np.diff(np.concatenate([[False], left, [False]]).astype(np.int8)))
    return first, [whole.slice(a, b) for a, b in runs.reshape(-1, 2).tolist()]


def _one_by_one(stream: Iterator[Message]) -> Iterator[Message]:
    """Rows as blocks of one, for pipelines without `batch`."""
    for message in stream:
        if isinstance(message, Block) and len(message) != 1:
            for i in range(len(message)):
                yield message.slice(i, i + 1)
        else:
            yield message


def _after(stream: Iterator[Message], taken: int) -> Iterator[Message]:
    """Without the first `taken` deliverables, and without cuts among them: `taken` counts from the cut that the run began at."""
    for message in stream:
        if taken and isinstance(message, (Block, Item)):
            taken -= 1
        elif not (taken and isinstance(message, Cut)):
            yield message

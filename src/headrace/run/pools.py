"""The workers of each stage: one executor a stage, or a plain call on the driving thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.core.block import Block
from headrace.core.message import Item
from headrace.core.plan import Node, Plan, Stage
from headrace.errors import OperatorError
from headrace.ops.map import function_name
from headrace.options import OnError, RuntimeOptions
from headrace.run.executor import SLAB_BYTES, Executor, TaskStream, close_all, make_executor, ordered_map
from headrace.run.stage import StageWorker
from headrace.run.tune import Throttle
from headrace.types import SampleBatch


class Pool(Protocol):
    """A stage's workers."""

    def __call__(self, tasks: Iterable[Any], window: int, ordered: bool = True) -> Iterator[Any]:
        """Results of `tasks`, at most `window` of them in flight."""
        ...


@dataclass(frozen=True, slots=True)
class BatchWorker:
    """Builds the function of a stage of `map_batch` operators: from a batch to an `Item`."""

    functions: tuple[Callable[[Any], Any], ...]
    drop_none: tuple[bool, ...]

    def __call__(self) -> Callable[[Block], Item]:
        """Nothing to set up."""
        return self._apply

    def _apply(self, block: Block) -> Item:
        value: Any = SampleBatch.from_block(block)
        for fn, drop in zip(self.functions, self.drop_none, strict=True):
            try:
                result = fn(value)
            except Exception as error:  # a user's function raises anything; it gets a name and a place
                raise OperatorError(f"map_batch({function_name(fn)}) raised {type(error).__name__}: {error}") from error
            if result is None and drop:
                return Item(block.lane, None, block.origin)
            value = value if result is None else result
        return Item(block.lane, value, block.origin)


class Pools:
    """`all[i]` runs the tasks of stage `i`: `all[i](tasks, window, ordered)` yields results, in order or as they finish."""

    def __init__(self, plan: Plan, options: RuntimeOptions) -> None:
        self._plan, self._options = plan, options
        self._executors: dict[int, Executor] = {}
        self._throttles: dict[int, Throttle] = {}
        self._streams: dict[int, list[TaskStream[Any, Any]]] = {}
        self.all: list[Pool] = []
        for index, stage in enumerate(plan.stages):
            self.all.append(self._runner(index, stage))

    def _runner(self, index: int, stage: Stage) -> Pool:
        if stage.nodes[0].stateful:
            return _refuse
        if not stage.pooled:
            made: list[Any] = []

            def call(task: Any) -> Any:
                if not made:
                    made.append(self._factory(stage)())
                return made[0](task)

            return lambda tasks, window, ordered=True: map(call, tasks)
        streams: list[TaskStream[Any, Any]] = []
        self._streams[index] = streams

        def stream(tasks: Iterable[Any], window: int, ordered: bool = True) -> Iterator[Any]:
            made = ordered_map(self._executors[index], tasks, window, ordered=ordered)
            if self._tuned:
                streams[:] = [stream for stream in streams if not stream.over]
                streams.append(made)
            return made

        return stream

    def _factory(self, stage: Stage) -> Callable[[], Callable[[Block], Any]]:
        if stage.nodes[0].post_batch:
            return BatchWorker(tuple(n.op.fn for n in stage.nodes), tuple(n.op.drop_none for n in stage.nodes))
        return StageWorker(tuple(n.op for n in stage.nodes), tuple(self._policy(n) for n in stage.nodes))

    def _policy(self, node: Node) -> OnError:
        return node.on_error or self._options.on_error

    def start(self) -> None:
        """Start the workers."""
        for index, stage in enumerate(self._plan.stages):
            if stage.pooled:
                factory = self._factory(stage)
                if self._tuned and stage.runner == "threads":
                    factory = self._throttled(index, factory, stage.workers)
                self._executors[index] = make_executor(
                    stage.runner,
                    factory,
                    self._most(stage),
                    name=stage.label,
                    max_retries=self._options.max_worker_retries,
                    describe=describe_block,
                    start_method=self._options.start_method,
                    slab_bytes=SLAB_BYTES if self._options.shm_enabled else 0,
                )

    @property
    def _tuned(self) -> bool:
        return self._plan.allocation == "autotune"

    def _most(self, stage: Stage) -> int:
        """Workers to start: with autotune, as many as the stage could ever be given."""
        pooled = [s.workers for s in self._plan.stages if s.pooled]
        return sum(pooled) - len(pooled) + 1 if self._tuned else stage.workers

    def _throttled(self, index: int, factory: Callable[[], Any], workers: int) -> Callable[[], Any]:
        throttle = self._throttles[index] = Throttle(workers)
        return lambda: throttle.wrap(factory())

    def allot(self, index: int, workers: int) -> None:
        """Let `workers` workers of a stage work: threads wait their turn, processes get fewer blocks at a time."""
        if index in self._throttles:
            self._throttles[index].set(workers)
        for stream in self._streams[index]:
            if not stream.window.limit:
                continue  # closed
            stream.window.limit = 2 * workers + 2 if index in self._throttles else workers + 1

    def close(self) -> None:
        """End the workers, and those of a step pipeline that is read: all at the same time."""
        began = time.monotonic()
        for executor in self._executors.values():
            executor.stop()
        close_all([self._resting(), *(executor.ending(began) for executor in self._executors.values())])

    def _resting(self) -> Iterator[None]:
        yield
        self._plan.nodes[0].op.readers.rest()  # threads of ours may be waiting for those workers


def _refuse(tasks: Iterable[Any], window: int, ordered: bool = True) -> Iterator[Any]:
    raise AssertionError("a stateful stage has no workers")


def describe_block(block: Any) -> str:
    """Which samples a task holds, for errors about workers."""
    ids = block.origin.ids
    if not len(ids):
        return "an empty block"
    first, last = ids[0].tolist(), ids[-1].tolist()
    return (
        f"{len(ids)} samples, from dataset {first[0]} shard {first[1]} row {first[2]} "
        f"to dataset {last[0]} shard {last[1]} row {last[2]}"
    )

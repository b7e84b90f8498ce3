"""The step pipeline that users touch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import fields
from time import monotonic
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from headrace.errors import Cancelled, UnknownOptionError
from headrace.run.executor import Paced, WorkerStatistics, open_executor
from headrace.steps import build
from headrace.steps.auto import AtHome
from headrace.steps.evidence import Verdict
from headrace.steps.flow import Cancellation, Flow
from headrace.steps.outputs import Outputs
from headrace.steps.pump import Pump
from headrace.steps.settings import Mode, OnError, Runner, Settings, Workers, assigner, make_steps
from headrace.steps.shuffle import shuffled
from headrace.steps.source import IterableSource
from headrace.steps.statistics import Ledger, Statistics, bottleneck
from headrace.steps.turn import Turn

if TYPE_CHECKING:
    from headrace.io import Dataset


class Options(TypedDict, total=False):
    """The keyword arguments of `Pipeline`; see there."""

    num_workers: Workers
    mode: Mode
    runner: Runner
    ordered: bool
    on_error: OnError
    max_retries: int
    timeout: float | None
    assign: Any
    shuffle_buffer: int
    seed: int | None
    max_pending: int
    slab_bytes: int
    zero_copy: bool
    progress: bool


class Pipeline:
    """Runs any Python items through functions, in worker processes, threads, or right here.

    >>> with Pipeline([lambda x: x + 1, lambda x: 2 * x], runner="inline") as pipeline:
    ...     list(pipeline.map(range(4)))
    [2, 4, 6, 8]

    A step is a function of one item; a generator function, which yields any number of outputs for an item; or an object
    that can be called and may have `setup()` and `teardown()`, run once in each worker. `None` is a value like any
    other; `DROP` is no output.

    Options:

    * `num_workers`: a number, in staged mode also one for each step, or "auto": find out from the first items whether
      processes pay at all, and use one for each core if they do. `explain()` says what it found.
    * `mode`: "fused" (a worker runs all steps of an item) or "staged" (each step has its own workers).
    * `runner`: "process", "threads" or "inline".
    * `ordered`: outputs in the order of their inputs, or as finished.
    * `on_error`: "raise" the step's own exception at its item's place; "skip" the item and count it; "return" a `Failed`
      in its place.
    * `max_retries`: how often an item is tried again whose worker was killed.
    * `timeout`: seconds an item may take; its worker is replaced.
    * `assign`: "any", or a function from an item to its key: all items of a key go to one worker, in order.
    * `shuffle_buffer`, `seed`: shuffle the outputs of `map` and of iteration. With `seed`, `random` and `numpy.random`
      are also seeded for each item, so that random steps do not depend on the workers, and set back to what they were for the
      caller; threads then take turns, so with a `seed` they cannot have a `timeout`.
    * `slab_bytes`: shared memory for large arrays, for each worker and direction. `zero_copy`: outputs are read-only views
      of it instead of copies; views that are kept take up its room.
    * `max_pending`: how many enqueued items may wait. `progress`: show a bar.
    """

    def __init__(self, steps: Iterable[Callable[[Any], Any]], **options: Unpack[Options]) -> None:
        """Check everything; nothing starts yet."""
        known = [field.name for field in fields(Settings) if field.name != "steps"]
        for name in options:
            if name not in known:
                raise UnknownOptionError("option of a step pipeline", name, known)
        options = options.copy()
        options["assign"] = assigner(options.get("assign"))
        self.settings = Settings(make_steps(steps), **options)
        names = [[step.name for step in stage] for stage, _ in self.settings.groups]
        self._ledger = Ledger(names)
        self._executor: Paced | None = None
        self._home: Paced | None = None  # of `num_workers="auto"`, for the first items
        self._kind: str = self.settings.runner
        self._flows: list[Flow] = []
        self._pump: Pump | None = None
        self._maps = 0  # iterations of `map` under way
        self._turn = Turn(self._wake)
        self._entered = False
        self._verdict: Verdict | None = None
        self._last_workers = WorkerStatistics()

    # -- life -------------------------------------------------------------------------------------------------

    def start(self) -> Pipeline:
        """Start the workers. `map` and `emit` do so by themselves."""
        self._entered = True
        self._open(self.settings.runner)
        return self

    def close(self) -> None:
        """End everything: flows, emitters, workers. Nothing is left two seconds later.

        Whoever still asks for outputs, in whatever thread, is told that the pipeline is closed.
        """
        self._turn.closed = True
        with self._turn.closing() as alone:
            for flow in list(self._flows) if alone else ():  # others may be in the middle of a step of theirs
                flow.close()
            if self._pump is not None:
                self._pump.close()
        self._shut()

    def cancel(self) -> None:
        """Make every iteration raise `Cancelled`; any thread and any signal handler may call it."""
        with self._turn.news:
            for flow in list(self._flows):
                flow.cancelled = True
            if self._pump is not None:
                self._pump.cancel()
            self._turn.ask()

    def __enter__(self) -> Pipeline:
        """Keep the workers between uses, until the end of the block."""
        self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    # -- use --------------------------------------------------------------------------------------------------

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """Outputs for `items`, lazily: nothing is pulled before workers have room for it, so `items` may be endless.

        `items` is read in the thread that asks for outputs. Leaving the loop early ends the work.
        """
        total = len(items) if hasattr(items, "__len__") else None  # type: ignore[arg-type]
        return self._finish(self._map(items), total)

    def enqueue(self, item: Any) -> None:
        """Give one item; never blocks. Any thread may call it once the pipeline is started.

        Errors of steps and of readers are for those who take outputs. This raises only what concerns this item, or a
        pipeline that can take no more.
        """
        self._open_queue().put(item)

    def dequeue(self, timeout: float | None = None) -> Any:
        """The next output of what was enqueued or emitted.

        Waits while any input is under way, with a `timeout` also for what others may yet enqueue. Raises `queue.Empty` if
        there is nothing to wait for, or the time is over; the error of an item, or of a reader, in its place.
        """
        return self._open_queue().get(timeout)

    def __iter__(self) -> Iterator[Any]:
        """Outputs of what was enqueued and emitted; ends when every emitter has ended and all outputs are out."""
        return self._finish(self._drain(), None)

    def attach(self, make: Callable[[Paced, str], Any]) -> None:
        """Add a source that `make(executor, runner)` builds; see `emit`."""
        pump = self._open_queue()
        pump.attach(lambda: make(self._open(self.settings.runner), self._kind))

    def dataset(self, name: str, items: Sequence[Any], *, field: str | None = None) -> Dataset:
        """A dataset for `headrace.Pipeline` whose row `k` is what the steps make of `items[k]`; see `headrace.steps.dataset`.

        A row is a mapping, or any other value (an array, say) under the name `field`. This pipeline itself runs nothing
        for it and may be closed; each data pipeline that reads the dataset has workers of its own.
        """
        from headrace.steps.dataset import make_dataset

        return make_dataset(self.settings, name, items, field)

    # -- what it says -----------------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Counts until now."""
        ledger = self._ledger
        executor = self._executor
        workers = executor.statistics() if executor is not None else self._last_workers
        steps = ledger.steps()
        elapsed = monotonic() - ledger.started
        count = sum(number for _, number in self.settings.groups) if self._kind != "inline" else 1
        flows = self._flows if self._pump is None else [self._pump, *self._flows]
        stages = [stage for flow in list(flows) for stage in flow.stages]
        return Statistics(
            received=ledger.received,
            finished=ledger.finished,
            delivered=ledger.delivered,
            skipped=ledger.skipped,
            in_flight=ledger.received - ledger.finished,
            queue_depth=tuple(len(stage.window) for stage in stages),
            batch_size=tuple(stage.size.items for stage in stages) or ledger.last_sizes,
            errors=tuple(ledger.errors),
            steps=steps,
            workers=workers,
            elapsed=elapsed,
            bottleneck=bottleneck(steps, workers.busy, ledger.active * count),
        )

    def explain(self) -> str:
        """The plan, and after a run what it took."""
        from headrace.steps.explain import explain

        return explain(self.settings, self.statistics(), self._verdict)

    # -- inside -----------------------------------------------------------------------------------------------

    def _finish(self, lists: Generator[Iterable[Any], None, None], total: int | None) -> Iterator[Any]:
        settings = self.settings
        outputs: Iterator[Any] = Outputs.of(lists)
        if settings.shuffle_buffer and settings.seed is not None:
            outputs = shuffled(outputs, settings.shuffle_buffer, settings.seed)
        if settings.progress:
            from headrace.steps.progress import shown

            ledger, name = self._ledger, " > ".join(step.name for step in settings.steps)
            outputs = shown(outputs, total, name, lambda: ledger.finished)
        return outputs

    def _map(self, items: Iterable[Any]) -> Generator[list[Any], None, None]:
        with self._turn.news:
            self._turn.check()
            self._maps += 1
        try:
            first = 0
            with contextlib.closing(IterableSource(items)) as source:
                if self.settings.may_stay_home and self._executor is None:
                    first = yield from self._begin_at_home(source)
                if not source.ended or source.error is not None:
                    yield from self._run(self._open(self.settings.runner), source, first)
        finally:
            with self._turn.news:
                self._maps -= 1
            self._shut(if_unused=True)

    def _begin_at_home(self, source: IterableSource) -> Generator[list[Any], None, int]:
        """`num_workers="auto"`: run here as long as that is right; returns the index of the next item."""
        home = AtHome(self._open_home, self._run, source, self._ledger, self._verdict)
        if self._verdict is None:
            yield from home.decide()
            self._verdict = home.verdict
        if not home.verdict.processes:
            self._kind = "inline"
            yield from home.stay()
            self._verdict = home.verdict
        if not source.ended:
            yield from home.meanwhile(self._open(self.settings.runner).ready)
            self._leave_home()
        return home.index

    def _open_home(self) -> Paced:
        """The executor in this process: one for all iterations, so that steps are set up and torn down once."""
        with self._turn.news:
            self._turn.check()
            if self._home is None:
                self._home = open_executor("inline", build.config(self.settings))
                self._last_workers = self._home.statistics()
            return self._home

    def _leave_home(self) -> None:
        with self._turn.news:
            if self._home is None or self._maps > 1:  # another iteration may be there
                return
            home, self._home = self._home, None
        home.close()

    def _run(
        self, executor: Paced, source: Any, first: int, enough: Callable[[], bool] | None = None
    ) -> Generator[list[Any], None, int]:
        """Run a flow; returns the number of its inputs."""
        flow = Flow(
            self._turn,
            executor,
            build.stages(self.settings, self._ledger, executor.background),
            source,
            first,
            self._ledger,
        )
        self._flows.append(flow)
        outputs = flow.outputs(enough)
        began = monotonic()
        try:
            for out in outputs:
                self._ledger.delivered += len(out)
                yield out
            return flow.stages[0].window.submitted
        except Cancellation:
            raise Cancelled("the pipeline was cancelled") from None
        finally:
            outputs.close()
            self._ledger.active += monotonic() - began
            self._ledger.last_sizes = tuple(stage.size.items for stage in flow.stages)
            with contextlib.suppress(ValueError):  # `close` of the pipeline has removed it
                self._flows.remove(flow)

    def _drain(self) -> Generator[Iterator[Any], None, None]:
        yield from self._open_queue().lists()

    def _open_queue(self) -> Pump:
        if self._pump is not None:
            return self._pump
        with self._turn.news:
            executor = self._open(self.settings.runner)
            if self._pump is None:
                stages = build.stages(self.settings, self._ledger, executor.background)
                self._pump = Pump(self._turn, executor, stages, self.settings.max_pending, self._ledger)
            return self._pump

    def _open(self, kind: str) -> Paced:
        with self._turn.news:
            self._turn.check()
            if self._executor is None:
                self._kind = kind
                self._executor = open_executor(kind, build.config(self.settings))
            return self._executor

    def _wake(self) -> None:
        if self._executor is not None:
            self._executor.wake()

    def _shut(self, *, if_unused: bool = False) -> None:
        with contextlib.ExitStack() as closing, self._turn.news:
            if if_unused and (self._entered or self._maps or self._pump is not None):
                return
            if self._executor is not None:
                self._last_workers = self._executor.statistics()
                closing.callback(self._executor.close)
            if self._home is not None:
                closing.callback(self._home.close)
            self._executor = self._home = None

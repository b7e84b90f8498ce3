"""Executors: one seam between "what is to be done" and "where it runs".

Everything above this file sees the same methods whether work runs inline, in threads or in processes:

    executor = make_executor("process", factory, workers=4, name="tokenize", max_retries=2, describe=str)
    executor.submit(Batch(key, items, len(items)))      # never blocks
    for part in executor.completed(timeout=None):       # Part(key, start, count, values, failure, ...)
        ...
    executor.abandon(owner)                             # nobody waits for batches with Batch.key == (owner, ...) any more
    executor.statistics()
    executor.close()                                    # `close_all` ends several at the same time

`factory()` is called once in each worker and returns `fn(item) -> result` (with an optional `close()`); see
`task.Function` for the optional parts of that contract.

Most callers want `ordered_map`, which adds the ordering window:

    results = ordered_map(executor, tasks, window=8)    # lazily; at most 8 tasks in flight; in order
    for result in results: ...
    results.close()                                     # early; what has not begun is not run, the rest is ignored

Any number of maps may share one executor on one thread, read in any interleaving: each completion goes to the map
that submitted it, whichever map happened to wait for it. A task that raises makes *its* map raise the worker's own
exception, with a note that says worker, operator, item and the worker's traceback; other maps go on. A task whose
worker was killed is run again, at most `max_retries` times, and then raises `WorkerDied`.

An executor is not thread-safe: one thread submits and asks for results. Any thread may `stop` and `close` it: whoever waits in
`completed` then raises at once, and `close` lets that thread leave before it takes away what it waits on.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from headrace.core.reorder import Batch, Release, Window
from headrace.errors import ConfigError, InternalError, UnknownOptionError
from headrace.run.failure import Failure

T = TypeVar("T")
R = TypeVar("R")

Kind = Literal["inline", "threads", "process"]
SLAB_BYTES = 64 * 1024 * 1024


@dataclass(slots=True)
class Part:
    """Inputs `start .. start + count` of the batch `key` are done: their outputs, and perhaps the last one's failure."""

    key: Any
    start: int
    count: int
    values: list[Any]
    failure: Failure | None = None
    seconds: float = 0.0  # of work
    nbytes: int = 0  # of the items or of the results, whichever is more; 0 where nothing is sent
    report: Any = None


@dataclass(slots=True)
class WorkerStatistics:
    """Counts since an executor started."""

    items: int = 0
    batches: int = 0
    busy: float = 0.0  # seconds, summed over workers
    bytes_in: int = 0  # from workers
    bytes_out: int = 0  # to workers
    slab_hits: int = 0
    slab_misses: int = 0
    retries: int = 0
    deaths: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that run one function; most executors have one group, a staged pipeline has one for each step."""

    factory: Callable[[], Any]
    workers: int = 1


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """What every executor is told."""

    groups: tuple[Group, ...]
    name: str = "workers"
    max_retries: int = 2
    describe: Callable[[Any], str] | None = None
    timeout: float | None = None  # seconds an item may take
    hand_back: bool = (
        True  # a worker gives up the rest of a batch that turns out slow; False: what workers remember counts
    )
    slab_bytes: int = SLAB_BYTES  # shared memory for large arrays, per worker and direction
    keep_memory: bool = True  # see shm.keep_memory
    zero_copy: bool = False  # large arrays of results are read-only views of shared memory
    start_method: str = "forkserver"  # of processes: "spawn" makes each a fresh interpreter
    modules: tuple[str, ...] = ()  # of ours and without threads, that a process loads for its function

    def __post_init__(self) -> None:
        """Refuse what cannot work, here rather than in a worker."""
        for group in self.groups:
            if group.workers < 1:
                raise ConfigError(f"{self.name}: workers must be at least 1, got {group.workers}")
        if self.max_retries < 0:
            raise ConfigError(f"{self.name}: max_retries must not be negative, got {self.max_retries}")
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"{self.name}: timeout must be a positive number of seconds, got {self.timeout}")
        if self.slab_bytes < 0:
            raise ConfigError(f"{self.name}: slab_bytes must not be negative, got {self.slab_bytes}")

    @property
    def seats(self) -> list[Callable[[], Any]]:
        """The function of each worker, group after group."""
        return [group.factory for group in self.groups for _ in range(group.workers)]


class Executor(Protocol):
    """Where batches run."""

    def submit(self, batch: Batch) -> None:
        """Take a batch; never blocks."""
        ...

    def completed(self, timeout: float | None = None) -> list[Part]:
        """What has finished; waits at most `timeout` seconds if nothing has, and not at all if nothing is in flight."""
        ...

    def abandon(self, owner: Any) -> None:
        """Run nothing more of the batches whose key begins with `owner`; an item that is being run is let finish."""
        ...

    def statistics(self) -> WorkerStatistics:
        """Counts since the start."""
        ...

    def stop(self) -> None:
        """Begin nothing more, and make whoever waits in `completed` raise. It never waits; any thread may call it."""
        ...

    def ending(self, began: float) -> Iterator[None]:
        """`close` in steps: each waits for the workers until a time after `began` (of the monotonic clock), then asks harder.

        The first does not wait.
        """
        ...

    def close(self) -> None:
        """End the workers. Nothing of them is left two seconds later."""
        ...


class Paced(Executor, Protocol):
    """An executor whose owner looks at its workers before it pulls more input."""

    @property
    def background(self) -> bool:
        """Whether work goes on while nobody calls."""
        ...

    def ready(self) -> bool:
        """Whether a worker could begin now; workers take a while to start. Does not wait."""
        ...

    def free(self, group: int = 0) -> int:
        """Batches that workers of this group could take at once."""
        ...

    def set_limit(self, group: int, most: int | None) -> None:
        """Inputs that travel together from now on, also in what comes back from slow batches."""
        ...

    def watch(self, source: Any, ready: Callable[[], bool] | None) -> None:
        """Call `ready` whenever `source` (a socket) has something, from within `completed`; None: no more."""
        ...

    def wake(self) -> None:
        """Make a waiting `completed` return; other threads may call it, as they may `stop` and `close`."""
        ...


def make_executor(kind: Kind | str, factory: Callable[[], Any], workers: int = 1, **settings: Any) -> Paced:
    """An executor of this kind with one group of workers; `settings` are the other fields of `ExecutorConfig`."""
    return open_executor(kind, ExecutorConfig((Group(factory, workers),), **settings))


def open_executor(kind: Kind | str, config: ExecutorConfig) -> Paced:
    """An executor of this kind."""
    if kind == "inline":
        from headrace.run.inline import InlineExecutor

        return InlineExecutor(config)
    if kind == "threads":
        from headrace.run.threads import ThreadExecutor

        return ThreadExecutor(config)
    if kind == "process":
        from headrace.run.process import ProcessExecutor

        return ProcessExecutor(config)
    raise UnknownOptionError("runner", kind, ("inline", "threads", "process"))


def close_all(endings: Iterable[Iterator[None]]) -> None:
    """Take the steps of several endings by turns, so that all together last no longer than one."""
    for _ in itertools.zip_longest(*endings):
        pass


@dataclass(eq=False, slots=True)
class TaskStream(Generic[T, R]):
    """The iterator behind `ordered_map`. Its identity is part of the key of each batch, so that results find it."""

    executor: Executor
    tasks: Iterator[T]
    window: Window[R]
    _ended: bool = False
    _source_error: Exception | None = None
    _results: deque[R] = field(default_factory=deque)

    def __iter__(self) -> Iterator[R]:
        """Itself."""
        return self

    def __next__(self) -> R:
        """The next result: wait for it if need be."""
        while True:
            if self._results:
                return self._results.popleft()
            self._submit()
            out = self.window.take()
            if isinstance(out, Release):
                self._results.extend(out.outputs)
            elif out is not None:
                self.close()
                raise out.error.raised(out.index)
            elif self.window.idle and self._ended:
                error, self._source_error = self._source_error, None
                raise error or StopIteration
            else:
                parts = self.executor.completed()
                if not parts:
                    raise InternalError(f"{len(self.window)} tasks were submitted and no worker has them")
                route(parts)

    @property
    def over(self) -> bool:
        """Whether it has ended or was closed, with nothing left to hand out."""
        return self._ended and not self._results and self.window.idle

    def close(self) -> None:
        """Take no more tasks, and let none run that has not begun."""
        self._ended, self._source_error = True, None
        if not self.window.idle:
            self.executor.abandon(self)
        self.window = Window(0)
        self._results.clear()
        close = getattr(self.tasks, "close", None)
        if close is not None:
            close()

    def deliver(self, first: int, part: Part) -> None:
        """A part of the batch that began at input `first` is done."""
        if self.window.limit == 0:
            return
        good = part.count - (part.failure is not None)
        if good:
            self.window.finished(first, part.start, good, part.values)
        if part.failure is not None:
            self.window.failed(first, part.start + good, part.failure)

    def _submit(self) -> None:
        while not self._ended and self.window.room:
            try:
                task = next(self.tasks)
            except StopIteration:
                self._ended = True
                return
            except Exception as error:  # noqa: BLE001 (the source's own; it comes after the results of what it gave before)
                self._ended, self._source_error = True, error
                return
            first = self.window.submit()
            self.executor.submit(Batch((self, first), [task], 1, first))


def route(parts: Iterable[Part]) -> None:
    """Give each part to the stream that submitted its batch."""
    for part in parts:
        owner, first = part.key
        owner.deliver(first, part)


def ordered_map(executor: Executor, tasks: Iterable[T], window: int, *, ordered: bool = True) -> TaskStream[T, Any]:
    """Results of `tasks` in their order (`ordered=False`: as finished), lazily, at most `window` in flight.

    A result counts as in flight until the consumer took it, so memory is bounded by `window` whatever the
    consumer does. An error that `tasks` itself raises reaches the consumer after every result before it.
    """
    if window < 1:
        raise ConfigError(f"window must be at least 1, got {window}")
    return TaskStream(executor, iter(tasks), Window(window, ordered=ordered))

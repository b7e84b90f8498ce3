"""Closing several pools takes no longer than closing one, and leaves no thread behind that waits for a pool."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from executor_functions import identity

from headrace import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.io import InMemoryShard
from headrace.run.executor import Executor, close_all, make_executor, ordered_map

LIMIT = 2.9  # seconds; two, and a busy machine
STUCK = 20.0  # seconds


def source(count: int) -> StaticMixtureWorkSource:
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"x": i} for i in range(count)])})
    return StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"toy": 1.0}), chunk_size=2048)


def slowly(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.01)
    return row


def stubborn(x: int) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(STUCK)
    return x


class Gate:
    """A function that gets stuck, on its further calls or once another one is, until it is let go."""

    def __init__(self, calls: int = 0, after: Gate | None = None) -> None:
        self._calls, self._after, self._lock = calls, after, threading.Lock()
        self.stuck, self.open = threading.Event(), threading.Event()

    def __call__(self, row: Any) -> Any:
        with self._lock:
            self._calls -= 1
            late = self._calls < 0 if self._after is None else self._after.stuck.is_set()
        if late:
            self.stuck.set()
            self.open.wait(STUCK)
        return row


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "headrace-engine"]


def seconds_of(act: Callable[[], Any]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


@pytest.mark.parametrize("placement", ["process", "threads"])
def test_leaving_early_ends_the_driving_thread(placement: str) -> None:
    before = engine_threads()
    pipeline = Pipeline(source(2000)).map_transform(slowly, parallelism=1, placement=placement).batch(8)
    pipeline.options(auto_validation="off")
    iterator = iter(pipeline)
    next(iterator)
    assert seconds_of(pipeline.close) < LIMIT
    assert engine_threads() == before


def test_stages_that_are_stuck_are_waited_for_together() -> None:
    second = Gate(4)
    first = Gate(after=second)
    pipeline = (
        Pipeline(source(2000)).map_transform(first, parallelism=2).shuffle(2).map_transform(second, parallelism=2)
    )
    pipeline.batch(1).options(runner="threads", micro_batch=2, auto_validation="off", flush_every_k_chunks=None)
    iterator = iter(pipeline)
    next(iterator)
    assert first.stuck.wait(STUCK)
    assert second.stuck.wait(STUCK)
    try:
        assert seconds_of(iterator.close) < LIMIT
    finally:
        first.open.set()
        second.open.set()


def test_processes_that_do_not_listen_are_ended_together() -> None:
    pools = [make_executor("process", StubbornFactory(), 1) for _ in range(3)]
    for pool in pools:
        stream = ordered_map(pool, [1], 1)
        stream._submit()
    while not all(pool.ready() for pool in pools):
        time.sleep(0.01)
    time.sleep(0.1)  # from the mark to the item itself
    began = time.monotonic()
    close_all([pool.ending(began) for pool in pools])
    assert time.monotonic() - began < LIMIT
    assert all(child.process.returncode is not None for pool in pools for child in pool._children)


class StubbornFactory:
    def __call__(self) -> Callable[[int], int]:
        return stubborn


@pytest.fixture(params=["threads", "process"])
def waited_for(request: pytest.FixtureRequest) -> Iterator[tuple[Executor, list[BaseException], threading.Thread]]:
    """An executor, and a thread that waits for its results and leaves with an error."""
    executor = make_executor(request.param, SleepyFactory(), 1, name="op")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            list(ordered_map(executor, [1.0], 1))
        except BaseException as error:  # noqa: BLE001  looked at below
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not executor.statistics().batches:
        time.sleep(0.01)
    time.sleep(0.05)
    yield executor, errors, thread
    executor.close()


class SleepyFactory:
    def __call__(self) -> Callable[[float], None]:
        return time.sleep


@pytest.mark.parametrize("way", ["stop", "close"])
def test_whoever_waits_for_results_leaves_at_once(
    way: str, waited_for: tuple[Executor, list[BaseException], threading.Thread]
) -> None:
    executor, errors, thread = waited_for
    getattr(executor, way)()
    thread.join(0.9)
    assert not thread.is_alive()
    assert [str(error) for error in errors] == ["op: the executor is closed"]


def test_nothing_is_begun_after_a_stop(make: Callable[..., Executor]) -> None:
    executor = make(identity)
    executor.stop()
    executor.stop()
    with pytest.raises(RuntimeError, match="the executor is closed"):
        list(ordered_map(executor, [1], 1))


@pytest.mark.parametrize("options", [{"runner": "threads"}, {"mtp_mode": True}, {"runner": "inline"}], ids=str)
def test_another_thread_may_close_what_the_loop_waits_for(options: dict[str, Any]) -> None:
    """The loop then ends, as it does at the end of the data."""
    pipeline = Pipeline(source(60)).map_transform(Nap(), parallelism=1).batch(2)
    pipeline.options(micro_batch=1, auto_validation="off", **options)
    ended: list[Any] = []

    def loop() -> None:
        try:
            ended.append(len(list(pipeline)))
        except BaseException as error:  # noqa: BLE001  looked at below
            ended.append(error)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    while pipeline._running is None:
        time.sleep(0.01)
    time.sleep(0.5)
    assert seconds_of(pipeline.close) < LIMIT
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert len(ended) == 1
    assert isinstance(ended[0], int)
    assert ended[0] < 10


class Nap:
    """A third of a second a record."""

    def __call__(self, row: Any) -> Any:
        time.sleep(0.3)
        return row

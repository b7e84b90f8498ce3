"""The queue of `enqueue` and `dequeue`: who gets which error, several threads, waiting, and the end."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
from step_functions import HANG, add_1, every_runner, sleep_at

from headrace.errors import Cancelled, ConfigError
from headrace.steps import Pipeline, emit

in_background = pytest.mark.parametrize("runner", ["threads", "process"])


def invert(x: float) -> float:
    return 1 / x


def keep(x: Any) -> Any:
    return x


class Broken:
    """A reader that gives a few numbers and fails."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        yield from range(self.numbers)
        raise LookupError("reader broke")


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Starts `work` in a thread, and a list for what it returns or raises."""
    said: list[Any] = []

    def run() -> None:
        try:
            said.append(work())
        except Exception as error:  # noqa: BLE001 (to be looked at by the test)
            said.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, said


# -- errors -------------------------------------------------------------------------------------------------------


@every_runner
def test_an_items_error_is_for_who_dequeues_not_for_who_enqueues(runner: str) -> None:
    with Pipeline([invert], num_workers=1, runner=runner).start() as pipeline:
        for x in (1, 0, *[2] * 30):
            pipeline.enqueue(x)
            time.sleep(0.01)  # the error arrives in the meantime
        assert pipeline.dequeue() == 1.0
        with pytest.raises(ZeroDivisionError):
            pipeline.dequeue()
        assert [pipeline.dequeue() for _ in range(30)] == [0.5] * 30
        with pytest.raises(queue.Empty):
            pipeline.dequeue()


@every_runner
@pytest.mark.parametrize("timeout", [None, HANG])
def test_a_readers_error_comes_once_and_behind_what_it_read(runner: str, timeout: float | None) -> None:
    with Pipeline([keep], num_workers=1, runner=runner) as pipeline:
        emit([Broken(3)], pipeline)
        assert [pipeline.dequeue(timeout) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(LookupError, match="reader broke"):
            pipeline.dequeue(timeout)
        pipeline.enqueue(7)
        assert pipeline.dequeue(timeout) == 7
        with pytest.raises(queue.Empty):
            pipeline.dequeue()


@every_runner
def test_a_readers_error_does_not_wait_for_the_end_of_other_sources(runner: str) -> None:
    got: list[int] = []
    with Pipeline([keep], num_workers=1, runner=runner) as pipeline:
        emit([Broken(3)], pipeline)
        emit([count(1000) if runner == "inline" else range(1000, 10**12)], pipeline)
        with pytest.raises(LookupError, match="reader broke"):
            got.extend(pipeline)
        assert [x for x in got if x < 1000] == [0, 1, 2]
        others = [x for x in got if x >= 1000]
        outputs = iter(pipeline)
        others += [next(outputs) for _ in range(500)]
        assert others == list(range(1000, 1000 + len(others)))


class NeverReady:
    def setup(self) -> None:
        raise RuntimeError("no licence")

    def __call__(self, x: int) -> int:
        return x


@in_background
def test_workers_that_cannot_start_are_told_to_everyone(runner: str) -> None:
    with Pipeline([NeverReady()], num_workers=1, runner=runner).start() as pipeline:
        pipeline.enqueue(1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no licence"):
                pipeline.dequeue(timeout=HANG)
        with pytest.raises(RuntimeError, match="no licence"):
            pipeline.enqueue(2)


# -- several threads ------------------------------------------------------------------------------------------------


@pytest.fixture
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("many_switches")
def test_the_first_items_of_several_threads() -> None:
    for _ in range(15):
        with Pipeline([keep], runner="threads", num_workers=1).start() as pipeline:
            barrier = threading.Barrier(8)

            def give(x: int, pipeline: Pipeline = pipeline, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                pipeline.enqueue(x)

            threads = [in_thread(partial(give, x))[0] for x in range(8)]
            for thread in threads:
                thread.join()
            assert sorted(pipeline) == list(range(8))


@in_background
@pytest.mark.usefixtures("many_switches")
def test_one_thread_enqueues_while_another_maps(runner: str) -> None:
    with Pipeline([add_1], runner=runner, num_workers=2).start() as pipeline:
        thread, said = in_thread(lambda: [pipeline.enqueue(x) for x in range(1000)])
        assert list(pipeline.map(range(5000))) == list(range(1, 5001))
        thread.join()
        assert said == [[None] * 1000]
        assert list(pipeline) == list(range(1, 1001))


@every_runner
def test_several_threads_take_every_output_once(runner: str) -> None:
    with Pipeline([keep], runner=runner, num_workers=2).start() as pipeline:
        emit([range(2000), range(2000, 4000)], pipeline)
        took = [in_thread(lambda: list(pipeline)) for _ in range(3)]
        for thread, _ in took:
            thread.join(HANG)
        assert sorted(x for _, said in took for x in said[0]) == list(range(4000))


def test_those_who_look_often_do_not_look_like_a_fault() -> None:
    """Each look wakes the thread that waits for a worker; it must not take that for workers without work."""
    let_go = threading.Event()
    with Pipeline([lambda x: let_go.wait(HANG) and x], runner="threads", num_workers=1).start() as pipeline:
        pipeline.enqueue(5)
        thread, said = in_thread(pipeline.dequeue)
        for _ in range(15_000):
            with pytest.raises(queue.Empty):
                pipeline.dequeue(timeout=0)
        let_go.set()
        thread.join(HANG)
        assert said == [5]


# -- waiting --------------------------------------------------------------------------------------------------------


@every_runner
def test_waiting_for_others_takes_no_processor_time_and_ends_at_once(runner: str) -> None:
    with Pipeline([add_1], runner=runner, num_workers=1).start() as pipeline:
        assert list(pipeline.map([1])) == [2]  # workers have started
        before = time.process_time()
        with pytest.raises(queue.Empty):
            pipeline.dequeue(timeout=1.0)
        assert time.process_time() - before < 0.4
        thread, said = in_thread(lambda: pipeline.dequeue(timeout=HANG))
        time.sleep(0.1)
        pipeline.enqueue(1)
        thread.join(HANG / 2)
        assert said == [2]
        thread, said = in_thread(lambda: pipeline.dequeue(timeout=HANG))
        time.sleep(0.1)
        emit([[2]], pipeline)
        thread.join(HANG / 2)
        assert said == [3]


@in_background
def test_a_time_limit_holds_while_another_thread_waits_for_a_slow_item(runner: str) -> None:
    with Pipeline([partial(sleep_at, 1, 3600.0)], runner=runner, num_workers=1).start() as pipeline:
        pipeline.enqueue(1)
        thread, _ = in_thread(pipeline.dequeue)
        time.sleep(0.1)
        started = time.monotonic()
        with pytest.raises(queue.Empty, match="within"):
            pipeline.dequeue(timeout=0.2)
        assert time.monotonic() - started < HANG / 2
        assert thread.is_alive()


def test_outputs_that_nobody_takes_do_not_pile_up() -> None:
    with Pipeline([keep], runner="threads", num_workers=1, max_pending=20).start() as pipeline:
        given = 0
        with pytest.raises(ConfigError, match="dequeue some"):
            for given in range(2000):
                pipeline.enqueue(given)
                time.sleep(0.001)
        assert list(pipeline) == list(range(given))
        pipeline.enqueue(7)
        assert pipeline.dequeue() == 7


# -- the end --------------------------------------------------------------------------------------------------------


@every_runner
def test_leaving_an_iteration_early_loses_no_output(runner: str) -> None:
    with Pipeline([keep], runner=runner, num_workers=1) as pipeline:
        emit([range(700)], pipeline)
        got: list[int] = []
        for _ in range(5):
            for x in pipeline:
                got.append(x)
                if len(got) % 30 == 0:
                    break
            got.append(pipeline.dequeue())
        got.extend(pipeline)
        assert got == list(range(700))
        assert pipeline.statistics().delivered == 700


@in_background
def test_a_cancel_reaches_all_who_wait_and_not_who_enqueues(runner: str) -> None:
    with Pipeline([partial(sleep_at, 1, 3600.0)], runner=runner, num_workers=1).start() as pipeline:
        pipeline.enqueue(1)
        waiting = [in_thread(use) for use in (pipeline.dequeue, lambda: list(pipeline))]
        time.sleep(0.2)
        pipeline.cancel()
        pipeline.enqueue(2)
        for thread, said in waiting:
            thread.join(HANG)
            assert isinstance(said[0], Cancelled)
        pipeline.cancel()  # while nobody waits: the next one is told
        pipeline.enqueue(3)
        with pytest.raises(Cancelled):
            pipeline.dequeue()
        with pytest.raises(queue.Empty):
            pipeline.dequeue(timeout=0.05)


USES: dict[str, Callable[[Pipeline], Any]] = {
    "map": lambda pipeline: list(pipeline.map([0, 1])),
    "iteration": lambda pipeline: (pipeline.enqueue(1), list(pipeline)),
    "dequeue": lambda pipeline: (pipeline.enqueue(1), pipeline.dequeue()),
    "waiting for others": lambda pipeline: pipeline.dequeue(timeout=HANG),
}


@in_background
@pytest.mark.parametrize("use", USES)
def test_closing_tells_the_threads_that_wait(runner: str, use: str) -> None:
    pipeline = Pipeline([partial(sleep_at, 1, 3600.0 if runner == "process" else 2.0)], runner=runner, num_workers=1)
    pipeline.start()
    thread, said = in_thread(lambda: USES[use](pipeline))
    time.sleep(0.3)
    pipeline.close()
    thread.join(HANG / 2)
    assert len(said) == 1 and isinstance(said[0], ConfigError) and "closed" in str(said[0])


@every_runner
def test_iterators_of_a_closed_pipeline_say_that_it_is_closed(runner: str) -> None:
    with Pipeline([partial(sleep_at, 1000, 0.03)], runner=runner, num_workers=1) as pipeline:
        mapped = pipeline.map(count())
        assert next(mapped) == 0
        emit([range(10**6)], pipeline)
        emitted = iter(pipeline)
        assert next(emitted) == 0
    for use in (lambda: list(mapped), lambda: list(emitted), pipeline.dequeue, lambda: pipeline.dequeue(timeout=1.0)):
        with pytest.raises(ConfigError, match="closed"):
            use()

"""The step pipeline as its users meet it: the proposal's own snippet, and every promise of its options."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import Cancelled, ConfigError, OperatorError, UnknownOptionError, WorkerDied
from headrace.steps import DROP, Failed, FileReader, Pipeline, emit, split_seeks

HANG = 60.0

RUNNERS = ["inline", "threads", "process"]
every_runner = pytest.mark.parametrize("runner", RUNNERS)


def add_1(arg: int) -> int:
    return arg + 1


def double(arg: int) -> int:
    return 2 * arg


def repeat(arg: int) -> Iterator[int]:
    for _ in range(arg % 4):
        yield arg


def fail_at(bad: int, x: int) -> int:
    if x == bad:
        raise ValueError(f"no {bad}")
    return x


def test_the_proposal(tmp_path: Path) -> None:
    steps = add_1, add_1
    pipeline = Pipeline(steps, num_workers=4)
    pipeline.start()
    pipeline.enqueue(3)
    assert pipeline.dequeue() == 5
    pipeline.close()

    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{k}\n" for k in range(1000)))
    line_starts = split_seeks(path, splits=2)
    assert sum(num_lines for _, num_lines in line_starts) == 1000
    readers = [FileReader(path, pos, num_lines) for pos, num_lines in line_starts]
    with Pipeline([int, add_1], num_workers=2) as pipeline:
        emit(readers, pipeline)
        assert sorted(pipeline) == list(range(1, 1001))


@every_runner
@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_map_is_lazy_ordered_and_may_be_endless(runner: str, mode: str) -> None:
    pulled = []

    def source() -> Iterator[int]:
        for x in count():
            pulled.append(x)
            yield x

    with Pipeline([add_1, repeat, double], num_workers=2, runner=runner, mode=mode) as pipeline:
        outputs = pipeline.map(source())
        assert pulled == []
        expected = (2 * (x + 1) for x in count() for _ in range((x + 1) % 4))
        assert list(islice(outputs, 500)) == list(islice(expected, 500))
        assert len(pulled) < 100_000
        outputs.close()
        assert list(pipeline.map([1, 2])) == [4, 4, 6, 6, 6]


@every_runner
def test_several_maps_at_once_on_one_pipeline(runner: str) -> None:
    with Pipeline([add_1], num_workers=2, runner=runner) as pipeline:
        pairs = list(zip(pipeline.map(range(500)), pipeline.map(range(1000, 1500)), strict=True))
    assert pairs == [(x + 1, x + 1001) for x in range(500)]


@every_runner
def test_none_is_a_value_and_drop_is_not(runner: str) -> None:
    with Pipeline([none_or_drop], num_workers=1, runner=runner) as pipeline:
        assert list(pipeline.map(range(6))) == [None, 1, None, 4]


def none_or_drop(x: int) -> Any:
    return {0: None, 3: None, 2: DROP, 5: DROP}.get(x, x)


class Scaler:
    def __init__(self, path: str) -> None:
        self.path = path
        self.factor = 0

    def setup(self) -> None:
        self.factor = 3
        with open(self.path, "a") as file:
            file.write("setup\n")

    def __call__(self, x: int) -> int:
        return x * self.factor

    def teardown(self) -> None:
        with open(self.path, "a") as file:
            file.write("teardown\n")


@every_runner
def test_setup_and_teardown_once_in_each_worker(runner: str, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    with Pipeline([Scaler(path)], num_workers=2, runner=runner) as pipeline:
        assert list(pipeline.map(range(100))) == [3 * x for x in range(100)]
    workers = 1 if runner == "inline" else 2
    assert Counter(Path(path).read_text().split()) == {"setup": workers, "teardown": workers}


@every_runner
def test_the_steps_own_exception_at_its_place(runner: str) -> None:
    got: list[int] = []
    with Pipeline([add_1, partial(fail_at, 51)], num_workers=2, runner=runner) as pipeline:
        with pytest.raises(ValueError, match="no 51") as caught:
            got.extend(pipeline.map(range(200)))
        assert got == list(range(1, 51))
        note = "\n".join(caught.value.__notes__)
        assert "step fail_at" in note and "item 50" in note and 'raise ValueError(f"no {bad}")' in note
        assert list(pipeline.map([1, 2])) == [2, 3]


@every_runner
def test_errors_skipped_or_returned(runner: str) -> None:
    steps = [add_1, partial(fail_at, 7), double]
    with Pipeline(steps, num_workers=2, runner=runner, on_error="skip") as pipeline:
        assert list(pipeline.map(range(10))) == [2 * x for x in range(1, 11) if x != 7]
        stats = pipeline.statistics()
        assert (stats.received, stats.finished, stats.skipped, stats.in_flight) == (10, 10, 1, 0)
        assert "step fail_at: ValueError('no 7')" in stats.errors[0]
        assert [(step.received, step.produced) for step in stats.steps] == [(10, 10), (10, 9), (9, 9)]
    with Pipeline(steps, num_workers=2, runner=runner, on_error="return") as pipeline:
        outputs = list(pipeline.map(range(10)))
    failed = outputs[6]
    assert isinstance(failed, Failed) and [x for x in outputs if x is not failed] == [
        2 * x for x in range(1, 11) if x != 7
    ]
    assert (failed.step, failed.item, str(failed.error)) == ("fail_at", "7", "no 7")
    assert "fail_at" in failed.traceback and isinstance(failed.raised(), ValueError)


@every_runner
def test_keys_keep_to_one_worker_in_order(runner: str) -> None:
    with Pipeline([PerKey()], num_workers=3, runner=runner, assign=lambda item: item[0]) as pipeline:
        outputs = list(pipeline.map((f"key{k % 7}", k) for k in range(700)))
    assert [k for _, k, _ in outputs] == list(range(700))
    for key in {key for key, _, _ in outputs}:
        assert [seen for own, _, seen in outputs if own == key] == list(range(1, 101))


class PerKey:
    def setup(self) -> None:
        self.seen: Counter[str] = Counter()

    def __call__(self, item: tuple[str, int]) -> tuple[str, int, int]:
        self.seen[item[0]] += 1
        return (*item, self.seen[item[0]])


def test_a_death_with_keys_is_an_error_for_their_state_is_gone() -> None:
    with (
        Pipeline([partial(die_at, 40)], num_workers=2, assign=lambda x: x, on_error="skip") as pipeline,
        pytest.raises(WorkerDied),
    ):
        list(pipeline.map(range(100)))


def die_at(bad: int, x: int) -> int:
    if x == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_a_killed_worker_names_the_item_and_the_others_go_on() -> None:
    with Pipeline([partial(die_at, 50)], num_workers=2, max_retries=1) as pipeline:
        got: list[int] = []
        with pytest.raises(WorkerDied, match=r"SIGKILL.*item 50 \(50\), after 2 attempts"):
            got.extend(pipeline.map(range(200)))
        assert got == list(range(50))
        assert list(pipeline.map(range(5))) == list(range(5))
    with Pipeline([partial(die_at, 50)], num_workers=2, max_retries=0, on_error="return") as pipeline:
        outputs = list(pipeline.map(range(200)))
        assert isinstance(outputs[50], Failed) and isinstance(outputs[50].error, WorkerDied)
        assert [x for x in outputs if not isinstance(x, Failed)] == [x for x in range(200) if x != 50]


def sleep_at(bad: int, seconds: float, x: int) -> int:
    if x == bad:
        time.sleep(seconds)
    return x


@pytest.mark.parametrize("runner", ["threads", "process"])
def test_an_item_that_takes_too_long(runner: str) -> None:
    with Pipeline(
        [partial(sleep_at, 5, 600.0)], num_workers=2, runner=runner, timeout=0.2, on_error="skip"
    ) as pipeline:
        assert list(pipeline.map(range(40))) == [x for x in range(40) if x != 5]
        assert pipeline.statistics().skipped == 1


@every_runner
def test_enqueue_and_dequeue(runner: str) -> None:
    with Pipeline([repeat, double], num_workers=2, runner=runner) as pipeline:
        for x in range(50):
            pipeline.enqueue(x)
        assert [pipeline.dequeue() for _ in range(20)] == [2 * x for x in range(50) for _ in range(x % 4)][:20]
        assert list(pipeline) == [2 * x for x in range(50) for _ in range(x % 4)][20:]
        with pytest.raises(queue.Empty, match="nothing is under way"):
            pipeline.dequeue()
        with pytest.raises(queue.Empty, match="within"):
            pipeline.dequeue(timeout=0.05)
        pipeline.enqueue(4)  # no output at all
        with pytest.raises(queue.Empty):
            pipeline.dequeue()
        pipeline.enqueue(5)
        assert pipeline.dequeue() == 10


@every_runner
def test_an_error_does_not_end_the_queue(runner: str) -> None:
    with Pipeline([partial(fail_at, 1)], num_workers=1, runner=runner) as pipeline:
        for x in range(3):
            pipeline.enqueue(x)
        assert pipeline.dequeue() == 0
        with pytest.raises(ValueError, match="no 1"):
            pipeline.dequeue()
        assert pipeline.dequeue() == 2


@pytest.mark.parametrize("runner", ["threads", "process"])
def test_one_thread_enqueues_and_another_dequeues(runner: str) -> None:
    with Pipeline([add_1], num_workers=2, runner=runner).start() as pipeline:

        def produce() -> None:
            for x in range(300):
                pipeline.enqueue(x)
                if x % 50 == 0:
                    time.sleep(0.01)

        producer = threading.Thread(target=produce)
        producer.start()
        assert [pipeline.dequeue(timeout=HANG) for _ in range(300)] == list(range(1, 301))
        producer.join()


def test_too_much_enqueued_is_said() -> None:
    pipeline = Pipeline([partial(sleep_at, 0, 0.5)], num_workers=1, runner="threads", max_pending=10)
    with pipeline, pytest.raises(ConfigError, match="max_pending is 10"):
        for _ in range(1000):
            pipeline.enqueue(0)


@every_runner
def test_leaving_early_leaves_nothing(runner: str) -> None:
    before = set(threading.enumerate())
    for x in Pipeline([add_1], num_workers=2, runner=runner).map(count()):
        if x == 100:
            break
    deadline = time.monotonic() + HANG
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("runner", ["threads", "process"])
def test_cancelling_from_another_thread(runner: str) -> None:
    with Pipeline([partial(sleep_at, 5, 600.0)], num_workers=1, runner=runner).start() as pipeline:
        timer = threading.Timer(0.3, pipeline.cancel)
        timer.start()
        with pytest.raises(Cancelled):
            list(pipeline.map(range(10)))
        timer.join()


def broken_source() -> Iterator[int]:
    yield from range(50)
    raise LookupError("source broke")


@every_runner
def test_an_error_of_the_source_comes_after_its_items(runner: str) -> None:
    got: list[int] = []
    with Pipeline([add_1], num_workers=2, runner=runner) as pipeline, pytest.raises(LookupError, match="source broke"):
        got.extend(pipeline.map(broken_source()))
    assert got == list(range(1, 51))


@every_runner
@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_random_steps_do_not_depend_on_the_workers(runner: str, mode: str) -> None:
    def outputs(runner: str, mode: str, seed: int) -> list[Any]:
        with Pipeline([draw, draw_many, draw], num_workers=2, runner=runner, mode=mode, seed=seed) as pipeline:
            return list(pipeline.map([0.0] * 60))

    reference = outputs("inline", "fused", 1)
    assert len(set(reference)) == len(reference) > 60
    assert outputs(runner, mode, 1) == reference
    assert outputs(runner, mode, 2) != reference


def test_threads_do_not_draw_each_others_numbers() -> None:
    """Other threads get their turn between seeding and drawing."""

    def slow_draw(x: float) -> float:
        time.sleep(0.001)
        return draw(x)

    def outputs(workers: int) -> list[float]:
        with Pipeline([slow_draw], num_workers=workers, runner="threads", seed=1) as pipeline:
            return list(pipeline.map([0.0] * 40))

    assert outputs(4) == outputs(1)


def draw(x: float) -> float:
    import random

    return x + random.random() + np.random.random()


def draw_many(x: float) -> Iterator[float]:
    for _ in range(np.random.randint(1, 4)):
        yield x + np.random.random()


def test_a_shuffle_buffer_gives_every_output_once_in_an_order_of_the_seed() -> None:
    def run(seed: int) -> list[int]:
        return list(Pipeline([add_1], runner="inline", shuffle_buffer=50, seed=seed).map(range(500)))

    first = run(3)
    assert first == run(3) != run(4)
    assert sorted(first) == list(range(1, 501)) != first
    assert all(abs(place - x) < 500 for place, x in enumerate(first))


@pytest.mark.slow  # it measures: only a quiet machine gives the answer
def test_automatic_workers_stay_home_for_cheap_steps_and_go_out_for_dear_ones() -> None:
    cheap = Pipeline([add_1])
    assert list(cheap.map(range(5000))) == list(range(1, 5001))
    assert "in this process" in cheap.explain() and cheap.statistics().workers.deaths == 0
    dear = Pipeline([partial(sleep_at, -1, 0.0), busy])
    assert list(dear.map(range(60))) == list(range(60))
    assert "in worker processes" in dear.explain()
    assert dear.statistics().received == dear.statistics().finished == 60


def busy(x: int, seconds: float = 0.004) -> int:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return x


def test_automatic_workers_change_their_mind() -> None:
    pipeline = Pipeline([slower_later])
    items = [*range(2000), *([-1] * 600)]
    assert list(pipeline.map(items)) == items
    assert "in worker processes" in pipeline.explain()


def test_automatic_workers_share_out_slow_items_that_were_pulled_already() -> None:
    pipeline = Pipeline([with_pid])
    outputs = list(pipeline.map([*range(1000), *([-1] * 60)]))
    assert [x for x, _ in outputs] == [*range(1000), *([-1] * 60)]
    assert len({pid for x, pid in outputs if x < 0}) > 1
    stats = pipeline.statistics()
    assert (stats.received, stats.finished, stats.delivered) == (1060, 1060, 1060)


def with_pid(x: int) -> tuple[int, int]:
    time.sleep(0.05 if x < 0 else 0)
    return x, os.getpid()


def slower_later(x: int) -> int:
    return busy(x, 0.001) if x < 0 else x


def test_what_cannot_be_pickled_stays_home_by_itself() -> None:
    pipeline = Pipeline([make_lock])
    assert len(list(pipeline.map(range(300)))) == 300
    assert "cannot be pickled" in pipeline.explain()


def make_lock(_: int) -> Any:
    busy(0)
    return threading.Lock()


@every_runner
def test_explain_and_statistics(runner: str) -> None:
    with Pipeline([add_1, repeat], num_workers=2, runner=runner) as pipeline:
        assert "add_1 > repeat*" in pipeline.explain()
        assert sum(1 for _ in pipeline.map(range(4000))) == 6000
        stats = pipeline.statistics()
        text = pipeline.explain()
    assert [(step.name, step.received, step.produced) for step in stats.steps] == [
        ("add_1", 4000, 4000),
        ("repeat", 4000, 6000),
    ]
    assert (stats.received, stats.finished, stats.delivered, stats.in_flight) == (4000, 4000, 6000, 0)
    assert "4000 items in, 4000 done" in text and "bottleneck" in text


def test_progress_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(Pipeline([add_1], runner="inline", progress=True).map([1, 2])) == [2, 3]
    assert capsys.readouterr() == ("", "")


def test_a_pipeline_is_a_source_of_another() -> None:
    inner = Pipeline([add_1], runner="threads", num_workers=2)
    outer = Pipeline([double], runner="process", num_workers=2)
    assert list(outer.map(inner.map(range(300)))) == [2 * (x + 1) for x in range(300)]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_worker": 2}, UnknownOptionError, "did you mean 'num_workers'"),
        ({"runner": "proces"}, UnknownOptionError, "did you mean 'process'"),
        ({"mode": "fuse"}, UnknownOptionError, "did you mean 'fused'"),
        ({"on_error": "ignore"}, UnknownOptionError, "on_error"),
        ({"ordered": None}, ConfigError, "True or False"),
        ({"num_workers": 0}, ConfigError, "at least 1"),
        ({"num_workers": [1, 2]}, ConfigError, "2 numbers for 1 stage"),
        ({"num_workers": [1, 2, 3], "mode": "staged"}, ConfigError, "3 numbers for 2 stage"),
        ({"assign": "all"}, ConfigError, "assign"),
        ({"assign": len, "mode": "staged"}, ConfigError, "fused"),
        ({"shuffle_buffer": 5}, ConfigError, "seed"),
        ({"timeout": 1.0, "runner": "inline"}, ConfigError, "inline"),
        ({"timeout": -1.0, "num_workers": 1}, ConfigError, "timeout"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        Pipeline([add_1, double], **options).start()


@pytest.mark.parametrize("steps", [[], [3], [None], [add_1, "double"]])
def test_steps_that_cannot_work_are_refused(steps: list[Any]) -> None:
    with pytest.raises(ConfigError):
        Pipeline(steps)


async def coroutine(x: int) -> int:
    return x


def test_a_coroutine_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="coroutine"):
        Pipeline([coroutine])


def test_a_closed_pipeline_says_so() -> None:
    pipeline = Pipeline([add_1], runner="threads", num_workers=1)
    pipeline.close()
    for use in (pipeline.start, lambda: list(pipeline.map([1])), lambda: pipeline.enqueue(1)):
        with pytest.raises(ConfigError, match="closed"):
            use()


@every_runner
def test_a_key_that_cannot_be_numbered_is_refused(runner: str) -> None:
    pipeline = Pipeline([add_1], num_workers=1, runner=runner, assign=lambda x: x / 2)
    with pipeline, pytest.raises(ConfigError, match="key"):
        list(pipeline.map([1]))


INTERRUPTED = """
import os, signal, sys, threading, time
from headrace.steps import Pipeline

def work(x):
    time.sleep(30 if x >= 4 else 0)
    return os.getpid()

with Pipeline([work], num_workers=2, runner=sys.argv[1]).start() as pipeline:
    threading.Timer(0.5, lambda: os.killpg(0, signal.SIGINT)).start()
    try:
        for pid in pipeline.map(range(100)):
            print(pid, flush=True)
    except KeyboardInterrupt:
        started = time.monotonic()
        pipeline.close()
        print("interrupted", time.monotonic() - started < 20)
"""


@pytest.mark.parametrize("runner", ["threads", "process"])
def test_ctrl_c_leaves_no_process_behind(runner: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, str(script), runner], capture_output=True, text=True, timeout=HANG, start_new_session=True
    )
    lines = done.stdout.split("\n")
    assert "interrupted True" in lines, done
    assert done.stderr == ""
    own = {int(line) for line in lines if line.isdigit()}
    deadline = time.monotonic() + HANG
    while any(Path(f"/proc/{pid}/stat").exists() for pid in own) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{pid}/stat").exists() for pid in own)


def use_system_exit(x: int) -> int:
    if x == 3:
        sys.exit(3)
    return x


@every_runner
def test_a_step_cannot_end_the_program(runner: str) -> None:
    pipeline = Pipeline([use_system_exit], num_workers=1, runner=runner)
    with pipeline, pytest.raises(OperatorError, match=r"SystemExit\(3\)"):
        list(pipeline.map(range(10)))


def test_automatic_workers_keep_the_state_of_keys_in_one_place() -> None:
    with Pipeline([PerKey()], assign=lambda item: item[0]) as pipeline:
        outputs = list(pipeline.map((f"key{k % 3}", k) for k in range(300)))
    assert [seen for key, _, seen in outputs if key == "key1"] == list(range(1, 101))


def test_automatic_workers_watch_the_clock_from_the_first_item_on() -> None:
    with Pipeline([partial(sleep_at, 0, 600.0)], timeout=0.2, on_error="skip") as pipeline:
        assert list(pipeline.map(range(10))) == list(range(1, 10))


def test_seeded_items_are_the_same_at_home_and_in_workers() -> None:
    def run(**options: Any) -> list[float]:
        return list(Pipeline([draw_slowly], seed=4, **options).map([0.0] * 150))

    assert run() == run(runner="inline") == run(num_workers=2, assign=lambda x: 1)


def draw_slowly(x: float) -> float:
    busy(0, 0.001)
    return draw(x)


def odd_only(x: int) -> Any:
    return x if x % 2 else DROP


def lock_at_9(x: int) -> Any:
    return threading.Lock() if x == 9 else x


@every_runner
def test_counts_of_steps_with_a_key_for_each_item(runner: str) -> None:
    with Pipeline([odd_only, lock_at_9], runner=runner, num_workers=2, assign=lambda x: x, on_error="skip") as pipeline:
        assert len(list(pipeline.map(range(11, 1011)))) == 500
        assert [(step.received, step.produced) for step in pipeline.statistics().steps] == [(1000, 500), (500, 500)]


def test_counts_of_steps_around_a_result_that_cannot_leave_its_worker() -> None:
    with Pipeline([lock_at_9], num_workers=1, on_error="skip") as pipeline:
        assert list(pipeline.map(range(2000))) == [x for x in range(2000) if x != 9]
        stats = pipeline.statistics()
        assert (stats.finished, stats.skipped) == (2000, 1)
        assert (stats.steps[0].received, stats.steps[0].produced) == (2000, 2000)

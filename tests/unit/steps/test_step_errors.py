"""What goes wrong in a step pipeline: errors, deaths, time limits, and iterations that are left early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from step_functions import HANG, add_1, double, every_runner, lock_at_9, sleep_at

from headrace.errors import Cancelled, ConfigError, OperatorError, WorkerDied
from headrace.steps import Failed, Pipeline


def fail_at(bad: int, x: int) -> int:
    if x == bad:
        raise ValueError(f"no {bad}")
    return x


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


@pytest.mark.parametrize("runner", ["threads", "process"])
def test_an_item_that_takes_too_long(runner: str) -> None:
    with Pipeline(
        [partial(sleep_at, 5, 600.0)], num_workers=2, runner=runner, timeout=0.2, on_error="skip"
    ) as pipeline:
        assert list(pipeline.map(range(40))) == [x for x in range(40) if x != 5]
        assert pipeline.statistics().skipped == 1


@every_runner
def test_an_error_does_not_end_the_queue(runner: str) -> None:
    with Pipeline([partial(fail_at, 1)], num_workers=1, runner=runner) as pipeline:
        for x in range(3):
            pipeline.enqueue(x)
        assert pipeline.dequeue() == 0
        with pytest.raises(ValueError, match="no 1"):
            pipeline.dequeue()
        assert pipeline.dequeue() == 2


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


def test_counts_of_steps_around_a_result_that_cannot_leave_its_worker() -> None:
    with Pipeline([lock_at_9], num_workers=1, on_error="skip") as pipeline:
        assert list(pipeline.map(range(2000))) == [x for x in range(2000) if x != 9]
        stats = pipeline.statistics()
        assert (stats.finished, stats.skipped) == (2000, 1)
        assert (stats.steps[0].received, stats.steps[0].produced) == (2000, 2000)

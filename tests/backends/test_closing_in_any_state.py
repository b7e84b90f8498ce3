"""Closing a pool of worker processes takes about two seconds at most, whatever state they and their server are in."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from process_watching import gone

from headrace.errors import WorkerDied
from headrace.run import spawn
from headrace.run.executor import TaskStream, make_executor, ordered_map
from headrace.run.process import ProcessExecutor
from headrace.run.task import RUNNING
from headrace.steps import Pipeline, emit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every worker is an interpreter of its own")

WORKERS = 3
LIMIT = 3.0  # seconds; two, and a busy machine
HANGS = """
import time
from headrace.run import forkserver
start, left = forkserver._Server._start, [{workers}]
def hang(self, *request):
    begin = start(self, *request)
    left[0] -= 1
    if begin is None and not left[0]:
        time.sleep(1000)
    return begin
forkserver._Server._start = hang
"""


def identity() -> Callable[[Any], Any]:
    return stubborn


def stubborn(x: int) -> int:
    if x < 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    return x


@pytest.fixture
def pools() -> Iterator[list[ProcessExecutor]]:
    made: list[ProcessExecutor] = []
    yield made
    for executor in made:
        executor.close()


def open_pool(pools: list[ProcessExecutor], **settings: Any) -> ProcessExecutor:
    executor = make_executor("process", identity, WORKERS, **settings)
    assert isinstance(executor, ProcessExecutor)
    pools.append(executor)
    return executor


def let_hang(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Servers from now on do nothing more once they have started so many workers."""
    real = spawn.program

    def program(module: str, *arguments: int) -> list[str]:
        command = real(module, *arguments)
        if module == "forkserver":
            before, after = command[-1].split("; from", 1)
            command[-1] = f"{before}; exec({HANGS.format(workers=workers)!r}); from{after}"
        return command

    monkeypatch.setattr(spawn, "program", program)


def make_busy(executor: ProcessExecutor, number: int) -> TaskStream[int, int]:
    """So many workers are in an item that takes long and do not listen to SIGTERM."""
    stream = ordered_map(executor, [-1] * number, number)
    stream._submit()
    while sum(child.ready and child.arena.words[RUNNING] for child in executor._children) < number:
        executor.completed(0.01)
    time.sleep(0.05)  # from the mark to the item itself
    return stream


def bring(processes: list[psutil.Process], state: str) -> None:
    for process in processes:
        if state == "stopped":
            process.suspend()
        elif state == "killed":
            process.kill()


@pytest.mark.parametrize("server_state", ["running", "stopped", "killed", "hung"])
@pytest.mark.parametrize("worker_state", ["idle", "busy", "stopped", "killed"])
def test_closing(
    server_state: str, worker_state: str, pools: list[ProcessExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    if server_state == "hung":
        let_hang(monkeypatch, WORKERS)
    executor = open_pool(pools)
    server = psutil.Process(executor._starter._process.pid)  # type: ignore[attr-defined]
    workers = [psutil.Process(child.process.pid) for child in executor._children]
    assert sorted(ordered_map(executor, range(WORKERS), WORKERS)) == list(range(WORKERS))
    if worker_state == "busy":
        make_busy(executor, WORKERS)
    bring([server], server_state)
    bring(workers, worker_state)
    began = time.monotonic()
    executor.close()
    assert time.monotonic() - began < LIMIT
    assert gone([server, *workers])


@pytest.mark.parametrize("worker_state", ["idle", "stopped", "killed"])
def test_closing_a_pool_without_a_server(worker_state: str, pools: list[ProcessExecutor]) -> None:
    executor = open_pool(pools, start_method="spawn")
    workers = [psutil.Process(child.process.pid) for child in executor._children]
    assert list(ordered_map(executor, range(9), 9)) == list(range(9))
    bring(workers, worker_state)
    began = time.monotonic()
    executor.close()
    assert time.monotonic() - began < LIMIT
    assert gone(workers)


def endless(x: int) -> Iterator[int]:
    while True:
        yield x


class Endless:
    """A reader that its emitter never gets to the end of."""

    def __iter__(self) -> Iterator[int]:
        return endless(1)


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_closing_with_emitters(state: str) -> None:
    pipeline = Pipeline([stubborn], num_workers=2).start()
    emit([Endless() for _ in range(3)], pipeline)
    assert next(iter(pipeline)) == 1
    every = psutil.Process().children(recursive=True)
    assert len(every) == 6
    bring(every, state)
    began = time.monotonic()
    pipeline.close()
    assert time.monotonic() - began < 2 * LIMIT
    assert gone(every)


class Once:
    """Ends its worker at item 5, once."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self) -> Callable[[int], int]:
        return self.run

    def run(self, x: int) -> int:
        if x == 5:
            try:
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return x
            os._exit(3)
        return x


def test_a_death_that_the_server_does_not_tell_of_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    let_hang(monkeypatch, 2)
    executor = make_executor("process", Once(str(tmp_path / "mark")), 2)
    try:
        assert list(ordered_map(executor, range(50), 8)) == list(range(50))
        assert executor.statistics().deaths == 1
    finally:
        executor.close()


def test_a_death_that_nobody_can_tell_of_is_an_error_all_the_same(
    pools: list[ProcessExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_hang(monkeypatch, WORKERS)
    executor = open_pool(pools, max_retries=0)
    stream = make_busy(executor, 1)
    for child in executor._children:
        os.kill(child.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="ended, as did the process that started it"):
        list(stream)

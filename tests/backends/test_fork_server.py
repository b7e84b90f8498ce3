"""The fork server of a pool of worker processes: what it is seen to do, and what it must never be seen by."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from process_watching import gone

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource, steps
from headrace.errors import WorkerDied
from headrace.run.executor import make_executor, ordered_map
from headrace.run.process import ProcessExecutor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every worker is an interpreter of its own")


def whoami(x: int) -> tuple[int, int, int]:
    return x, os.getpid(), os.getppid()


class Factory:
    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn

    def __call__(self) -> Callable[[Any], Any]:
        return self.fn


@pytest.fixture
def pool() -> Iterator[Callable[..., ProcessExecutor]]:
    made: list[ProcessExecutor] = []

    def make(fn: Callable[[Any], Any], workers: int = 2, **settings: Any) -> ProcessExecutor:
        executor = make_executor("process", Factory(fn), workers, **settings)
        assert isinstance(executor, ProcessExecutor)
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.close()


def server_of(executor: ProcessExecutor) -> psutil.Process:
    pid = executor._children[0].process.pid
    (server,) = [child for child in psutil.Process().children() if pid in {each.pid for each in child.children()}]
    return server


def test_workers_are_forks_of_one_server_which_ends_with_them(pool: Callable[..., ProcessExecutor]) -> None:
    executor = pool(whoami, 3)
    found = list(ordered_map(executor, range(200), 64))
    assert [x for x, _, _ in found] == list(range(200))
    server = server_of(executor)
    assert {parent for _, _, parent in found} == {server.pid}
    assert {child.pid for child in server.children()} == {child.process.pid for child in executor._children}
    assert server.num_threads() == 1
    workers = server.children()
    executor.close()
    assert not any(process.is_running() for process in [server, *workers])


def has_loaded(name: str) -> bool:
    return name in sys.modules


def test_the_server_loads_what_every_worker_would(pool: Callable[..., ProcessExecutor]) -> None:
    names = ["colorsys", "wave", "this"]
    executor = pool(has_loaded, 3, modules=("colorsys", "wave"))
    assert list(ordered_map(executor, names, 1)) == [True, True, False]
    assert server_of(executor).num_threads() == 1


def test_what_the_server_of_a_step_pipeline_loads_brings_no_threads() -> None:
    with steps.Pipeline([whoami], num_workers=2) as pipeline:
        assert len(list(pipeline.map(range(10)))) == 10
        assert isinstance(pipeline._executor, ProcessExecutor)
        assert pipeline._executor._config.modules == ("headrace.steps.chain",)
        assert server_of(pipeline._executor).num_threads() == 1


def test_a_pool_of_one_has_no_server(pool: Callable[..., ProcessExecutor]) -> None:
    (_, _, parent), *_ = ordered_map(pool(whoami, 1), range(3), 4)
    assert parent == os.getpid()


def stamped(columns: dict[str, Any]) -> dict[str, Any]:
    return {"n": columns["n"], "parent": np.full(len(columns["n"]), os.getppid())}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_data_pipeline_starts_workers_as_the_option_says(method: str) -> None:
    shard = InMemoryShard([{"n": i} for i in range(400)])
    work = StaticMixtureWorkSource(
        datasets=[Dataset.from_dict("toy", {0: shard})], mixture=MixtureSpec({"toy": 1.0}), chunk_size=50
    )
    pipeline = Pipeline(work).map_block(stamped, reads=["n"]).batch(8)
    options = {"runner": "process", "max_workers": 4, "mp_context": method, "auto_validation": "off"}
    parents = {record.payload["parent"] for batch in pipeline.options(**options) for record in batch.records}
    assert (parents == {os.getpid()}) == (method == "spawn")
    assert len(parents) == 1


def kill_self_once(path: str, x: int) -> int:
    if x == 50:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return x
        os.kill(os.getpid(), signal.SIGSEGV)
    return x


class KillOnce:
    def __init__(self, path: Path, also_server: bool) -> None:
        self.path, self.also_server = str(path), also_server

    def __call__(self, x: int) -> int:
        if x == 50 and self.also_server and not os.path.exists(self.path):
            os.kill(os.getppid(), signal.SIGKILL)
        return kill_self_once(self.path, x)


@pytest.mark.parametrize("also_server", [False, True])
def test_deaths_of_workers_and_of_the_server_lose_nothing(
    pool: Callable[..., ProcessExecutor], tmp_path: Path, also_server: bool
) -> None:
    executor = pool(KillOnce(tmp_path / "mark", also_server))
    assert list(ordered_map(executor, range(300), 32)) == list(range(300))
    assert executor.statistics().deaths == 1


def kill_the_server(x: int) -> int:
    if x == 10:
        os.kill(os.getppid(), signal.SIGKILL)
    return x


def test_workers_go_on_without_their_server_and_are_ended_without_it(pool: Callable[..., ProcessExecutor]) -> None:
    executor = pool(kill_the_server)
    server = server_of(executor)
    workers = server.children()
    assert list(ordered_map(executor, range(100), 32)) == list(range(100))
    server.wait(5)
    executor.close()
    assert gone(workers)


def sleep_long(x: int) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
    return x


@pytest.mark.parametrize("server_too", [False, True])
def test_a_worker_that_ignores_signals_is_gone_within_two_seconds(
    pool: Callable[..., ProcessExecutor], server_too: bool
) -> None:
    executor = pool(sleep_long)
    stream = ordered_map(executor, range(2), 4)
    stream._submit()
    executor.completed(1.0)
    server = server_of(executor)
    workers = server.children()
    if server_too:
        server.kill()
    began = time.monotonic()
    executor.close()
    assert time.monotonic() - began < 2.0
    assert gone([server, *workers])


def test_a_server_that_never_gets_to_start_anything_does_not_hold_up_the_end(
    pool: Callable[..., ProcessExecutor],
) -> None:
    executor = pool(whoami)
    server = psutil.Process(executor._starter._process.pid)
    server.suspend()
    began = time.monotonic()
    executor.close()
    assert time.monotonic() - began < 3.0
    assert not server.is_running()


def test_how_a_worker_ended_is_told_by_the_server(pool: Callable[..., ProcessExecutor]) -> None:
    def leave(x: int) -> int:
        os._exit(7)

    with pytest.raises(WorkerDied, match=r"worker \d \(pid \d+\) ended with exit status 7"):
        list(ordered_map(pool(leave, max_retries=0), range(4), 4))

    def stop(x: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return x

    with pytest.raises(WorkerDied, match=r"was killed by SIGKILL \(signal 9; the kernel kills this way when memory"):
        list(ordered_map(pool(stop, max_retries=0), range(4), 4))


def many_open(x: int) -> list[str]:
    return sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd") if _open(fd))


def _open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}") and int(fd) > 2


def test_a_worker_holds_nothing_of_the_others(pool: Callable[..., ProcessExecutor]) -> None:
    """Its socket, its lifeline, its pipe and its memory: with another's, that one's end would go unseen."""
    executor = pool(many_open, 4)
    (alone,) = ordered_map(pool(many_open, 1), [0], 1)
    for found in ordered_map(executor, range(64), 16):
        assert found.count("socket") == alone.count("socket") == 2
        assert found.count("pipe") == alone.count("pipe") + 1


HOOK = """
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""

SCRIPT = """
import os, threading
from headrace.steps import Pipeline

def who(x):
    return x, len(os.listdir("/proc/self/task"))

with Pipeline([who], num_workers=2) as pipeline:
    found = list(pipeline.map(range(100)))
print([x for x, _ in found] == list(range(100)), {threads for _, threads in found})
"""


def test_a_server_with_threads_does_not_fork(tmp_path: Path) -> None:
    """A site hook starts a thread in every interpreter: a fork would lack it, a fresh interpreter has it."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True {2}\n", "")


def test_a_fork_of_the_owner_lets_go_of_its_copies(pool: Callable[..., ProcessExecutor]) -> None:
    executor = pool(whoami)
    assert len(list(ordered_map(executor, range(10), 4))) == 10
    server = server_of(executor)
    pid = os.fork()
    if not pid:
        executor.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert server.is_running()
    assert len(list(ordered_map(executor, range(10), 4))) == 10

"""One body of tests, every executor: inline, threads and processes give the same results, order and errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.reorder import Batch
from headrace.errors import ConfigError, OperatorError, UnknownOptionError, WorkerDied
from headrace.run.executor import Executor, make_executor, ordered_map

HANG = 60.0  # seconds; generous, since the machine may be busy


@pytest.fixture(params=["inline", "threads", "process"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(kind: str) -> Iterator[Callable[..., Executor]]:
    made: list[Executor] = []

    def build(fn: Callable[[Any], Any], **settings: Any) -> Executor:
        made.append(make_executor(kind, partial(identity, fn), settings.pop("workers", 2), name="op", **settings))
        return made[-1]

    yield build
    for executor in made:
        executor.close()


def identity(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return fn


def add_one(x: int) -> int:
    return x + 1


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Panic(BaseException):
    pass


def raise_at(error: Callable[[], BaseException], at: int, x: int) -> int:
    if x == at:
        raise error()
    return x


def test_results_in_order(make: Callable[..., Executor]) -> None:
    assert list(ordered_map(make(add_one), range(300), 5)) == list(range(1, 301))


def test_unordered_is_the_same_multiset(make: Callable[..., Executor]) -> None:
    assert sorted(ordered_map(make(add_one), range(300), 5, ordered=False)) == list(range(1, 301))


def test_lambdas_and_closures(make: Callable[..., Executor]) -> None:
    offset = 40
    assert list(ordered_map(make(lambda x: x + offset), [1, 2], 2)) == [41, 42]


def test_maps_share_an_executor_in_any_interleaving(make: Callable[..., Executor]) -> None:
    executor = make(add_one)
    streams = [ordered_map(executor, range(k, k + 40), 1 + k % 3) for k in range(0, 400, 100)]
    got: list[list[int]] = [[] for _ in streams]
    turn = 0
    while any(len(out) < 40 for out in got):
        lane = (turn * 7 + turn // 5) % len(streams)
        turn += 1
        if len(got[lane]) < 40:
            got[lane].append(next(streams[lane]))
    assert got == [[x + 1 for x in range(k, k + 40)] for k in range(0, 400, 100)]


def test_a_window_bounds_what_is_pulled(make: Callable[..., Executor]) -> None:
    pulled = []

    def source() -> Iterator[int]:
        for x in range(10**9):
            pulled.append(x)
            yield x

    results = ordered_map(make(add_one), source(), 3)
    for taken in range(1, 20):
        next(results)
        assert len(pulled) <= taken + 3
    results.close()
    assert list(results) == []


def test_the_workers_own_exception_with_its_traceback(make: Callable[..., Executor]) -> None:
    results = ordered_map(make(partial(raise_at, partial(ValueError, "seven"), 7)), range(20), 4)
    got = []
    with pytest.raises(ValueError, match="seven") as caught:
        got.extend(results)
    assert got == list(range(7))
    note = "\n".join(caught.value.__notes__)
    assert "item 7" in note and "raise_at" in note and "raise error()" in note


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (partial(TwoArguments, 3, "bad"), TwoArguments, "3: bad"),
        (partial(Unpicklable, "locked"), Unpicklable, "locked"),
        (partial(Panic, "panic"), Panic, "panic"),
        (partial(SystemExit, 3), OperatorError, "SystemExit"),
        (partial(KeyboardInterrupt), OperatorError, "KeyboardInterrupt"),
        (partial(StopIteration), OperatorError, "StopIteration"),
    ],
)
def test_every_kind_of_exception_arrives(
    make: Callable[..., Executor], kind: str, error: Any, expected: type, text: str
) -> None:
    if kind == "inline" and error.func is KeyboardInterrupt:
        expected, text = KeyboardInterrupt, "^$"  # inline, Ctrl-C and a step that raises it are one and the same
    with pytest.raises(expected, match=text):
        list(ordered_map(make(partial(raise_at, error, 19)), range(20), 4))


def test_a_failing_map_leaves_the_others_alone(make: Callable[..., Executor]) -> None:
    executor = make(partial(raise_at, partial(ValueError, "bad"), 5))
    good, bad = ordered_map(executor, range(100, 140), 3), ordered_map(executor, [5, 6, 7], 3)
    assert next(good) == 100
    with pytest.raises(ValueError, match="bad"):
        next(bad)
    assert list(good) == list(range(101, 140))


def test_an_error_of_the_tasks_comes_after_the_results_before_it(make: Callable[..., Executor]) -> None:
    def source() -> Iterator[int]:
        yield from range(5)
        raise LookupError("source")

    got = []
    with pytest.raises(LookupError, match="source"):
        got.extend(ordered_map(make(add_one), source(), 4))
    assert got == [1, 2, 3, 4, 5]


def log_and_wait(folder: str, x: int) -> int:
    with open(f"{folder}/log", "ab", buffering=0) as log:
        log.write(b"%d\n" % x)
    while x and not os.path.exists(f"{folder}/gate"):
        time.sleep(0.001)
    return x


def test_tasks_of_a_closed_map_that_have_not_begun_are_not_run(
    make: Callable[..., Executor], kind: str, tmp_path: Path
) -> None:
    executor = make(partial(log_and_wait, str(tmp_path)))
    results = ordered_map(executor, range(100), 16)
    assert next(results) == 0
    results.close()
    (tmp_path / "gate").touch()
    assert list(ordered_map(executor, [1000] * 8, 8)) == [1000] * 8
    begun = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert begun.count(1000) == 8
    assert len(begun) - 8 <= (1 if kind == "inline" else 3)  # the one that was wanted, and one with each worker


class Closing:
    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, x: int) -> int:
        return x

    def close(self) -> None:
        with open(self.path, "a") as file:
            file.write("closed\n")


def test_each_worker_is_built_once_and_torn_down(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    executor = make_executor(kind, partial(Closing, path), 2, name="op")
    assert list(ordered_map(executor, range(50), 4)) == list(range(50))
    executor.close()
    executor.close()
    assert Path(path).read_text().split() == ["closed"] * (1 if kind == "inline" else 2)
    with pytest.raises(RuntimeError, match="closed"):
        executor.submit(Batch(0, [1], 1))


def broken_factory() -> Callable[[int], int]:
    raise OSError("no model here")


def test_a_setup_that_fails_is_raised(kind: str) -> None:
    with pytest.raises(OSError, match="no model here"):
        executor = make_executor(kind, broken_factory, 2, name="op")
        try:
            list(ordered_map(executor, range(5), 2))
        finally:
            executor.close()


@dataclass
class Block:
    ids: np.ndarray[Any, Any]
    small: np.ndarray[Any, Any]
    names: list[str]


def double(block: Block) -> Block:
    block.ids *= 2  # in place: what a worker gets is its own
    return Block(block.ids, block.small + 1, [*block.names, "done"])


@pytest.mark.parametrize("size", [10, 10_000, 200_000, 1_200_000])
def test_arrays_of_every_size_inside_any_object(make: Callable[..., Executor], kind: str, size: int) -> None:
    blocks = [Block(np.full(size, k, np.int64), np.arange(k), [str(k)]) for k in range(5)]
    kept = list(ordered_map(make(double, slab_bytes=8 << 20), blocks, 3))  # the largest does not fit
    assert len(kept) == 5
    for k, block in enumerate(kept):
        assert block.ids.shape == (size,) and (block.ids == 2 * k).all() and block.ids.flags.writeable
        assert (block.small == np.arange(k) + 1).all()
        assert block.names == [str(k), "done"]
        if kind == "process":
            assert (blocks[k].ids == k).all()


def test_unknown_kind_and_bad_settings() -> None:
    with pytest.raises(UnknownOptionError, match="did you mean 'process'"):
        make_executor("proces", broken_factory)
    for bad in ({"workers": 0}, {"max_retries": -1}, {"timeout": 0.0}, {"slab_bytes": -1}):
        with pytest.raises(ConfigError):
            make_executor("inline", broken_factory, **bad)
    with pytest.raises(ConfigError, match="window"):
        ordered_map(make_executor("inline", partial(identity, add_one)), [1], 0)


# -- processes only ------------------------------------------------------------------------------------------------


@pytest.fixture
def processes() -> Iterator[Callable[..., Executor]]:
    made: list[Executor] = []

    def build(fn: Callable[[Any], Any], **settings: Any) -> Executor:
        made.append(make_executor("process", partial(identity, fn), settings.pop("workers", 2), name="op", **settings))
        return made[-1]

    yield build
    for executor in made:
        executor.close()


def kill_self(path: str, times: int, at: int, x: int) -> int:
    if x == at:
        with open(path, "a") as file:
            file.write("x")
        if os.path.getsize(path) <= times:
            os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_a_killed_worker_is_replaced_and_the_stream_unchanged(
    processes: Callable[..., Executor], tmp_path: Path
) -> None:
    executor = processes(partial(kill_self, str(tmp_path / "n"), 2, 7))
    assert list(ordered_map(executor, range(40), 4)) == list(range(40))
    assert (executor.statistics().deaths, executor.statistics().retries) == (2, 2)


def test_past_its_retries_a_death_names_signal_operator_and_items(
    processes: Callable[..., Executor], tmp_path: Path
) -> None:
    executor = processes(
        partial(kill_self, str(tmp_path / "n"), 99, 7), max_retries=1, describe=lambda x: f"sample #{x}"
    )
    got = []
    with pytest.raises(WorkerDied, match=r"op: .*SIGKILL.*item 7 \(sample #7\), after 2 attempts"):
        got.extend(ordered_map(executor, range(40), 4))
    assert got == list(range(7))


def die_below(least: int, x: int) -> int:
    if x < least:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_item_after_item_that_kills_its_worker_ends_no_executor(processes: Callable[..., Executor]) -> None:
    executor = processes(partial(die_below, 4), workers=1, max_retries=1)
    for k in range(4):
        with pytest.raises(WorkerDied, match=f"item 0 \\({k}\\), after 2 attempts"):
            list(ordered_map(executor, [k], 1))
    assert list(ordered_map(executor, range(4, 9), 2)) == [4, 5, 6, 7, 8]


def late_start(path: str) -> Callable[[Any], Any]:
    """Its first worker dies before it can begin."""
    if not os.path.exists(path):
        open(path, "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return add_one


def test_a_death_before_the_start_is_held_against_no_item(tmp_path: Path) -> None:
    executor = make_executor("process", partial(late_start, str(tmp_path / "once")), name="op", max_retries=0)
    try:
        assert list(ordered_map(executor, range(5), 2)) == [1, 2, 3, 4, 5]
        assert (executor.statistics().deaths, executor.statistics().retries) == (1, 0)
    finally:
        executor.close()


def test_a_worker_that_cannot_start_is_an_error(processes: Callable[..., Executor]) -> None:
    executor = make_executor("process", partial(os._exit, 3), 2, name="op", max_retries=0)
    try:
        with pytest.raises(WorkerDied, match="exit status 3"):
            list(ordered_map(executor, range(5), 2))
    finally:
        executor.close()


def make_lock(x: int) -> Any:
    return threading.Lock() if x == 5 else x


def test_a_result_that_cannot_be_pickled_is_its_own_failure(processes: Callable[..., Executor]) -> None:
    got = []
    with pytest.raises(TypeError, match="pickle") as caught:
        got.extend(ordered_map(processes(make_lock), range(10), 4))
    assert got == [0, 1, 2, 3, 4]
    assert "cannot leave its worker" in "".join(caught.value.__notes__)


def test_an_item_that_cannot_be_pickled_is_its_own_failure(processes: Callable[..., Executor]) -> None:
    items = [0, 1, 2, threading.Lock(), 4]
    executor = processes(add_one)
    executor.submit(Batch("b", items, 5))
    seen: dict[int, Any] = {}
    while len(seen) < 5:
        for part in executor.completed(HANG):
            for offset in range(part.count):
                failed = part.failure is not None and offset == part.count - 1
                seen[part.start + offset] = "failed" if failed else part.values[offset]
    assert seen == {0: 1, 1: 2, 2: 3, 3: "failed", 4: 5}


class Stubborn:
    def __reduce__(self) -> Any:
        return (explode, ())


def explode() -> None:
    raise RuntimeError("cannot be rebuilt")


def test_an_item_that_cannot_be_unpickled_in_the_worker(processes: Callable[..., Executor]) -> None:
    with pytest.raises(RuntimeError, match="cannot be rebuilt"):
        list(ordered_map(processes(add_one), [1, Stubborn(), 3], 2))


def sleep_at(at: int, seconds: float, x: int) -> int:
    if x == at:
        time.sleep(seconds)
    return x


@pytest.mark.parametrize("kind", ["threads", "process"], indirect=True)
def test_an_item_that_takes_too_long(make: Callable[..., Executor]) -> None:
    got = []
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"item 3 took longer than 0\.2 s"):
        got.extend(ordered_map(make(partial(sleep_at, 3, 600.0), timeout=0.2), range(10), 4))
    assert got == [0, 1, 2]
    assert time.monotonic() - started < HANG


def test_closing_kills_a_busy_worker(kind: str) -> None:
    if kind == "inline":
        return
    executor = make_executor(kind, partial(identity, partial(sleep_at, 0, 600.0)), 2, name="op")
    executor.submit(Batch(0, [0], 1))
    executor.completed(0.3)
    started = time.monotonic()
    executor.close()
    assert time.monotonic() - started < 20.0  # two seconds on an idle machine


def test_large_data_both_ways_does_not_deadlock(processes: Callable[..., Executor]) -> None:
    executor = processes(add_one, workers=1, slab_bytes=0)  # everything through the socket
    arrays = [np.full(1_000_000, k, np.float64) for k in range(8)]
    for k, out in enumerate(ordered_map(executor, arrays, 8)):
        assert out[0] == k + 1 and out[-1] == k + 1


def test_a_worker_killed_while_a_big_task_is_written_to_it(processes: Callable[..., Executor], tmp_path: Path) -> None:
    executor = processes(partial(kill_first, str(tmp_path / "n")), slab_bytes=0, workers=1)
    blobs = [bytes([k]) * 10_000_000 for k in range(4)]
    assert list(ordered_map(executor, blobs, 3)) == [(k, 10_000_000) for k in range(4)]


def kill_first(path: str, blob: bytes) -> tuple[int, int]:
    if not os.path.exists(path):
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return blob[0], len(blob)


def test_leased_memory_is_not_used_again_while_anyone_sees_it(processes: Callable[..., Executor]) -> None:
    executor = processes(Hoarder(), workers=1, slab_bytes=2 << 20)
    arrays = (np.full(20_000, k, np.int64) for k in range(200))
    assert list(ordered_map(executor, arrays, 4)) == [True] * 200


class Hoarder:
    """Keeps a slice of every third array and looks whether any of them changed."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, Any]] = []

    def __call__(self, array: Any) -> bool:
        k = int(array[0])
        if k % 3 == 0:
            self.kept.append((k, array[7:].reshape(-1, 1)[::2]))
        return all(bool((part == k).all()) for k, part in self.kept)


def test_results_kept_by_the_consumer_stay_as_they_are(processes: Callable[..., Executor]) -> None:
    executor = processes(np.array, slab_bytes=4 << 20)
    kept = []
    for k, out in enumerate(ordered_map(executor, (np.full(30_000, k) for k in range(150)), 4)):
        if k % 2 == 0:
            kept.append((k, out[3:]))
        out += 0 if k % 2 == 0 else 1
    assert all((part == k).all() for k, part in kept)


def test_results_without_a_copy_are_read_only_and_stay_as_they_are(processes: Callable[..., Executor]) -> None:
    executor = processes(np.array, slab_bytes=4 << 20, zero_copy=True)
    kept = []
    for k, out in enumerate(ordered_map(executor, (np.full(30_000, k) for k in range(150)), 4)):
        if out.flags.owndata is False and k % 3 == 0:
            kept.append((k, out[3:]))
    assert all((part == k).all() for k, part in kept) and len(kept) == 50
    assert not kept[0][1].flags.writeable


def test_large_inputs_with_small_results_do_not_pile_up_in_one_message(processes: Callable[..., Executor]) -> None:
    executor = processes(len)
    executor.submit(Batch("b", [bytes(1000)] * 10, 10))
    (part,) = executor.completed(HANG)
    assert part.values == [1000] * 10 and part.nbytes >= 1000


SCRIPT = """
import os, signal, sys, time
import numpy as np
from headrace.run.executor import make_executor, ordered_map

class Point:
    def __init__(self, x): self.x = x

class MyError(Exception): pass

def step(p):
    if p.x == 100: raise MyError("at one hundred")
    return Point(p.x + 1)

executor = make_executor("process", lambda: step, 2, name="main")   # no __main__ guard
out = list(ordered_map(executor, [Point(k) for k in range(20)], 4))
assert all(type(p) is Point for p in out) and [p.x for p in out] == list(range(1, 21))
try:
    list(ordered_map(executor, [Point(100)], 4))
except MyError as error:
    assert "at one hundred" in str(error)
else:
    raise SystemExit("no error")
print("fine")
"""


def run_script(text: str, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(text)
    return subprocess.run(
        [sys.executable, "-W", "error", str(path), *arguments], capture_output=True, text=True, timeout=HANG
    )


def test_classes_and_functions_of_a_script_without_a_guard(tmp_path: Path) -> None:
    done = run_script(SCRIPT, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")  # and it left without closing: no noise


ORPHANS = """
import os, signal, sys, time
from headrace.core.reorder import Batch
from headrace.run.executor import make_executor

def work(x):
    if x:
        while True: pass
    return os.getpid()

executor = make_executor("process", lambda: work, 2, name="main")
pids = set()
while len(pids) < 2:
    for k in range(2):
        executor.submit(Batch(k, [0], 1))
    pids |= {pid for part in executor.completed() for pid in part.values}
executor.submit(Batch(9, [1], 1))                                   # one busy in Python, one idle
print(*pids, flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[1] == "raise":
    raise ValueError("main program fails")
elif sys.argv[1] == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
elif sys.argv[1] == "drop":
    del executor
    time.sleep(0)
"""


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("how", ["kill", "raise", "interrupt", "drop", "return"])
def test_no_worker_outlives_its_parent(how: str, tmp_path: Path) -> None:
    done = run_script(ORPHANS, tmp_path, how)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert wait_gone(pids)
    assert "Exception ignored" not in done.stderr and "leaked" not in done.stderr
    if how in ("drop", "return"):
        assert (done.returncode, done.stderr) == (0, "")


FORK = """
import os
from headrace.run.executor import make_executor, ordered_map

executor = make_executor("process", lambda: abs, 2, name="main")
assert list(ordered_map(executor, range(4), 2)) == [0, 1, 2, 3]
pid = os.fork()
if pid == 0:
    executor.close()          # the child's copy: must not touch the parent's workers
    raise SystemExit(0)
assert os.waitpid(pid, 0)[1] == 0
assert list(ordered_map(executor, range(4), 2)) == [0, 1, 2, 3]
assert executor.statistics().deaths == 0
executor.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_of_the_parent_leaves_the_workers_alone(tmp_path: Path) -> None:
    done = run_script(FORK, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


NO_SHARED_MEMORY = """
import logging, resource
import numpy as np
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))        # no file, and no shared memory, over 1 MB
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from headrace.run.executor import make_executor, ordered_map

executor = make_executor("process", lambda: (lambda x: x * 2), 2, name="main")
for k, out in enumerate(ordered_map(executor, (np.full(400_000, k) for k in range(6)), 3)):
    assert (out == 2 * k).all()
executor.close()
"""


def test_too_little_shared_memory_is_a_message_and_a_slower_way(tmp_path: Path) -> None:
    done = run_script(NO_SHARED_MEMORY, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no shared memory of" in done.stderr and "--shm-size" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /dev/shm and /proc")
def test_shared_memory_has_no_name_and_is_gone_with_its_users(tmp_path: Path) -> None:
    executor = make_executor("process", partial(identity, np.array), 2, name="op")
    list(ordered_map(executor, [np.zeros(100_000)] * 4, 2))
    assert executor.statistics().slab_hits == 4
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "headrace" in line]
    assert mapped and all("memfd:" in line and "(deleted)" in line for line in mapped)
    open_files = len(os.listdir("/proc/self/fd"))
    executor.close()
    assert len(os.listdir("/proc/self/fd")) < open_files

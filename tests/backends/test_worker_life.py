"""Worker processes and the world: scripts, forks and deaths of the parent, and shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from executor_functions import HANG, identity

from headrace.run.executor import make_executor, ordered_map

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

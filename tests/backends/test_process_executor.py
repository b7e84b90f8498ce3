"""The process executor: deaths, what cannot be pickled, and large data."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_functions import HANG, add_one

from headrace.core.reorder import Batch
from headrace.errors import WorkerDied
from headrace.run.executor import Executor, make_executor, ordered_map


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

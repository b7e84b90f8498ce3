"""One body of tests, every executor: inline, threads and processes give the same results, order and errors."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executor_functions import HANG, add_one, identity

from headrace.core.reorder import Batch
from headrace.errors import ConfigError, OperatorError, UnknownOptionError
from headrace.run.executor import Executor, make_executor, ordered_map


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

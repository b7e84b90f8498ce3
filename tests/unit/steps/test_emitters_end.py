"""How emitters begin and end: none is left behind, and none keeps the consumer waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from step_functions import HANG

from headrace.steps import Pipeline, emit


def keep(x: Any) -> Any:
    return x


class Unreadable:
    """Cannot be pickled, and not be iterated over."""

    def __reduce__(self) -> Any:
        raise TypeError("not to be read")

    def __iter__(self) -> Iterator[int]:
        raise TypeError("not to be read")


def test_emitter_processes_that_were_started_end_when_a_later_one_cannot() -> None:
    before = children()
    with Pipeline([keep], num_workers=1).start() as pipeline:
        workers = children() - before
        with pytest.raises(TypeError, match="not to be read"):
            emit([range(10**12), Unreadable()], pipeline)
        assert children() - before == workers
        assert list(pipeline.map([1])) == [1]
    assert children() <= before


def children() -> set[psutil.Process]:
    """Processes that descend from this one: a fork server's forks are not its own children."""
    return set(psutil.Process().children(recursive=True))


def test_a_reader_that_cannot_begin_inline_is_an_error_of_emit() -> None:
    with Pipeline([keep], runner="inline") as pipeline:
        with pytest.raises(TypeError, match="not to be read"):
            emit([[1], Unreadable()], pipeline)
        assert list(pipeline) == []


class Blocks:
    def __init__(self, begun: threading.Semaphore, let_go: threading.Event) -> None:
        self.begun = begun
        self.let_go = let_go

    def __iter__(self) -> Iterator[int]:
        self.begun.release()
        self.let_go.wait(HANG)
        yield 0


def test_closing_waits_for_all_blocked_readers_together() -> None:
    begun, let_go = threading.Semaphore(0), threading.Event()
    pipeline = Pipeline([keep], runner="threads", num_workers=1)
    emit([Blocks(begun, let_go) for _ in range(12)], pipeline)
    for _ in range(12):
        begun.acquire()
    started = time.monotonic()
    pipeline.close()
    took = time.monotonic() - started
    let_go.set()
    assert took < 3.0  # half a second for all of them; one after the other they would take twelve


def test_a_slow_reader_inline_gives_its_items_one_by_one() -> None:
    read: list[int] = []

    class Slow:
        def __iter__(self) -> Iterator[int]:
            for k in range(60):
                time.sleep(0.006)  # longer than the patience for one batch
                read.append(k)
                yield k

    with Pipeline([keep], runner="inline") as pipeline:
        emit([Slow()], pipeline)
        ahead = [len(read) - k for k in pipeline]
    assert len(ahead) == 60 and max(ahead) <= 4

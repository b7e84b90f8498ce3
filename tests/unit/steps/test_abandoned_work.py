"""Work that nobody wants any more: what has not begun is not run, and whoever comes next does not wait for it."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.steps import Pipeline, emit

WORKERS = 2


def begin(folder: str, fails: bool, x: int) -> int:
    """Items from 1 on wait for a gate; item 0 waits until one of them does."""
    log = os.open(f"{folder}/log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(log, f"{x}\n".encode() if x >= 0 else b"")
    os.close(log)
    if x == 0:
        wait_for_begun(folder, 2)
        if fails:
            raise ValueError("item 0")
    elif x > 0:
        while not os.path.exists(f"{folder}/gate"):
            time.sleep(0.001)
        time.sleep(0.03)  # longer than a worker keeps a batch to itself
    return x


def begun(folder: str | Path) -> list[int]:
    return [int(line) for line in (Path(folder) / "log").read_text().split()]


def wait_for_begun(folder: str | Path, number: int) -> None:
    while len(begun(folder)) < number:
        time.sleep(0.001)


def same(x: int) -> int:
    return x


STEADY: list[dict[str, Any]] = [
    {},
    {"mode": "staged", "num_workers": [WORKERS, 1]},
    {"assign": same},
    {"ordered": False},
]


@pytest.mark.parametrize("runner", ["threads", "process"])
@pytest.mark.parametrize("options", STEADY, ids=["fused", "staged", "keyed", "unordered"])
@pytest.mark.parametrize("fails", [False, True], ids=["closed", "failed"])
def test_what_was_sent_and_not_begun_is_not_run(
    runner: str, options: dict[str, Any], fails: bool, tmp_path: Path
) -> None:
    steps = [partial(begin, str(tmp_path), fails), same]
    with Pipeline(steps, **{"runner": runner, "num_workers": WORKERS, **options}) as pipeline:
        outputs = pipeline.map(range(200))
        if fails:
            with pytest.raises(ValueError, match="item 0"):
                next(outputs)
        else:
            assert next(outputs) == 0
            outputs.close()  # type: ignore[attr-defined]
        assert pipeline.statistics().in_flight == 0
        (tmp_path / "gate").touch()
        assert sorted(pipeline.map(range(-50, 0))) == list(range(-50, 0))
        assert len(begun(tmp_path)) <= 1 + WORKERS  # item 0, and what each worker had begun
        stats = pipeline.statistics()
        assert 51 <= stats.received == stats.finished <= 51 + WORKERS
        assert stats.workers.deaths == 0


@pytest.mark.parametrize("runner", ["inline", "threads", "process"])
def test_other_maps_of_the_pipeline_lose_nothing(runner: str) -> None:
    with Pipeline([same], num_workers=WORKERS, runner=runner) as pipeline:
        for count in range(1, 60):
            wanted, unwanted = pipeline.map(range(200)), pipeline.map(range(1000))
            got = [next(wanted) for _ in range(count)]
            assert [next(unwanted) for _ in range(count)] == got
            unwanted.close()  # type: ignore[attr-defined]
            assert got + list(wanted) == list(range(200))
        stats = pipeline.statistics()
        assert stats.received == stats.finished and stats.in_flight == 0


@pytest.mark.parametrize("runner", ["threads", "process"])
def test_items_of_a_key_keep_their_order_around_abandoned_ones(runner: str) -> None:
    with Pipeline([Sequel()], num_workers=WORKERS, runner=runner, assign=first) as pipeline:
        for n in range(20):
            wanted = pipeline.map([(key, n, i) for i in range(60) for key in range(5)])
            unwanted = pipeline.map([(key, -1, i) for i in range(1000) for key in range(5)])
            assert next(unwanted)
            assert next(wanted)
            unwanted.close()  # type: ignore[attr-defined]
            assert all(wanted)


def first(item: tuple[int, int, int]) -> int:
    return item[0]


class Sequel:
    """Whether an item follows the one before it of its key and map."""

    def __init__(self) -> None:
        self.last: dict[tuple[int, int], int] = {}

    def __call__(self, item: tuple[int, int, int]) -> bool:
        key, n, i = item
        follows = n < 0 or self.last.get((key, n), -1) == i - 1
        self.last[key, n] = i
        return follows


def test_large_arrays_that_are_not_wanted_give_their_memory_back() -> None:
    np = pytest.importorskip("numpy")
    with Pipeline([np.copy], num_workers=WORKERS, slab_bytes=4 << 20) as pipeline:
        for _ in range(10):
            outputs = pipeline.map(np.full(1 << 17, n, np.int64) for n in range(100))
            assert next(outputs)[0] == 0
            outputs.close()  # type: ignore[attr-defined]
        before = pipeline.statistics().workers.slab_hits
        assert [array[0] for array in pipeline.map(np.full(1 << 17, n, np.int64) for n in range(4))] == [0, 1, 2, 3]
        assert pipeline.statistics().workers.slab_hits > before


def test_a_worker_that_dies_over_abandoned_work_is_replaced_and_nothing_is_tried_again(tmp_path: Path) -> None:
    with Pipeline([partial(begin, str(tmp_path), False), Kill()], num_workers=WORKERS) as pipeline:
        outputs = pipeline.map(range(200))
        assert next(outputs) == 0
        outputs.close()  # type: ignore[attr-defined]
        (tmp_path / "gate").touch()
        assert sorted(pipeline.map(range(-50, 0))) == list(range(-50, 0))
        assert len(begun(tmp_path)) <= 1 + WORKERS
        stats = pipeline.statistics()
        assert stats.workers.retries == 0 and stats.workers.deaths >= 1


class Kill:
    def __call__(self, x: int) -> int:
        if x > 0:
            os._exit(3)
        return x


def test_emitted_items_survive_a_map_that_was_given_up(tmp_path: Path) -> None:
    with Pipeline([same], num_workers=WORKERS) as pipeline:
        emit([range(500), range(500, 1000)], pipeline)
        outputs = pipeline.map(range(5000))
        assert next(outputs) == 0
        outputs.close()  # type: ignore[attr-defined]
        assert sorted(pipeline) == list(range(1000))

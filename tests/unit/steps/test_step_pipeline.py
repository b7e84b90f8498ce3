"""The step pipeline as its users meet it: the proposal's own snippet, and every promise of its options."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_functions import HANG, PerKey, add_1, double, draw, every_runner, lock_at_9

from headrace.errors import ConfigError
from headrace.steps import DROP, FileReader, Pipeline, emit, split_seeks


def repeat(arg: int) -> Iterator[int]:
    for _ in range(arg % 4):
        yield arg


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
def test_keys_keep_to_one_worker_in_order(runner: str) -> None:
    with Pipeline([PerKey()], num_workers=3, runner=runner, assign=lambda item: item[0]) as pipeline:
        outputs = list(pipeline.map((f"key{k % 7}", k) for k in range(700)))
    assert [k for _, k, _ in outputs] == list(range(700))
    for key in {key for key, _, _ in outputs}:
        assert [seen for own, _, seen in outputs if own == key] == list(range(1, 101))


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


def test_a_closed_pipeline_says_so() -> None:
    pipeline = Pipeline([add_1], runner="threads", num_workers=1)
    pipeline.close()
    for use in (pipeline.start, lambda: list(pipeline.map([1])), lambda: pipeline.enqueue(1)):
        with pytest.raises(ConfigError, match="closed"):
            use()


def odd_only(x: int) -> Any:
    return x if x % 2 else DROP


@every_runner
def test_counts_of_steps_with_a_key_for_each_item(runner: str) -> None:
    with Pipeline([odd_only, lock_at_9], runner=runner, num_workers=2, assign=lambda x: x, on_error="skip") as pipeline:
        assert len(list(pipeline.map(range(11, 1011)))) == 500
        assert [(step.received, step.produced) for step in pipeline.statistics().steps] == [(1000, 500), (500, 500)]

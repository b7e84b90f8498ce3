"""Public bug reports about workers and processes, each tried on this pipeline (catalogue letters B067 to B079), and the
failure trials on which other libraries hang or lose items."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import WorkerDied
from headrace.steps import Pipeline, emit

HANG = 100.0


def keep(x: Any) -> Any:
    return x


# -- B067: a tokenizer used before the workers start -----------------------------------------------------------------

TOKENIZER = """
import os, sys
import numpy, pyarrow
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from headrace.steps import Pipeline

tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.train_from_iterator(["some words to learn", "more words"] * 50, trainers.BpeTrainer(
    vocab_size=60, special_tokens=["[UNK]"], show_progress=False))
texts = [f"some words number {k}" for k in range(400)]
expected = [encoding.ids for encoding in tokenizer.encode_batch(texts)]     # starts its thread pool in this process
pyarrow.array(range(1000)).cast("float64")

class Encode:
    def __init__(self, text):
        self.text = text
    def setup(self):
        self.tokenizer = Tokenizer.from_str(self.text)
    def __call__(self, text):
        return self.tokenizer.encode_batch([text])[0].ids

with Pipeline([Encode(tokenizer.to_str())], num_workers=4) as pipeline:
    assert list(pipeline.map(texts)) == expected
print("fine")
"""


def test_b067_a_tokenizer_used_before_the_workers_start_neither_hangs_nor_warns(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TOKENIZER)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


# -- B070: shared memory that is too small --------------------------------------------------------------------------


def test_b070_arrays_larger_than_the_shared_memory_go_another_way() -> None:
    arrays = [np.full(300_000, k) for k in range(12)]
    with Pipeline([keep], num_workers=2, slab_bytes=1 << 20) as pipeline:
        for k, array in enumerate(pipeline.map(arrays)):
            assert (array == k).all()
        assert pipeline.statistics().workers.slab_misses == 12
        assert "through sockets" in pipeline.explain()


# -- B072: exceptions that cannot travel (kinds of exceptions: tests/backends/test_executors.py) -----------------------


class Awkward(Exception):
    def __init__(self, code: int, lock: Any) -> None:
        super().__init__(code, lock)
        self.code = code
        self.lock = lock

    def __str__(self) -> str:
        return f"code {self.code}"


def awkward(x: int) -> int:
    if x >= 999:
        raise Awkward(x, threading.Lock())
    return x


@pytest.mark.parametrize("runner", ["threads", "process"])
def test_b072_an_unpicklable_error_in_the_last_batch_keeps_its_type_and_message(runner: str) -> None:
    got: list[int] = []
    with Pipeline([awkward], num_workers=2, runner=runner) as pipeline, pytest.raises(Awkward) as caught:
        got.extend(pipeline.map(range(1000)))
    assert got == list(range(999))
    assert caught.value.code == 999 and "awkward" in "\n".join(caught.value.__notes__)


# -- B075: what a killed run leaves behind ---------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import numpy as np
from headrace.steps import Pipeline

with Pipeline([np.negative], num_workers=2) as pipeline:
    for k, array in enumerate(pipeline.map(np.full(100_000, k) for k in range(10**6))):
        assert (array == -k).all()
        if k == 20:
            print("here", flush=True)
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            break
"""


def test_b075_a_run_starts_after_a_killed_one_and_beside_another(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)

    def start(how: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, str(script), how], stdout=subprocess.PIPE, text=True)

    killed = start("kill")
    assert killed.communicate(timeout=HANG)[0] == "here\n" and killed.returncode == -9
    both = [start("end"), start("end")]
    assert [one.communicate(timeout=HANG)[0] for one in both] == ["here\n"] * 2
    assert [one.returncode for one in both] == [0, 0]


def test_b075_sixteen_workers() -> None:
    with Pipeline([tag], num_workers=16) as pipeline:
        outputs = list(pipeline.map(range(400)))
    assert [x for x, _ in outputs] == list(range(400))


# -- B079: every worker gives everything; random numbers equal in all workers ------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 5, 8])
@pytest.mark.parametrize("items", [0, 3, 10])
def test_b079_each_row_once_with_more_workers_than_rows_too(workers: int, items: int) -> None:
    with Pipeline([keep], num_workers=workers, runner="threads") as pipeline:
        assert list(pipeline.map(range(items))) == list(range(items))


def test_b079_more_processes_than_rows() -> None:
    with Pipeline([keep], num_workers=5) as pipeline:
        assert list(pipeline.map(range(3))) == [0, 1, 2]
        assert list(pipeline.map([])) == []


def noise(_: int) -> tuple[float, float]:
    return random.random(), float(np.random.random())


def test_b079_random_numbers_differ_between_rows_and_not_between_runs() -> None:
    def run(workers: int) -> list[tuple[float, float]]:
        with Pipeline([noise], num_workers=workers, seed=5) as pipeline:
            return list(pipeline.map(range(100)))

    one = run(1)
    assert one == run(3)
    assert len({number for pair in one for number in pair}) == 200


def slow_noise(_: int) -> tuple[int, float, float]:
    time.sleep(0.003)
    return os.getpid(), *noise(0)


def test_b079_without_a_seed_no_two_workers_draw_the_same_numbers() -> None:
    """Workers are forks of one server, and a fork takes a random state along."""
    with Pipeline([slow_noise], num_workers=3) as pipeline:
        drawn = list(pipeline.map(range(90)))
    workers, *numbers = zip(*drawn, strict=True)
    assert len(set(workers)) > 1 and [len(set(column)) for column in numbers] == [90, 90]


# -- trials on which other libraries hang, lose items or run away -------------------------------------------------------


def test_a_consumer_that_raises_while_workers_run() -> None:
    with pytest.raises(ZeroDivisionError), Pipeline([keep], num_workers=2) as pipeline:
        for x in pipeline.map(count()):
            1 / (3 - x)


def test_an_iterator_dropped_after_one_item() -> None:
    outputs = Pipeline([keep], num_workers=2).map(count())
    assert next(outputs) == 0
    del outputs


def sleepy(x: int) -> int:
    time.sleep(0.02 if x >= 2000 else 0)
    return x


def test_slow_items_after_many_fast_ones_are_spread_over_all_workers() -> None:
    with Pipeline([tag], num_workers=2) as pipeline:
        outputs = list(pipeline.map(range(2060)))
    assert [x for x, _ in outputs] == list(range(2060))
    share = Counter(pid for x, pid in outputs if x >= 2000)
    assert len(share) == 2 and min(share.values()) >= 15  # a batch without hand-back would leave them all to one


def tag(x: int) -> tuple[int, int]:
    return sleepy(x), os.getpid()


def test_one_slow_item_does_not_hold_back_the_others_when_unordered(tmp_path: Path) -> None:
    with Pipeline([WaitsForOthers(str(tmp_path / "go"))], num_workers=2, ordered=False) as pipeline:
        outputs = list(pipeline.map(range(400)))
    assert sorted(outputs) == list(range(400))
    assert outputs.index(0) > 60  # the batch that item 300 is in may leave after it


class WaitsForOthers:
    """Item 0 takes until item 300 is done, which is for ever if item 0 holds it back."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, x: int) -> int:
        until = time.monotonic() + HANG
        while x == 0 and not os.path.exists(self.path):
            assert time.monotonic() < until, "item 300 never came"
            time.sleep(0.001)
        if x == 300:
            Path(self.path).touch()
        return x


def test_outputs_are_bounded_while_nobody_takes_them() -> None:
    with Pipeline([blob], num_workers=2) as pipeline:
        outputs = pipeline.map(count())
        next(outputs)
        time.sleep(0.5)
        assert pipeline.statistics().received < 200


def blob(_: int) -> bytes:
    return bytes(200_000)


def test_large_inputs_with_small_outputs_travel_in_small_batches() -> None:
    with Pipeline([len], num_workers=1) as pipeline:
        assert list(pipeline.map(bytes(50_000) for _ in range(200))) == [50_000] * 200
        assert pipeline.statistics().batch_size == (1,)


def in_place(array: Any) -> Any:
    array += 1
    return array


@pytest.mark.parametrize("size", [10, 300_000])
def test_a_step_may_write_into_the_array_it_gets(size: int) -> None:
    with Pipeline([in_place], num_workers=1) as pipeline:
        (out,) = pipeline.map([np.zeros(size)])
    assert (out == 1).all()
    out += 1  # and so may the consumer


def many_results(_: int) -> Iterator[Any]:
    for k in range(300):
        yield np.full(1000, k)


def test_two_thousand_results_kept_alive_need_no_descriptors() -> None:
    with Pipeline([many_results], num_workers=1) as pipeline:
        before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        kept = list(pipeline.map(range(7)))
        after = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    assert len(kept) == 2100 and after <= before + 20


def test_large_items_both_ways_with_one_worker_and_a_small_window() -> None:
    with Pipeline([keep], num_workers=1, slab_bytes=0) as pipeline:
        sizes = [len(out) for out in pipeline.map(bytes(5_000_000) for _ in range(6))]
    assert sizes == [5_000_000] * 6


@pytest.mark.parametrize("runner", ["inline", "threads", "process"])
def test_a_slow_source_does_not_hold_back_what_is_finished(runner: str) -> None:
    delivered: list[int] = []

    def source() -> Iterator[int]:
        until = time.monotonic() + HANG
        for x in count():
            if delivered:
                return
            assert time.monotonic() < until, "nothing came while the source went on"
            time.sleep(0.01)
            yield x

    with Pipeline([keep], num_workers=2, runner=runner) as pipeline:
        for x in pipeline.map(source()):
            delivered.append(x)  # noqa: PERF402 (the source looks at it meanwhile)
    assert delivered == list(range(len(delivered)))


@pytest.mark.parametrize("runner", ["inline", "threads", "process"])
def test_a_slow_later_stage_bounds_what_the_first_one_takes(runner: str, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    pulled: list[int] = []

    def source() -> Iterator[bytes]:
        for k in range(10_000):
            pulled.append(k)
            yield bytes(20_000)

    def later(block: bytes) -> int:
        while runner != "inline" and not gate.exists():
            time.sleep(0.01)
        return len(block)

    with Pipeline([keep, later], mode="staged", num_workers=[2, 1], runner=runner) as pipeline:
        outputs = pipeline.map(source())
        threading.Timer(1.0, gate.touch).start()
        assert next(outputs) == 20_000
        assert len(pulled) < (1000 if runner != "threads" else 3000)
        assert list(outputs) == [20_000] * 9999


@pytest.mark.parametrize("runner", ["inline", "threads", "process"])
@pytest.mark.parametrize("items", [4, 10])
@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_an_error_is_raised_however_few_items_there_are(runner: str, items: int, mode: str) -> None:
    got: list[int] = []
    with Pipeline(
        [keep, last_fails], runner=runner, mode=mode, num_workers=1 if mode == "fused" else [1, 1]
    ) as pipeline:
        with pytest.raises(LookupError, match="the last"):
            got.extend(pipeline.map([*range(items - 1), "last"]))
        assert got == list(range(items - 1))
        assert list(pipeline.map(range(3))) == [0, 1, 2]


def last_fails(x: Any) -> Any:
    if x == "last":
        raise LookupError("the last")
    return x


def test_a_death_names_its_item_and_what_else_the_worker_held() -> None:
    told = r"SIGKILL.*working on item 3 \('#3'\), after 1 attempts"
    with (
        Pipeline([dies_at_3], num_workers=1, max_retries=0) as pipeline,
        pytest.raises(WorkerDied, match=told) as caught,
    ):
        list(pipeline.map(f"#{k}" for k in range(30)))
    assert re.search(r"it also held '#\d+'", str(caught.value))


def dies_at_3(x: str) -> str:
    if x == "#3":
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_a_worker_deaf_to_sigterm_is_killed_when_the_pipeline_closes() -> None:
    pipeline = Pipeline([deaf], num_workers=1, ordered=False).start()
    outputs = pipeline.map(["pid", "sleep"])
    pid = next(outputs)
    pipeline.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def deaf(what: str) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if what == "sleep":
        time.sleep(10 * HANG)
    return os.getpid()


@pytest.mark.parametrize("emitters", [1, 3, 8])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_item_of_every_emitter_comes_through_although_workers_are_killed(
    emitters: int, workers: int, tmp_path: Path
) -> None:
    readers = [range(1000 * k, 1000 * k + 300) for k in range(emitters)]
    with Pipeline([Fragile(tmp_path)], num_workers=workers, ordered=False) as pipeline:
        emit(readers, pipeline)
        outputs = Counter(pipeline)
    assert outputs == Counter({(x, n): 1 for reader in readers for x in reader for n in range(x % 3)})
    assert pipeline.statistics().workers.deaths == 2


class Fragile:
    """None, one or two outputs an item; the first time that it meets item 50, and item 250, its worker is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, x: int) -> Iterator[tuple[int, int]]:
        for n in range(x % 3):
            yield x, n
        if x in (50, 250) and not (self.folder / str(x)).exists():
            (self.folder / str(x)).touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_million_items() -> None:
    with Pipeline([keep], num_workers=3) as pipeline:
        assert all(x == k for k, x in enumerate(pipeline.map(range(1_000_000))))
        assert pipeline.statistics().finished == 1_000_000

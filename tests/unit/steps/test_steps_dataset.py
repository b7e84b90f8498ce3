"""A step pipeline as a source of a data pipeline."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import headrace
from headrace.errors import CheckpointMismatch, ConfigError, OperatorError, RecordError, WorkerDied
from headrace.io import Dataset, DatasetInspector, InMemoryShard
from headrace.steps import DROP, Pipeline
from headrace.work import MixtureSpec, StaticMixtureWorkSource

RUNNERS = ["inline", "threads", "process"]
every_runner = pytest.mark.parametrize("runner", RUNNERS)
ROWS = 90


def parse(line: str) -> dict[str, Any]:
    name, number = line.split("=")
    return {"name": name, "number": int(number)}


def spell(row: dict[str, Any]) -> dict[str, Any]:
    row["input_ids"] = np.arange(row["number"] % 7 + 1, dtype=np.int32) + row["number"]
    return row


LINES = [f"row{k}={k}" for k in range(ROWS)]


def made(**options: Any) -> Dataset:
    return Pipeline([parse, spell], **{"num_workers": 2, **options}).dataset("made", LINES)


def plain() -> Dataset:
    return Dataset.from_dict("made", {0: InMemoryShard([spell(parse(line)) for line in LINES])})


def source(*datasets: Dataset, seed: int = 3) -> StaticMixtureWorkSource:
    weights = {data.name: 1.0 for data in datasets}
    return StaticMixtureWorkSource(
        datasets=list(datasets), mixture=MixtureSpec(weights), seed=seed, chunk_size=16, shuffle_within_shard=True
    )


def data_pipeline(*datasets: Dataset, **options: Any) -> headrace.Pipeline:
    chain = (
        headrace.Pipeline(source(*datasets))
        .shuffle(20)
        .pack_flat(16, algorithm="best_fit", num_bins=4, pad_token_id=0)
        .batch(2)
    )
    return chain.options(canonical_replicas=2, micro_batch=13, **options)


def batches(pipeline: Any) -> list[tuple[Any, ...]]:
    return [told(batch) for batch in pipeline]


def told(batch: Any) -> tuple[Any, ...]:
    ids = [record.meta.sample_id for record in batch.records]
    return ids, [np.asarray(row).tolist() for row in batch.column("input_ids")]


@every_runner
def test_the_data_pipeline_is_the_one_over_the_outputs(runner: str) -> None:
    assert batches(data_pipeline(made(runner=runner))) == batches(data_pipeline(plain()))


@every_runner
@pytest.mark.parametrize("taken", [0, 3, 7])
def test_a_restored_run_goes_on_where_it_was(runner: str, taken: int) -> None:
    whole = batches(data_pipeline(plain()))
    first = data_pipeline(made(runner=runner))
    iterator = iter(first)
    before = [told(next(iterator)) for _ in range(taken)]
    state = first.checkpoint()
    iterator.close()
    second = data_pipeline(made(runner="threads", num_workers=3))
    second.restore(state)
    assert before + batches(second) == whole


def test_ranks_and_an_engine_of_its_own_have_the_same_batches() -> None:
    whole = batches(data_pipeline(plain()))
    for options in ({"mtp_mode": True}, {"runner": "inline"}):
        assert batches(data_pipeline(made(), **options)) == whole
    ranks = [batches(data_pipeline(made(), dp_group_id=rank, dp_degree=2, uneven="keep")) for rank in range(2)]
    shares = [batches(data_pipeline(plain(), dp_group_id=rank, dp_degree=2, uneven="keep")) for rank in range(2)]
    assert ranks == shares


def test_in_a_mixture() -> None:
    other = Dataset.from_dict("other", {0: InMemoryShard([{"input_ids": [k]} for k in range(40)])})
    assert batches(data_pipeline(made(), other)) == batches(data_pipeline(plain(), other))


def test_changed_steps_or_seed_do_not_restore() -> None:
    state = data_pipeline(made()).checkpoint()
    data_pipeline(made(num_workers=1, max_retries=0, timeout=9.0)).restore(state)
    for other in (made(seed=4), Pipeline([parse, spell, spell], num_workers=1).dataset("made", LINES)):
        with pytest.raises(CheckpointMismatch, match=r"steps\(parse > spell"):
            batches(restored(other, state))


def restored(data: Dataset, state: Any) -> headrace.Pipeline:
    pipeline = data_pipeline(data)
    pipeline.restore(state)
    return pipeline


# -- rows without a record, with several, and with an error ----------------------------------------------------------


def thirds(x: int) -> Any:
    if x % 3 == 1:
        return DROP
    return {"x": x}


@every_runner
def test_rows_without_output_are_left_out_and_counted(runner: str) -> None:
    data = Pipeline([thirds], runner=runner, num_workers=2).dataset("thirds", range(30))
    pipeline = headrace.Pipeline(source(data)).batch(4, drop_last=False)
    got = [record.payload["x"] for batch in pipeline for record in batch.records]
    assert sorted(got) == [x for x in range(30) if x % 3 != 1]
    assert dropped(pipeline) == {"fetch: left out by the dataset": 10}


def dropped(pipeline: headrace.Pipeline) -> dict[str, int]:
    snapshot = pipeline.metrics_snapshot()
    assert snapshot is not None
    (data,) = snapshot.datasets
    return data.dropped


def twice(x: int) -> Iterator[dict[str, int]]:
    yield {"x": x}
    if x == 7:
        yield {"x": x}


def fails(x: int) -> dict[str, int]:
    if x % 10 == 5:
        raise LookupError(f"no {x}")
    return {"x": x}


def number(x: int) -> int:
    return x


@every_runner
@pytest.mark.parametrize(
    ("step", "match"),
    [
        (twice, r"row 7: the steps twice gave 2 outputs.*Dataset\.from_path"),
        (fails, "no 5"),
        (number, r"gave a int, not a mapping.*field="),
    ],
)
def test_a_row_that_cannot_be_is_an_error_with_its_place(runner: str, step: Any, match: str) -> None:
    data = Pipeline([step], runner=runner, num_workers=2).dataset("bad", range(20))
    order = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"bad": 1.0}))
    with pytest.raises((RecordError, OperatorError), match=match) as caught:
        list(headrace.Pipeline(order).batch(1))
    assert "bad" in str(caught.value)


@every_runner
def test_rows_that_fail_can_be_skipped(runner: str) -> None:
    data = Pipeline([fails], runner=runner, num_workers=2).dataset("bad", range(20))
    pipeline = headrace.Pipeline(source(data)).batch(1).options(on_error="skip")
    got = [record.payload["x"] for batch in pipeline for record in batch.records]
    assert sorted(got) == [x for x in range(20) if x % 10 != 5]
    assert dropped(pipeline) == {"fetch: skip: LookupError": 2}


def deadly(x: int) -> dict[str, int]:
    if x == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"x": x}


def test_a_row_that_kills_its_worker() -> None:
    data = Pipeline([deadly], num_workers=2, max_retries=1).dataset("deadly", range(20))
    with DatasetInspector(data) as look, pytest.raises(WorkerDied, match=r"row 5: 5.*after 2 attempts"):
        look.read_many(0, range(20))
    pipeline = headrace.Pipeline(source(data)).batch(1).options(on_error="skip")
    assert len(list(pipeline)) == 19


def test_a_value_under_a_name() -> None:
    data = Pipeline([number], runner="inline").dataset("named", range(5), field="x")
    with DatasetInspector(data) as look:
        assert look.head(3) == [{"x": 0}, {"x": 1}, {"x": 2}]
        with pytest.raises(ConfigError, match="5 rows"):
            look.read(0, 5)
    with DatasetInspector(Pipeline([thirds], runner="inline").dataset("thirds", range(5))) as look:
        assert look.read(0, 2) == {"x": 2}
        with pytest.raises(RecordError, match="row 1: the steps thirds gave no output"):
            look.read(0, 1)


# -- what a row depends on ---------------------------------------------------------------------------------------------


def add_here(row: dict[str, int]) -> dict[str, int]:
    row["x"] += 1
    return row


@every_runner
def test_a_step_that_writes_into_its_item_changes_no_item(runner: str) -> None:
    items = [{"x": k} for k in range(5)]
    with DatasetInspector(Pipeline([add_here], runner=runner, num_workers=1).dataset("d", items)) as look:
        assert [look.read(0, 3), look.read(0, 3), items[3]] == [{"x": 4}, {"x": 4}, {"x": 3}]


def draw(x: int) -> dict[str, float]:
    return {"x": x, "a": random.random(), "b": float(np.random.random())}


@every_runner
def test_a_seeded_row_is_a_function_of_its_number(runner: str) -> None:
    with DatasetInspector(Pipeline([draw], runner=runner, num_workers=2, seed=5).dataset("d", range(50))) as look:
        rows = look.read_many(0, range(50))
        assert look.read_many(0, [40, 3, 3]) == [rows[40], rows[3], rows[3]]
    assert rows == list(Pipeline([draw], runner="inline", seed=5).map(range(50)))
    assert len({row["a"] for row in rows}) == 50


# -- threads, and the end ----------------------------------------------------------------------------------------------


def where(x: int) -> dict[str, int]:
    time.sleep(0.001)
    return {"x": x, "pid": os.getpid()}


@every_runner
def test_many_threads_read_at_once(runner: str) -> None:
    reader = Pipeline([where], runner=runner, num_workers=2).dataset("d", range(1000)).open()
    found: list[list[int]] = []

    def read(k: int) -> None:
        rows = np.arange(100 * k, 100 * k + 100)[:: -1 if k % 2 else 1]
        found.append([rows.tolist(), reader.read(0, rows, frozenset({"x"}))["x"]])

    threads = [threading.Thread(target=read, args=(k,)) for k in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader.close()
    assert len(found) == 10 and all(asked == got for asked, got in found)


def test_leaving_early_ends_the_workers() -> None:
    data = Pipeline([where], num_workers=2).dataset("d", range(100_000))
    pipeline = headrace.Pipeline(source(data)).batch(4)
    iterator = iter(pipeline)
    pids = set(next(iterator).column("pid"))
    for _ in range(40):
        pids |= set(next(iterator).column("pid"))
    iterator.close()
    deadline = time.monotonic() + 60
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "a worker was left"
        time.sleep(0.02)


def words(x: int) -> dict[str, str]:
    return {"text": "one two three " * (x % 3 + 1), "pid": str(os.getpid())}


def test_explaining_leaves_no_worker(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"one": 0, "two": 1, "three": 2, "[UNK]": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    data = Pipeline([words], num_workers=2).dataset("d", range(40))
    before = children()
    pipeline = (
        headrace.Pipeline(source(data))
        .tokenize(str(tmp_path / "tokenizer.json"), field="text", special_tokens="none")
        .batch(2)
    )
    assert "tokenize" in pipeline.explain()
    assert children() == before
    assert sum(len(ids) for batch in pipeline for ids in batch.column("input_ids")) == 3 * sum(
        x % 3 + 1 for x in range(40)
    )
    assert children() == before


def children() -> set[int]:
    """Worker processes of this one."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text().rpartition(") ")[2].split()
                if int(stat[1]) == os.getpid() and stat[0] != "Z":
                    found.add(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Stuck:
    """Says that it has begun, and does not end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, x: int) -> dict[str, int]:
        (self.folder / str(x)).touch()
        time.sleep(600.0)
        return {"x": x}


def test_closing_a_reader_lets_go_of_who_reads(tmp_path: Path) -> None:
    reader = Pipeline([Stuck(tmp_path)], num_workers=3).dataset("d", range(3)).open()
    told: Counter[str] = Counter()

    def read(row: int) -> None:
        try:
            reader.read(0, np.array([row]), None)
        except Exception as error:  # noqa: BLE001 (which one is what the test is about)
            told[type(error).__name__] += 1

    threads = [threading.Thread(target=read, args=(row,)) for row in range(3)]
    for thread in threads:
        thread.start()
    while len(list(tmp_path.iterdir())) < 3:
        time.sleep(0.01)
    reader.close()
    for thread in threads:
        thread.join(60)
    assert told == {"Cancelled": 3}


# -- what cannot work says so ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "items",
    [iter(range(3)), (x for x in range(3)), "abc", {1: 2}, {1, 2}],
    ids=["iterator", "generator", "text", "mapping", "set"],
)
def test_items_must_be_a_sequence(items: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be a sequence.*Dataset\.from_path"):
        Pipeline([number]).dataset("d", items)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "staged"},
        {"assign": number},
        {"shuffle_buffer": 4, "seed": 1},
        {"on_error": "skip"},
        {"progress": True},
        {"ordered": False},
        {"max_pending": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_settings_that_mean_nothing_here_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*cannot be used here"):
        Pipeline([number], **options).dataset("d", range(3))


def test_a_setup_that_fails_is_raised(tmp_path: Path) -> None:
    class Model:
        def setup(self) -> None:
            raise OSError(f"no model in {tmp_path}")

        def __call__(self, x: int) -> dict[str, int]:
            return {"x": x}

    data = Pipeline([Model()], num_workers=1).dataset("d", range(3))
    with pytest.raises((OSError, OperatorError), match="no model in"):
        list(headrace.Pipeline(source(data)).batch(1))

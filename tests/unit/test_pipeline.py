"""What a user of `Pipeline` sees: building, refusing, iterating, saving, and the words of its errors."""

from __future__ import annotations

import gc
import json
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, SampleBatch, SampleRecord, StaticMixtureWorkSource
from headrace.core.block import Ragged
from headrace.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    OperatorError,
    RecordError,
    UnknownOptionError,
)

RUNNERS = ("inline", "threads", "process")


def source(rows: int = 100, name: str = "toy", **settings: Any) -> StaticMixtureWorkSource:
    shards = {i: InMemoryShard([{"x": 10 * i + k} for k in range(10)]) for i in range(rows // 10)}
    settings = {"shuffle_shards": False, **settings}
    return StaticMixtureWorkSource(
        datasets=[Dataset.from_dict(name, shards)], mixture=MixtureSpec({name: 1.0}), **settings
    )


def values(items: Any) -> list[int]:
    return [record.payload["x"] for batch in items for record in batch.records]


def double(payload: dict[str, Any]) -> dict[str, Any]:
    return {"x": payload["x"] * 2}


def fails_on_37(payload: dict[str, Any]) -> dict[str, Any]:
    if payload["x"] == 37:
        raise KeyError("thirty-seven")
    return payload


# -- delivering ------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", RUNNERS)
def test_batches_in_order_on_every_runner(runner: str) -> None:
    pipeline = Pipeline(source()).map_transform(double, parallelism=2).batch(8).options(runner=runner)
    batches = list(pipeline)
    assert all(isinstance(batch, SampleBatch) and len(batch) == 8 for batch in batches)
    assert values(batches) == [2 * i for i in range(96)]


@pytest.mark.parametrize("runner", RUNNERS)
def test_placement_process_runs_in_processes(runner: str) -> None:
    import os

    def pid(payload: dict[str, Any]) -> dict[str, Any]:
        return {"x": os.getpid()}

    pipeline = Pipeline(source()).map_transform(pid, placement=runner).batch(10).options(auto_validation="off")
    pids = set(values(pipeline))
    assert (os.getpid() in pids) == (runner != "process")
    assert f"runner={runner}" in pipeline.explain()


def test_without_batch_records_come_one_by_one() -> None:
    records = list(Pipeline(source(20)).options(runner="inline"))
    assert all(isinstance(record, SampleRecord) for record in records)
    assert [record.payload["x"] for record in records] == list(range(20))
    assert records[13].meta.sample_id == (0, 1, 3)


def test_iterating_again_starts_over_and_two_at_once_are_refused() -> None:
    pipeline = Pipeline(source(20)).batch(10)
    assert values(pipeline) == values(pipeline)
    iterator = iter(pipeline)
    with pytest.raises(RuntimeError, match="being iterated already"):
        iter(pipeline)
    iterator.close()
    assert values(pipeline) == list(range(20))


def test_map_batch_gives_the_loop_what_it_returns_and_none_drops() -> None:
    pipeline = Pipeline(source()).batch(10).map_batch(lambda b: None if b.ids[0][2] or b.ids[0][1] % 2 else len(b))
    assert list(pipeline) == [10] * 5
    got = list(islice(iter(Pipeline(source()).batch(10).map_batch(lambda b: values([b])).map_batch(sum)), 2))
    assert got == [45, 145]


def test_a_step_boundary_is_only_a_boundary() -> None:
    assert values(Pipeline(source(20)).materialize().select("x").batch(10)) == list(range(20))


# -- refusing --------------------------------------------------------------------------------------


def test_a_pipeline_is_not_changed_under_its_iterator() -> None:
    pipeline = Pipeline(source()).batch(4)
    iterator = iter(pipeline)
    next(iterator)
    with pytest.raises(RuntimeError, match="close its iterator before changing it"):
        pipeline.options(prefetch_batches=3)
    assert len(list(iterator)) == 24


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: p.map_transform(double, on_error="ignore"), "on_error='ignore'"),
        (lambda p: p.map_transform(double, placement="gpu"), "placement='gpu'"),
        (lambda p: p.map_transform(double, on_error="quarantine").explain(), "quarantine_path"),
        (lambda p: p.tokenize(feild="x"), "did you mean 'field'"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Pipeline(source()))


def test_validation_can_be_switched_off_after_the_function_was_added() -> None:
    from itertools import count

    numbers = count()
    pipeline = Pipeline(source(10)).map_transform(lambda p: {"x": next(numbers)}).batch(10)
    with pytest.raises(OperatorError, match="gave two results"):
        list(pipeline)
    assert len(list(pipeline.options(auto_validation="off"))) == 1


def test_what_fetch_refuses_is_quarantined_too(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"x": 1}\n{"x": \n{"x": 3}\n')
    data = Dataset.from_path("toy", str(tmp_path / "data"))
    work = StaticMixtureWorkSource(datasets=[data], mixture={"toy": 1.0})
    path = tmp_path / "bad.jsonl"
    pipeline = Pipeline(work).batch(2).options(on_error="quarantine", quarantine_path=str(path))
    assert values(pipeline) == [1, 3]
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert line["operator"] == "fetch" and line["row"] == 1 and line["payload"] is None


def test_lanes_that_several_groups_compute_need_an_order() -> None:
    pipeline = (
        Pipeline(source()).batch(4).options(dp_degree=3, dp_group_id=0, canonical_replicas=2, deterministic=False)
    )
    with pytest.raises(ConfigError, match="3 groups over 2 lanes"):
        iter(pipeline)


def test_misspelt_names_are_refused_at_once() -> None:
    with pytest.raises(UnknownOptionError, match="did you mean 'prefetch_batches'"):
        Pipeline(source()).options(prefetch_batch=3)
    with pytest.raises(TypeError, match="buffersize"):
        Pipeline(source()).shuffle(buffersize=3)
    with pytest.raises(TypeError, match="algoritm"):
        Pipeline(source()).pack_flat(8, algoritm="wrap")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: p.map_batch(len), "call batch\\(\\) before it"),
        (lambda p: p.batch(2).filter(bool), "only map_batch"),
        (lambda p: p.map_transform(double, parallelism=0), "map_transform: parallelism .* must be at least 1, found 0"),
        (lambda p: p.fetch(max_batch=0), "fetch: max_batch .* at least 1, found 0"),
        (lambda p: p.batch(0), "microbatch_size"),
        (lambda p: p.pack_flat(8, algorithm="wrap").pack_flat(8, algorithm="wrap"), "after another packing operator"),
    ],
)
def test_chains_that_cannot_work_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Pipeline(source())).explain()


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_failing_function_names_operator_sample_and_cause(runner: str) -> None:
    pipeline = Pipeline(source()).map_transform(fails_on_37).batch(10).options(runner=runner)
    got: list[int] = []
    with pytest.raises(
        OperatorError, match=r"'map_transform' failed on dataset 'toy', shard '3', row 7: KeyError: .thirty-seven"
    ):
        for batch in pipeline:
            got += values([batch])
    assert got == list(range(30))


@pytest.mark.parametrize("runner", RUNNERS)
def test_skipped_records_are_counted_and_the_same_everywhere(runner: str) -> None:
    pipeline = Pipeline(source()).map_transform(fails_on_37).batch(9).options(runner=runner, on_error="skip")
    assert values(pipeline) == [x for x in range(100) if x != 37]
    summary = pipeline.metrics_snapshot()
    assert summary is not None and summary.refused == 1
    assert summary.datasets[0].dropped == {"map_transform: skip: KeyError": 1}
    assert summary.datasets[0].handed_out == 100 and summary.datasets[0].delivered == 99


def test_an_operator_may_have_its_own_policy() -> None:
    pipeline = Pipeline(source()).map_transform(fails_on_37, on_error="skip").batch(9)
    assert len(values(pipeline)) == 99


def test_quarantine_keeps_what_was_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    pipeline = Pipeline(source()).map_transform(fails_on_37).batch(9)
    assert len(values(pipeline.options(on_error="quarantine", quarantine_path=str(path)))) == 99
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert line["payload"] == {"x": 37} and line["operator"] == "map_transform"
    assert line["where"] == "dataset 'toy', shard '3', row 7" and "thirty-seven" in line["reason"]


def test_more_errors_than_allowed_end_the_run() -> None:
    def odd_fails(payload: dict[str, Any]) -> dict[str, Any]:
        if payload["x"] % 2:
            raise ValueError("odd")
        return payload

    pipeline = Pipeline(source()).map_transform(odd_fails).batch(5).options(on_error="skip", max_errors=3)
    with pytest.raises(RecordError, match="4 records were refused, more than max_errors=3"):
        list(pipeline)


# -- saving ----------------------------------------------------------------------------------------


def test_restoring_another_recipe_lists_every_difference() -> None:
    state = Pipeline(source(seed=1)).shuffle(8).batch(4).checkpoint()
    with pytest.raises(CheckpointMismatch) as caught:
        Pipeline(source(seed=2)).shuffle(9).batch(4).restore(state)
    text = str(caught.value)
    assert "seed: 1 -> 2" in text and "buffer_size: 8 -> 9" in text and len(caught.value.differences) == 2


def test_a_difference_can_be_taken_on_purpose() -> None:
    first = Pipeline(source()).batch(4)
    iterator = iter(first)
    taken = values(islice(iterator, 3))
    state = first.checkpoint()
    iterator.close()
    second = Pipeline(source()).batch(6)
    with pytest.raises(CheckpointMismatch, match="microbatch_size: 4 -> 6"):
        second.restore(state)
    second.restore(state, accept={"batch"})
    assert len(taken) == 12


def test_restoring_while_iterating_is_refused() -> None:
    pipeline = Pipeline(source()).batch(4)
    state = pipeline.checkpoint()
    iterator = iter(pipeline)
    next(iterator)
    with pytest.raises(CheckpointError, match="being iterated"):
        pipeline.restore(state)
    iterator.close()
    pipeline.restore(state)
    assert values(pipeline)[0] == 0


def test_after_the_end_a_restored_run_is_at_its_end_and_the_next_begins_anew() -> None:
    pipeline = Pipeline(source(20)).batch(10)
    assert len(list(pipeline)) == 2
    state = pipeline.checkpoint()
    other = Pipeline(source(20)).batch(10)
    other.restore(state)
    assert list(other) == []
    assert len(list(other)) == 2


def test_checkpoints_are_plain_and_small() -> None:
    pipeline = Pipeline(source(seed=3)).shuffle(50).batch(4)
    iterator = iter(pipeline)
    list(islice(iterator, 5))
    state, data = pipeline.checkpoint(), pipeline.checkpoint(as_bytes=True)
    iterator.close()
    assert json.loads(json.dumps(state, default=lambda b: b.hex()))["position"] == 5
    assert len(data) < 4096
    other = Pipeline(source(seed=3)).shuffle(50).batch(4)
    other.restore(data)
    assert other.checkpoint() == state


# -- looking ---------------------------------------------------------------------------------------


def test_explain_shows_workers_queues_and_what_is_decoded() -> None:
    text = Pipeline(source()).map_transform(double, parallelism=4).shuffle(10).batch(32).explain()
    assert "map_transform@p4" in text and "[in_q=" in text and "final_prefetch=" in text
    assert "runner=threads" in text and "runner=inline workers=driver ops=['batch@p1']" in text
    assert "fetch: decodes all fields" in text and "flush sentinel every 8 chunks" in text
    assert "fetch: decodes x" in Pipeline(source()).select("x").batch(2).explain()


def test_projection_reads_only_what_is_used() -> None:
    rows = [{"x": np.arange(3), "y": "unused"}]
    data = Dataset.from_dict("toy", {0: InMemoryShard(rows)})
    work = StaticMixtureWorkSource(datasets=[data], mixture={"toy": 1.0})
    pipeline = Pipeline(work).map_block(lambda c: {"n": [sorted(c)] * len(c["x"])}, reads=["x"]).batch(1)
    assert next(iter(pipeline)).records[0].payload["n"] == ["x"]
    assert pipeline.plan().fields == {"x"}


def test_chunks_in_flight_are_counted() -> None:
    pipeline = Pipeline(source(100, chunk_size=10)).batch(5).options(prefetch_batches=2, micro_batch=5, cut_every=10)
    iterator = iter(pipeline)
    next(iterator)
    time.sleep(0.1)
    assert 1 <= pipeline.inflight_summary()[0] <= 10
    assert len(list(iterator)) == 19
    assert pipeline.inflight_summary() == {}


def test_metrics_say_what_each_operator_did() -> None:
    pipeline = Pipeline(source()).filter(lambda p: p["x"] % 2 == 0).batch(10)
    assert pipeline.metrics_snapshot() is None
    list(pipeline)
    summary = pipeline.metrics_snapshot()
    assert summary is not None
    assert [(op.name, op.rows_in, op.rows_out) for op in summary.operators] == [
        ("fetch", 100, 100),
        ("filter", 100, 50),
        ("batch", 50, 50),
    ]
    assert summary.batches == 5 and summary.rows == 50 and "busiest operator" in summary.bottleneck()


def test_tokens_are_counted_without_padding() -> None:
    def tokens(columns: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": Ragged.from_rows([np.arange(3, dtype=np.int32) for _ in columns["x"]])}

    pipeline = (
        Pipeline(source(10)).map_block(tokens).pack_flat(8, algorithm="first_fit", num_bins=2, pad_token_id=0).batch(1)
    )
    list(pipeline)
    summary = pipeline.metrics_snapshot()
    assert summary is not None and summary.tokens == 30


def left_over(before: list[threading.Thread]) -> list[str]:
    """New threads that are still there after some time."""
    gc.collect()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        names = [thread.name for thread in threading.enumerate() if thread not in before]
        if not names:
            break
        time.sleep(0.01)
    return names


def test_nothing_is_left_when_the_loop_is_left() -> None:
    before = threading.enumerate()
    for batch in Pipeline(source()).map_transform(double).batch(2):
        assert len(batch) == 2
        break
    assert left_over(before) == []


def test_an_error_in_the_loop_leaves_nothing_either() -> None:
    before = threading.enumerate()

    def train() -> None:
        for _ in Pipeline(source()).map_transform(double).batch(2):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert left_over(before) == []


def test_a_run_without_a_lane_count_of_its_own_takes_the_checkpoints() -> None:
    saved = Pipeline(source()).batch(4).options(canonical_replicas=3)
    iterator = iter(saved)
    list(islice(iterator, 4))
    state = saved.checkpoint()
    expected = values(iterator)
    other = Pipeline(source()).batch(4)
    other.restore(state)
    iterator = iter(other)
    first = values(islice(iterator, 2))
    again = other.checkpoint()
    iterator.close()
    assert again["canonical_replicas"] == 3 and other.checkpoint() == again
    last = Pipeline(source()).batch(4)
    last.restore(again)
    assert first + values(last) == expected
    with pytest.raises(CheckpointMismatch, match="canonical_replicas: 3 -> 2"):
        Pipeline(source()).batch(4).options(canonical_replicas=2).restore(state)


@pytest.mark.parametrize(
    ("length", "wanted"), [(20, 1024), (8000, 524), (100_000, 256)], ids=["small", "middling", "large"]
)
def test_blocks_are_larger_where_workers_only_read_small_records(tmp_path: Path, length: int, wanted: int) -> None:
    line = json.dumps({"text": "x" * (length - 13)}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 40)
    assert len(line) == length
    work = StaticMixtureWorkSource(
        datasets=[Dataset.from_path("a", str(tmp_path))], mixture=MixtureSpec({"a": 1.0}), chunk_size=10
    )
    assert Pipeline(work).select("text").batch(4).plan().micro_batch == wanted
    assert Pipeline(work).map_transform(dict).batch(4).plan().micro_batch == 256
    assert Pipeline(work).batch(4).options(micro_batch=7).plan().micro_batch == 7
    assert Pipeline(work).batch(4).options(runner="inline").plan().micro_batch == 256
    assert len(list(Pipeline(work).select("text").batch(4))) == 10

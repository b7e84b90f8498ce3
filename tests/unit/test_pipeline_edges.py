"""What a newcomer meets first: what a pipeline says of itself, and of arguments that cannot be meant."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from headrace import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from headrace.errors import CheckpointMismatch, ConfigError, OperatorError
from headrace.work import WorkChunk, WorkSource


def source(rows: list[Any] | None = None, **settings: Any) -> StaticMixtureWorkSource:
    shard = InMemoryShard([{"x": i, "text": b"a"} for i in range(20)] if rows is None else rows)
    settings = {"shuffle_shards": False, **settings}
    return StaticMixtureWorkSource([Dataset.from_dict("toy", {0: shard})], {"toy": 1.0}, **settings)


def values(items: Any) -> list[int]:
    return [record.payload["x"] for batch in items for record in batch.records]


def doubled(payload: dict[str, Any]) -> dict[str, Any]:
    return {**payload, "x": 2 * payload["x"]}


class Own(WorkSource):
    """A source of one's own."""

    def next_chunk(self) -> WorkChunk | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...

    @property
    def datasets_by_id(self) -> dict[int, Any]:
        return {}

    def component_ids(self) -> dict[str, int]:
        return {"web": 1, "code": 0}


def test_a_pipeline_and_a_source_say_what_they_are() -> None:
    pipeline = Pipeline(source()).map_transform(doubled).batch(4)
    assert repr(pipeline) == (
        "<Pipeline over StaticMixtureWorkSource(toy 1; 20 samples): fetch -> map_transform -> batch>"
    )
    assert repr(Own()) == "Own(code, web)"


@pytest.mark.parametrize("wrong", [Dataset.from_dict("toy", {}), None, [1, 2], {"toy": 1.0}, "toy"])
def test_a_pipeline_is_made_of_a_work_source(wrong: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"takes a work source, found a .*Pipeline\(StaticMixtureWorkSource\(datasets="
    ):
        Pipeline(wrong)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: p.fetch_parallelism("3"), "fetch: parallelism .* whole number, found '3'"),
        (lambda p: p.fetch(max_batch=2.5), "fetch: max_batch .* whole number, found 2.5"),
        (lambda p: p.map_transform(doubled, parallelism=2.5), "map_transform: parallelism .* found 2.5"),
        (lambda p: p.map_transform(doubled, drop_none="no"), "map_transform: drop_none must be True or False"),
        (lambda p: p.batch(2, drop_last="no"), "batch: drop_last must be True or False"),
        (lambda p: p.batch(2).map_batch(len, drop_none=1), "map_batch: drop_none must be True or False"),
        (lambda p: p.select(["x", "text"]), r"select\(\) takes at least one field name.*found \['x', 'text'\]"),
        (lambda p: p.options(io_options=3), "StoreOptions cannot be made from 3"),
        (lambda p: p.options(io_options={"cach": {}}), "did you mean 'cache'"),
    ],
)
def test_arguments_of_another_kind_are_refused_where_they_are_given(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Pipeline(source()))


def test_a_block_function_may_name_one_field() -> None:
    pipeline = Pipeline(source()).map_block(lambda c: {"x": [len(c)] * len(c["text"])}, reads="text").batch(20)
    assert values(pipeline) == [1] * 20


# -- fields that no record has ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda p: p.select("txt"),
            "select: none of the first 20 records has 'txt'; they have text, x; did you mean 'text'",
        ),
        (lambda p: p.decode_text(fields=("txt",)), "decode_text: none of the first 20 records has 'txt'"),
        (lambda p: p.decode_text(fields="text.inner"), "decode_text: none of the first 20 records has 'text.inner'"),
        (lambda p: p.select("x").select("text"), "select: none of the first 20 records has 'text'; they have x"),
    ],
)
def test_names_of_no_field_are_refused_before_the_run(build: Any, message: str) -> None:
    pipeline = build(Pipeline(source())).batch(2)
    with pytest.raises(ConfigError, match=message):
        iter(pipeline)


def test_one_field_that_the_first_records_lack_is_a_warning() -> None:
    rare = [{"x": i} for i in range(300)] + [{"x": 300, "note": "here"}]
    with pytest.warns(UserWarning, match="select: none of the first 256 records has 'note'; they have x"):
        records = [r.payload for b in Pipeline(source(rare)).select("x", "note").batch(7) for r in b.records]
    assert records[-1] == {"x": 300, "note": "here"} and records[0] == {"x": 0}


def test_a_field_of_few_records_is_no_reason_to_speak() -> None:
    rows = [{"x": i, **({"note": "a"} if i == 200 else {})} for i in range(256)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(Pipeline(source(rows)).select("note").batch(256))) == 1
        packed = Pipeline(source([{"input_ids": [1, 2, 3]}] * 4)).pack_flat(4, algorithm="wrap")
        assert len(list(packed.select("positions").batch(3))) == 1


def test_predicates_are_checked_as_functions_are() -> None:
    seen: list[int] = []

    def odd_calls(payload: dict[str, Any]) -> bool:
        seen.append(payload["x"])
        return len(seen) % 2 == 1

    with pytest.raises(OperatorError, match=r"odd_calls.* gave two results"):
        list(Pipeline(source()).filter(odd_calls).batch(2))
    seen.clear()
    assert values(Pipeline(source()).filter(odd_calls).batch(2).options(auto_validation="off")) == list(range(0, 20, 2))


# -- pipelines that were used -----------------------------------------------------------------------


def test_a_used_pipeline_can_be_pickled_and_copied() -> None:
    pipeline = Pipeline(source()).map_transform(doubled).batch(4)
    running = iter(pipeline)
    next(running)
    for other in (pickle.loads(pickle.dumps(pipeline)), copy.deepcopy(pipeline)):
        assert values(other) == [2 * i for i in range(20)]
    assert len(list(running)) == 4
    assert values(pickle.loads(pickle.dumps(pipeline))) == [2 * i for i in range(20)]


def test_a_restored_state_travels_with_the_pipeline() -> None:
    pipeline = Pipeline(source()).batch(4)
    list(islice(iter(pipeline), 2))
    state = pipeline.checkpoint()
    other = Pipeline(source()).batch(4)
    other.restore(state)
    assert values(pickle.loads(pickle.dumps(other))) == values(other) == list(range(8, 20))


def test_a_chain_that_is_changed_after_restore_is_compared_again() -> None:
    first = Pipeline(source()).batch(4)
    next(running := iter(first))
    state = first.checkpoint()
    running.close()
    pipeline = Pipeline(source()).batch(4)
    pipeline.restore(state)
    pipeline.map_batch(len)
    with pytest.raises(CheckpointMismatch, match="map_batch"):
        iter(pipeline)
    pipeline = Pipeline(source()).batch(4)
    pipeline.restore(state)
    assert values(pipeline.options(prefetch_batches=3, micro_batch=2)) == list(range(4, 20))
    pipeline.restore(state)
    with pytest.raises(CheckpointMismatch, match="canonical_replicas: 1 -> 2"):
        iter(pipeline.options(canonical_replicas=2))


# -- refused records, once each ---------------------------------------------------------------------


def refuses_fives(payload: dict[str, Any]) -> dict[str, Any]:
    if payload["x"] % 5 == 0:
        raise ValueError("a multiple of five")
    return payload


@pytest.mark.parametrize("runner", ["inline", "threads"])
def test_a_restored_run_lists_no_refused_record_twice(tmp_path: Path, runner: str) -> None:
    bad = tmp_path / "bad.jsonl"

    def build() -> Pipeline:
        pipeline = Pipeline(source(shuffle_within_shard=True, chunk_size=10)).map_transform(refuses_fives).batch(3)
        return pipeline.options(runner=runner, on_error="quarantine", quarantine_path=bad)

    state = None
    for _ in range(20):
        pipeline = build()
        if state is not None:
            pipeline.restore(state)
        running = iter(pipeline)
        if next(running, None) is None:
            break
        state = pipeline.checkpoint()
        running.close()
    lines = [json.loads(line) for line in bad.read_text().splitlines()]
    assert sorted(line["row"] for line in lines) == [0, 5, 10, 15]
    assert lines[0]["reason"] == "ValueError: a multiple of five"


def test_what_a_killed_run_left_half_written_is_written_again(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    pipeline = Pipeline(source()).map_transform(refuses_fives).batch(4)
    pipeline.options(on_error="quarantine", quarantine_path=str(bad))
    list(pipeline)
    whole = bad.read_bytes()
    bad.write_bytes(whole[:-20])
    list(pipeline)
    assert bad.read_bytes() == whole


def test_a_record_refused_in_another_pass_is_another_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    twice = source(stop_after_passes=2)
    pipeline = Pipeline(twice).map_transform(refuses_fives).batch(4)
    list(pipeline.options(on_error="quarantine", quarantine_path=str(bad)))
    assert [json.loads(line)["row"] for line in bad.read_text().splitlines()] == [0, 5, 10, 15] * 2


def test_each_rank_has_a_quarantine_file_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quarantine_path='bad.jsonl' with world_size=2.*put \{rank\} in its name"):
        Pipeline(source()).options(on_error="quarantine", quarantine_path="bad.jsonl", world_size=2)
    pipeline = Pipeline(source()).map_transform(refuses_fives).batch(4)
    name = str(tmp_path / "bad.{rank}.jsonl")
    shape = {"world_size": 2, "global_rank": 1, "uneven": "keep"}
    list(pipeline.options(on_error="quarantine", quarantine_path=name, **shape))
    assert [path.name for path in tmp_path.iterdir()] == ["bad.1.jsonl"]


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_dropping_a_packed_row_drops_the_documents_that_begin_in_it(policy: str) -> None:
    rows = [{"input_ids": [i, i, i]} for i in range(40)]

    def choose(row: dict[str, Any]) -> bool:
        if policy == "skip" and int(row["input_ids"][0]) % 3 != 1:
            raise ValueError("not this one")
        return int(row["input_ids"][0]) % 3 == 1

    pipeline = Pipeline(source(rows)).pack_flat(4, algorithm="wrap").filter(choose).batch(1).options(on_error=policy)
    assert len(list(pipeline)) == 10
    summary = pipeline.metrics_snapshot()
    assert summary is not None
    (data,) = summary.datasets
    assert (data.delivered, sum(data.dropped.values()), data.handed_out) == (13, 27, 40)


@pytest.mark.parametrize("options", [{}, {"mtp_mode": True}])
def test_a_run_without_a_batch_says_where_the_samples_went(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert list(Pipeline(source([{"x": i} for i in range(7)])).batch(8).options(**options)) == []
    (record,) = caplog.records
    assert "7 samples were read, and dropped 7 of 'toy' (batch: last partial batch)" in record.getMessage()


def test_the_end_of_a_run_that_went_well_needs_no_word(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = Pipeline(source([{"x": i} for i in range(7)])).batch(4)
    assert len(list(pipeline)) == 1
    rest = Pipeline(source([{"x": i} for i in range(7)])).batch(4)
    rest.restore(pipeline.checkpoint())
    assert list(rest) == []
    assert not caplog.records


def test_ranks_that_are_not_told_apart_are_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    list(Pipeline(source([{"x": i} for i in range(8)])).batch(4).options(dp_degree=1))
    list(Pipeline(source([{"x": i} for i in range(8)])).batch(4).options(world_size=2, global_rank=1, uneven="keep"))
    assert not caplog.records
    list(Pipeline(source([{"x": i} for i in range(8)])).batch(4))
    (record,) = caplog.records
    assert "every rank delivers the same batches" in record.getMessage()

"""What no manual recommends: garbage for checkpoints, functions that return nonsense, absurd sizes, odd mixes of options."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.core.block import Ragged
from headrace.errors import CheckpointError, ConfigError, CurriculumError, OperatorError

RUNNERS = ("inline", "threads", "process")


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"x": first + i, "list": [i]} for i in range(count)]


def over(*datasets: Dataset, weights: dict[str, float] | None = None, **settings: Any) -> Pipeline:
    mixture = MixtureSpec(weights or {dataset.name: 1.0 for dataset in datasets})
    settings = {"shuffle_shards": False, **settings}
    return Pipeline(StaticMixtureWorkSource(datasets=list(datasets), mixture=mixture, **settings))


def memory(name: str, content: list[Any]) -> Dataset:
    return Dataset.from_dict(name, {0: InMemoryShard(content)})


def numbered(count: int, **settings: Any) -> Pipeline:
    return over(memory("toy", rows(count)), **settings)


def values(items: Any) -> list[int]:
    return [record.payload["x"] for batch in items for record in batch.records]


def payloads(items: Any) -> list[Any]:
    return [record.payload for batch in items for record in batch.records]


# -- checkpoints -----------------------------------------------------------------------------------


def saved(batches: int = 5) -> bytes:
    pipeline = numbered(100, chunk_size=10).shuffle(8).batch(4).options(cut_every=10)
    iterator = iter(pipeline)
    list(islice(iterator, batches))
    state = pipeline.checkpoint(as_bytes=True)
    iterator.close()
    return state


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: 3,
        lambda: "/a/path",
        lambda: b"",
        lambda: bytes(range(256)),
        lambda: saved()[:100],
        lambda: {"lanes": {}},
        list,
        lambda: [None],
        lambda: [saved(5), saved(6)],
    ],
    ids=["none", "int", "path", "no bytes", "noise", "half", "one key", "empty list", "list of none", "two positions"],
)
def test_restoring_garbage_says_so_and_harms_nothing(make: Callable[[], Any]) -> None:
    pipeline = numbered(100, chunk_size=10).shuffle(8).batch(4).options(cut_every=10)
    with pytest.raises(CheckpointError):
        pipeline.restore(make())
    assert len(values(pipeline)) == 100


def test_the_same_state_twice_in_a_list_is_one_state() -> None:
    expected = values(numbered(100, chunk_size=10).shuffle(8).batch(4))[20:]
    pipeline = numbered(100, chunk_size=10).shuffle(8).batch(4)
    pipeline.restore((saved(), memoryview(saved())))
    assert values(pipeline) == expected


def test_a_pipeline_that_was_never_iterated_can_be_pickled_and_copied() -> None:
    pipeline = numbered(20).map_transform(double).batch(4)
    for other in (pickle.loads(pickle.dumps(pipeline)), copy.deepcopy(pipeline)):
        assert values(other) == values(pipeline) == [2 * i for i in range(20)]


def test_saving_at_every_odd_moment() -> None:
    pipeline = numbered(20).batch(4)
    before = [pipeline.checkpoint(), pipeline.checkpoint()]
    iterator = iter(pipeline)
    before.append(pipeline.checkpoint())
    next(iterator)
    after_one = pipeline.checkpoint()
    rest = list(iterator)
    at_end = pipeline.checkpoint()
    assert before[0] == before[1] == before[2]
    left = []
    for state in (before[0], after_one, at_end):
        pipeline.restore(state)
        left.append(len(list(pipeline)))
    assert left == [5, len(rest), 0]


# -- sizes -----------------------------------------------------------------------------------------


def test_absurd_sizes_with_little_data() -> None:
    assert sorted(values(numbered(10).shuffle(10**7).batch(2))) == list(range(10))
    assert [len(b) for b in numbered(10).batch(10**12, drop_last=False)] == [10]
    assert list(numbered(10).batch(10**12)) == []
    huge = {"prefetch_batches": 10**9, "micro_batch": 10**9, "cut_every": 10**9, "prefetch_bytes": 10**15}
    assert values(numbered(10).batch(2).options(**huge)) == list(range(10))
    assert values(numbered(10).map_transform(double, parallelism=50).batch(2)) == [2 * i for i in range(10)]
    documents = memory("documents", [{"input_ids": [1, 2]}])
    (packed,) = list(over(documents).pack_flat(10**6, algorithm="wrap", pad_token_id=0).batch(1))
    assert packed.to_training(dtype=np.int32)["input_ids"].shape == (1, 10**6)
    (packed,) = list(over(documents).pack_flat(4, algorithm="first_fit", num_bins=10**5, pad_token_id=0).batch(1))
    assert packed.to_training(dtype=np.int32)["input_ids"].tolist() == [[1, 2, 0, 0]]


def test_smallest_sizes() -> None:
    tiny = {"prefetch_batches": 1, "micro_batch": 1, "cut_every": 1, "prefetch_bytes": 1, "max_workers": 1}
    got = values(numbered(30, chunk_size=1).shuffle(1).batch(1).options(flush_every_k_chunks=1, **tiny))
    assert got == list(range(30))


def test_datasets_without_rows_in_a_mixture() -> None:
    some, none = memory("some", rows(5)), memory("none", [])
    assert values(over(some, none, weights={"some": 1, "none": 0}).batch(1)) == list(range(5))
    with pytest.raises(CurriculumError, match=r"dataset 'none' has no rows.*weight 1.0"):
        over(some, none, weights={"some": 1, "none": 1})
    no_shards = Dataset.from_dict("no shards", {})
    assert values(over(some, no_shards, weights={"some": 1, "no shards": 0}).batch(1)) == list(range(5))


def test_names_of_any_script_and_shards_in_hundreds(tmp_path: Path) -> None:
    folder = tmp_path / "ñ 日本"
    folder.mkdir()
    for i in range(300):
        (folder / f"ä {i:03d} '\".jsonl").write_text(json.dumps({"x": i}) + "\n")
    name = "日本/ü.. \u202e\n'\""
    pipeline = over(Dataset.from_path(name, folder), shuffle_shards=True).batch(10)
    first = values(islice(iter(pipeline), 10))
    state = pipeline.checkpoint(as_bytes=True)
    other = over(Dataset.from_path(name, folder), shuffle_shards=True).batch(10)
    other.restore(state)
    assert sorted(first + values(other)) == list(range(300)) and len(state) < 2048


def test_ids_of_shards_far_apart() -> None:
    one = Dataset.from_dict("one", {2**38: InMemoryShard(rows(3)), 7: InMemoryShard(rows(3, 10))})
    got = payloads(over(one, memory("two", rows(6, 20)), shuffle_within_shard=True).batch(4))
    assert sorted(p["x"] for p in got) == [0, 1, 2, 10, 11, 12, 20, 21, 22, 23, 24, 25]


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["8", 2.5, True, None, [], np.float64(2)], ids=repr)
@pytest.mark.parametrize(
    "build",
    [
        lambda p, value: p.batch(value),
        lambda p, value: p.pack_flat(value, algorithm="wrap"),
        lambda p, value: p.shuffle(4, seed=value),
    ],
    ids=["batch", "pack_flat", "shuffle"],
)
def test_what_is_no_whole_number_is_refused_where_it_is_given(build: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        build(numbered(4), wrong)


def test_numpy_integers_are_integers_also_in_a_checkpoint() -> None:
    documents = memory("documents", [{"input_ids": [1, 2, 3]}] * 8)

    def build(number: Callable[[int], Any]) -> Pipeline:
        packed = over(documents).shuffle(number(4), seed=number(1))
        return packed.pack_flat(number(4), algorithm="wrap", pad_token_id=number(0)).batch(number(2))

    other = build(int)
    other.restore(build(np.int64).checkpoint(as_bytes=True))
    assert len(list(other)) == 3


# -- user functions --------------------------------------------------------------------------------


def double(payload: dict[str, Any]) -> dict[str, Any]:
    return {"x": payload["x"] * 2}


class Panic(BaseException):
    """As foreign code raises it."""


def interrupt(payload: Any) -> Any:
    if payload["x"] == 7:
        raise KeyboardInterrupt
    return payload


def leave(payload: Any) -> Any:
    if payload["x"] == 7:
        raise SystemExit(3)
    return payload


def panic(payload: Any) -> Any:
    if payload["x"] == 7:
        raise Panic("rust")
    return payload


@pytest.mark.parametrize("runner", ["threads", "process"])
@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (interrupt, OperatorError, "map_transform raised KeyboardInterrupt"),
        (leave, OperatorError, r"map_transform raised SystemExit\(3\)"),
        (panic, Panic, "rust"),
    ],
)
def test_what_would_end_the_program_ends_only_the_run(
    runner: str, fn: Any, error: type[BaseException], message: str
) -> None:
    pipeline = numbered(20).map_transform(fn).batch(2).options(runner=runner)
    with pytest.raises(error, match=message):
        list(pipeline)


def test_inline_what_ends_the_program_is_the_user_s_own() -> None:
    with pytest.raises(SystemExit):
        list(numbered(20).map_transform(leave).batch(2).options(runner="inline"))


def stop(payload: Any) -> Any:
    if payload["x"] % 5 == 2:
        raise StopIteration
    return payload


@pytest.mark.parametrize("runner", RUNNERS)
def test_stop_iteration_in_a_function_never_ends_the_stream_quietly(runner: str) -> None:
    pipeline = numbered(20).map_transform(stop).batch(1).options(runner=runner)
    with pytest.raises(OperatorError, match=r"row 2: StopIteration"):
        list(pipeline)
    assert values(pipeline.options(on_error="skip")) == [x for x in range(20) if x % 5 != 2]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda columns: None, "returned NoneType"),
        (lambda columns: {"x": 5}, "'x' is one int"),
        (lambda columns: {"x": "abcd"}, "'x' is one str"),
        (lambda columns: {"x": np.array(1)}, "'x' is one ndarray"),
        (lambda columns: {"x": columns["x"][:-1]}, "has 3 rows, expected 4"),
        (lambda columns: (columns, [3, 2, 1, 0]), "one True or False for each row, found int64"),
        (lambda columns: (columns, [True]), r"keep has shape \(1,\)"),
        (lambda columns: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_nonsense_out_of_a_block_function_is_named(fn: Any, message: str) -> None:
    with pytest.raises(OperatorError, match=message):
        list(numbered(4).map_block(fn).batch(4))


@pytest.mark.parametrize("result", [5, "text", None, [1, 2], {1, 2}, {"x": {"deep": [None]}}, b"", 2**70], ids=repr)
def test_a_function_may_return_any_value(result: Any) -> None:
    pipeline = numbered(3).map_transform(lambda payload: result, drop_none=False).batch(3)
    expected = rows(3) if result is None else [result] * 3
    assert payloads(pipeline) == expected


def change_everything(payload: dict[str, Any]) -> dict[str, Any]:
    payload["list"].append(99)
    payload["x"] += 1
    return payload


@pytest.mark.parametrize("runner", RUNNERS)
def test_functions_and_loops_that_change_what_they_get_change_nothing_else(runner: str) -> None:
    content = rows(4)
    pipeline = over(memory("toy", content)).map_transform(change_everything).batch(4).options(runner=runner)
    expected = [{"x": i + 1, "list": [i, 99]} for i in range(4)]
    for _ in range(2):
        batch = next(iter(pipeline))
        assert payloads([batch]) == expected
        batch.records[0].payload["list"].clear()
    assert content == rows(4)
    arrays = over(memory("arrays", [{"input_ids": np.arange(3)}])).batch(1).options(runner=runner)
    for _ in range(2):
        batch = next(iter(arrays))
        tokens = batch.to_training(dtype=np.int64)["input_ids"]
        assert tokens.tolist() == [[0, 1, 2]]
        tokens[:] = 7
        batch.records[0].payload["input_ids"][:] = 9


# -- options in odd combinations -------------------------------------------------------------------


def lengths(columns: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": Ragged.from_rows([np.arange(x % 10, dtype=np.int32) + 100 * x + 1 for x in columns["x"]])}


def not_sevens(payload: dict[str, Any]) -> bool:
    return payload["x"] % 7 != 0


def long_chain(lanes: int, flush: int | None, **settings: Any) -> Pipeline:
    datasets = [memory("a", rows(120)), memory("b", rows(90, 1000))]
    pipeline = over(*datasets, weights={"a": 0.3, "b": 0.7}, chunk_size=16, shuffle_within_shard=True)
    pipeline.filter(not_sevens).map_block(lengths, reads=["x"]).shuffle(20)
    pipeline.pack_flat(16, algorithm="wrap", pad_token_id=0).batch(3, drop_last=False)
    return pipeline.options(canonical_replicas=lanes, flush_every_k_chunks=flush, **settings)


def shown(items: Any) -> list[Any]:
    return [batch.to_training(dtype=np.int64)["input_ids"].tolist() for batch in items]


ODD = [
    {"runner": "inline", "micro_batch": 1, "cut_every": 7},
    {"runner": "threads", "worker_allocation": "autotune", "micro_batch": 5, "prefetch_batches": 1},
    {"runner": "process", "mtp_mode": True, "micro_batch": 64, "cut_every": 16, "max_workers": 1},
    {"runner": "threads", "mtp_mode": True, "worker_allocation": "global", "prefetch_bytes": 1},
]


@pytest.mark.parametrize("settings", ODD, ids=["inline", "autotune", "process in mtp", "threads in mtp"])
@pytest.mark.parametrize(("lanes", "flush"), [(1, None), (3, 2)])
def test_no_mix_of_settings_changes_the_stream_or_its_resumption(
    settings: dict[str, Any], lanes: int, flush: int | None
) -> None:
    expected = shown(long_chain(lanes, flush, runner="inline"))
    pipeline = long_chain(lanes, flush, **settings)
    iterator = iter(pipeline)
    first = shown(islice(iterator, 13))
    state = pipeline.checkpoint(as_bytes=True)
    assert first + shown(iterator) == expected
    other = long_chain(lanes, flush, runner="threads", micro_batch=9, cut_every=50)
    other.restore(state)
    assert shown(other) == expected[13:]


@pytest.mark.parametrize("lanes", [1, 3])
def test_without_determinism_nothing_is_lost_or_repeated_by_resuming(lanes: int) -> None:
    everything = sorted(t for row in np.concatenate(shown(long_chain(lanes, None))) for t in row if t)
    pipeline = long_chain(lanes, None, deterministic=False, micro_batch=2)
    iterator = iter(pipeline)
    first = shown(islice(iterator, 11))
    state = pipeline.checkpoint(as_bytes=True)
    iterator.close()
    other = long_chain(lanes, None, deterministic=False, micro_batch=7)
    other.restore(state)
    assert sorted(t for row in np.concatenate(first + shown(other)) for t in row if t) == everything


def test_memory_does_not_grow_with_the_length_of_the_run() -> None:
    source = StaticMixtureWorkSource(
        [memory("a", rows(200))], {"a": 1.0}, chunk_size=64, exhausted_policy="repeat", stop_after_passes=None
    )
    pipeline = Pipeline(source).map_block(lengths, reads=["x"]).shuffle(32).batch(8)
    iterator = iter(pipeline.options(micro_batch=32, cut_every=32))
    list(islice(iterator, 800))
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(2):
            list(islice(iterator, 800))
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        iterator.close()
    assert sizes[1] - sizes[0] < 256 * 1024, sizes

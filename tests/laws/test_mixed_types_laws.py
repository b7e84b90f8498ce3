"""A row's value and type depend on that row alone: not on its neighbours, nor on how many of them travel together.

Shards and datasets whose columns have other types (what pandas writes where a column had nulls, what another tokenizer run
wrote) meet in one block or do not, as `micro_batch` says.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from headrace.errors import DataError

LAW = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
BIG = (1 << 60) + 1


def pipe(*datasets: Dataset, **options: Any) -> Pipeline:
    source = StaticMixtureWorkSource(
        datasets=list(datasets),
        mixture={dataset.name: 1.0 for dataset in datasets},
        chunk_size=16,
        shuffle_shards=False,
        exhausted_policy="stop",
    )
    return Pipeline(source).options(**{"runner": "inline", **options})


def exact(value: Any) -> Any:
    """A value with its type, comparable."""
    match value:
        case dict():
            return {name: exact(item) for name, item in sorted(value.items())}
        case list() | tuple():
            return [exact(item) for item in value]
        case np.ndarray():
            return (str(value.dtype), value.shape, value.tobytes())
        case _:
            return (type(value).__name__, repr(value))


def rows_of(pipeline: Pipeline) -> list[Any]:
    return [exact(record.payload) for record in pipeline]


def parquet(folder: Path, name: str, shards: list[dict[str, pa.Array]]) -> Dataset:
    (folder / name).mkdir()
    for number, columns in enumerate(shards):
        pq.write_table(pa.table(columns), folder / name / f"{number}.parquet")
    return Dataset.from_path(name, folder / name)


SCALARS = [
    pa.int8(),
    pa.int64(),
    pa.uint16(),
    pa.uint32(),
    pa.uint64(),
    pa.float32(),
    pa.float64(),
    pa.bool_(),
    pa.string(),
]


@st.composite
def columns(draw: st.DrawFn, count: int) -> dict[str, pa.Array]:
    """A number, a list of numbers, a list of one length: each in a type of its own, with or without nulls."""

    def values(kind: pa.DataType, n: int) -> list[Any]:
        if pa.types.is_string(kind):
            return [f"t{i}" for i in range(n)]
        if pa.types.is_boolean(kind):
            return [i % 2 == 0 for i in range(n)]
        if pa.types.is_floating(kind):
            return [i + 0.5 for i in range(n)]
        return [100 + i if kind.bit_width < 64 else BIG + i for i in range(n)]

    one, many, fixed = (
        draw(st.sampled_from(SCALARS)),
        draw(st.sampled_from(SCALARS)),
        draw(st.sampled_from(SCALARS[:-2])),
    )
    singles = values(one, count)
    if draw(st.booleans()):
        singles[0] = None
    lists = [values(many, draw(st.integers(0, 3))) for _ in range(count)]
    width = draw(st.integers(1, 2))
    return {
        "one": pa.array(singles, one),
        "many": pa.array(lists, pa.list_(many)),
        "fixed": pa.array([values(fixed, width) for _ in range(count)], pa.list_(fixed, width)),
    }


@LAW
@given(st.data(), st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=2), st.booleans())
def test_a_row_does_not_depend_on_its_neighbours(data: st.DataObject, counts: list[list[int]], shuffled: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        datasets = [
            parquet(Path(folder), f"d{number}", [data.draw(columns(count)) for count in shards])
            for number, shards in enumerate(counts)
        ]

        def stream(micro_batch: int, **options: Any) -> list[Any]:
            pipeline = pipe(*datasets, micro_batch=micro_batch, **options)
            return rows_of(pipeline.shuffle(buffer_size=5, seed=1) if shuffled else pipeline)

        alone = stream(1)
        assert all(stream(size) == alone for size in (2, 5, 64))
        assert stream(7, runner="threads") == alone


def test_numbers_of_two_types_in_a_mixture_stay_what_they_are(tmp_path: Path) -> None:
    a = parquet(tmp_path, "a", [{"id": pa.array([BIG + i for i in range(8)], pa.int64())}])
    b = parquet(tmp_path, "b", [{"id": pa.array([0.5 + i for i in range(8)], pa.float64())}])
    texts = [r.payload["t"] for r in pipe(a, b, micro_batch=8).map_transform(lambda r: {"t": str(r["id"])})]
    assert sorted(texts) == sorted([str(BIG + i) for i in range(8)] + [str(0.5 + i) for i in range(8)])


@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_year_is_no_float_because_another_shard_has_floats(tmp_path: Path, size: int) -> None:
    shards = [{"year": pa.array([2020] * 4, kind)} for kind in (pa.int64(), pa.float64())]
    pipeline = pipe(parquet(tmp_path, "a", shards), micro_batch=size).decode_text(fields="year")
    assert [r.payload["year"] for r in pipeline] == ["2020"] * 4 + ["2020.0"] * 4


def packed(pipeline: Pipeline, length: int) -> list[Any]:
    return rows_of(pipeline.pack_flat(length, algorithm="wrap", pad_token_id=0, emit_positions=False))


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("first", ["<u2", "<u4", "<i8"])
def test_ids_of_several_types_are_packed_alike(tmp_path: Path, first: str, size: int) -> None:
    np.save(tmp_path / "0.npy", np.full((4, 6), 7, first))
    np.save(tmp_path / "1.npy", np.full((4, 6), 70_000, "<u4"))
    rows = packed(pipe(Dataset.from_path("n", tmp_path), micro_batch=size), 6)
    want = np.repeat(np.array([7, 70_000], np.int32), [4, 4])
    assert rows == [exact({"input_ids": np.full(6, token, np.int32)}) for token in want]


@pytest.mark.parametrize("size", [1, 4, 8])
def test_lists_of_several_widths_are_packed_alike(tmp_path: Path, size: int) -> None:
    shards = [{"input_ids": pa.array([[1, 2, 3]] * 4, pa.list_(kind))} for kind in (pa.int64(), pa.int32())]
    rows = packed(pipe(parquet(tmp_path, "a", shards), micro_batch=size), 3)
    assert rows == [exact({"input_ids": np.array([1, 2, 3], np.int32)})] * 8


@pytest.mark.parametrize("size", [1, 4])
def test_a_whole_number_is_not_rounded_because_another_record_has_floats(size: int) -> None:
    rows = [{"input_ids": [1, 2], "h": [BIG, BIG + 2]}] * 3 + [{"input_ids": [1, 2], "h": [1.0, 2.0]}]
    pipeline = pipe(Dataset.from_dict("m", {0: InMemoryShard(rows)}), micro_batch=size)
    out = [r.payload["h"] for r in pipeline.pack_flat(2, algorithm="wrap", pad_token_id=0)]
    assert [h.tolist() for h in out] == [[BIG, BIG + 2]] * 3 + [[1, 2]]
    assert {h.dtype for h in out} == {np.dtype(np.int64)}


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("wrong", [[1.5, 2.0], [2**63, 1]])
def test_what_the_type_of_a_field_does_not_hold_is_refused_alone(size: int, wrong: list[Any]) -> None:
    rows = [{"input_ids": [1, 2], "h": [BIG, 3]}, {"input_ids": [1, 2], "h": wrong}, {"input_ids": [3, 4], "h": [5, 6]}]
    pipeline = pipe(Dataset.from_dict("m", {0: InMemoryShard(rows)}), micro_batch=size, on_error="skip")
    out = [r.payload["h"].tolist() for r in pipeline.pack_flat(2, algorithm="wrap", pad_token_id=0)]
    assert out == [[BIG, 3], [5, 6]]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("second", [[BIG, 2], [BIG, 0.5]])
def test_a_whole_number_that_a_float_would_round_is_refused(size: int, second: list[Any]) -> None:
    rows = [{"input_ids": [1, 2], "h": [0.5, 1.5]}, {"input_ids": [1, 2], "h": second}]
    pipeline = pipe(Dataset.from_dict("m", {0: InMemoryShard(rows)}), micro_batch=size, on_error="skip")
    out = [r.payload["h"].tolist() for r in pipeline.pack_flat(2, algorithm="wrap", pad_token_id=0)]
    assert out == [[0.5, 1.5]]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("first", "second"), [(np.uint64, np.int64), (np.int64, np.float64)])
def test_a_batch_of_several_types_holds_each_value_or_says_that_it_cannot(first: type, second: type, size: int) -> None:
    def batch(ids: list[int]) -> Any:
        rows = [{"input_ids": np.array(ids, first)}, {"input_ids": np.array([1, 2], second)}]
        (batch,) = pipe(Dataset.from_dict("m", {0: InMemoryShard(rows)}), micro_batch=size).batch(2)
        return batch.to_training(dtype=np.int64)["input_ids"].tolist()

    assert batch([3, 4]) == [[3, 4], [1, 2]]
    with pytest.raises(DataError, match=rf"'input_ids' holds {BIG} .* float64"):
        batch([BIG, 4])


@pytest.mark.parametrize("algorithm", ["wrap", "best_fit"])
def test_rows_of_several_types_are_the_same_after_a_resume(tmp_path: Path, algorithm: Any) -> None:
    kinds = (pa.int32(), pa.int64(), pa.uint16(), pa.int64(), pa.uint32())
    shards = [{"input_ids": pa.array([[n, 1, 2]] * 3, pa.list_(kind))} for n, kind in enumerate(kinds)]
    dataset = parquet(tmp_path, "a", shards)

    def make() -> Pipeline:
        bins = {} if algorithm == "wrap" else {"num_bins": 2}
        pipeline = pipe(dataset, flush_every_k_chunks=1).pack_flat(4, algorithm=algorithm, pad_token_id=0, **bins)
        return pipeline.batch(3, drop_last=False)

    def seen(batch: Any) -> Any:
        return [exact(record.payload) for record in batch.records]

    whole = [seen(batch) for batch in make()]
    state, got = make().checkpoint(), []
    while True:
        pipeline = make()
        pipeline.restore(state)
        batch = next(iter(pipeline), None)
        if batch is None:
            break
        got.append(seen(batch))
        state = pipeline.checkpoint()
    assert got == whole and len(whole) > 3

"""A function may work in place on what it is given, whatever the settings, and never changes what others read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from headrace.core.block import Ragged

ROWS = 100


def parquet(folder: Path, row_group_size: int = ROWS) -> Dataset:
    table = pa.table(
        {
            "n": pa.array(range(ROWS), pa.int64()),
            "flag": pa.array([False] * ROWS),
            "ids": pa.array([[i, i + 1] for i in range(ROWS)], pa.list_(pa.int64())),
            "mask": pa.array([[False, False]] * ROWS, pa.list_(pa.bool_())),
            "pair": pa.array([[i, i] for i in range(ROWS)], pa.list_(pa.int32(), 2)),
            "text": [f"t{i}" for i in range(ROWS)],
        }
    )
    pq.write_table(table, folder / "a.parquet", row_group_size=row_group_size)
    return Dataset.from_path("p", folder)


def npy(folder: Path) -> Dataset:
    np.save(folder / "a.npy", np.arange(2 * ROWS).reshape(ROWS, 2))
    return Dataset.from_path("n", folder)


def memory(_: Path) -> Dataset:
    rows = [{"ids": np.array([i, i + 1]), "list": [i]} for i in range(ROWS)]
    for row in rows:
        row["ids"].flags.writeable = False
    return Dataset.from_dict("m", {0: InMemoryShard(rows)})


def pipe(dataset: Dataset, size: int, check: str) -> Pipeline:
    mixture = {dataset.name: 1.0}
    source = StaticMixtureWorkSource(
        datasets=[dataset], mixture=mixture, chunk_size=64, shuffle_shards=False, exhausted_policy="stop"
    )
    return Pipeline(source).options(runner="inline", micro_batch=size, auto_validation=check)


def arrays(column: Any) -> list[np.ndarray[Any, Any]]:
    match column:
        case Ragged():
            return [column.values, column.offsets]
        case np.ndarray():
            return [column]
        case list():
            return [value for value in column if isinstance(value, np.ndarray)]
        case _:
            return []


def add(value: Any) -> None:
    if isinstance(value, np.ndarray):
        value[...] = 1
    elif isinstance(value, list):
        value[0] += 1000


def in_place(payload: dict[str, Any]) -> dict[str, Any]:
    for value in payload.values():
        add(value)
    return payload


@pytest.mark.parametrize("make", [parquet, npy, memory])
@pytest.mark.parametrize("size", [1, 8, 50, 100])
@pytest.mark.parametrize("check", ["strict", "off"])
def test_a_function_may_work_in_place(tmp_path: Path, make: Any, size: int, check: str) -> None:
    dataset = make(tmp_path)
    assert len(list(pipe(dataset, size, check).map_transform(in_place))) == ROWS


@pytest.mark.parametrize("make", [parquet, npy, memory])
@pytest.mark.parametrize("rows", [[0, 1, 2], list(range(30)), list(range(ROWS)), [5, 3, 4], [7, 7, 7], [9, 50, 99]])
def test_what_a_reader_gives_is_its_callers_own(tmp_path: Path, make: Any, rows: list[int]) -> None:
    reader, index = make(tmp_path).open(), np.array(rows)
    fields = frozenset({"n", "flag", "ids", "mask", "pair", "text", "input_ids", "list"})
    first = reader.read(0, index, fields)
    kept = {name: [array.copy() for array in arrays(column)] for name, column in first.items()}
    assert kept
    for column in first.values():
        for array in arrays(column):
            array[...] = 1
    again = reader.read(0, index, fields)
    for name, copies in kept.items():
        for array, copy in zip(arrays(again[name]), copies, strict=True):
            np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("size", [1, 8, 100])
def test_a_function_over_columns_may_work_in_place(tmp_path: Path, size: int) -> None:
    dataset = parquet(tmp_path, row_group_size=10)

    def twice(columns: dict[str, Any]) -> dict[str, Any]:
        columns["n"] *= 2
        columns["flag"] |= True
        for ids in columns["ids"]:
            ids += 1
        return columns

    got = {
        r.payload["n"]: (r.payload["flag"], r.payload["ids"].tolist())
        for r in pipe(dataset, size, "off").map_block(twice)
    }
    assert got == {2 * i: (True, [i + 1, i + 2]) for i in range(ROWS)}

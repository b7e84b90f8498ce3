"""Text that is not UTF-8 costs its own row, also where a dictionary holds it (categories, as pandas writes them)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace import Dataset, Pipeline, StaticMixtureWorkSource
from headrace.io.row_error import RowError

KEYS = [0, 1, 0, 2, 1, 2]
"""Rows 1 and 4 hold what is not UTF-8."""


def unsound(values: list[bytes]) -> pa.Array:
    binary = pa.array(values, pa.binary())
    return pa.StringArray.from_buffers(len(values), *binary.buffers()[1:])


def words() -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(KEYS, pa.int32()), unsound([b"a", b"\xff", b"c"]))


def in_lists() -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(range(len(KEYS) + 1), pa.int32()), words())


def in_structs() -> pa.Array:
    return pa.StructArray.from_arrays([words()], ["w"])


@pytest.mark.parametrize(
    ("make", "of"), [(words, lambda w: w), (in_lists, lambda w: [w]), (in_structs, lambda w: {"w": w})]
)
@pytest.mark.parametrize("size", [1, 2, 8])
def test_only_its_own_rows_are_left_out(tmp_path: Path, make: Any, of: Any, size: int) -> None:
    pq.write_table(pa.table({"text": make(), "n": range(len(KEYS))}), tmp_path / "a.parquet")
    dataset = Dataset.from_path("d", tmp_path)
    source = StaticMixtureWorkSource(
        datasets=[dataset], mixture={"d": 1.0}, chunk_size=8, shuffle_shards=False, exhausted_policy="stop"
    )
    pipeline = Pipeline(source).options(runner="inline", micro_batch=size, on_error="skip")
    found = [(r.payload["n"], r.payload["text"]) for r in pipeline]
    assert found == [(0, of("a")), (2, of("a")), (3, of("c")), (5, of("c"))]


def test_the_error_says_which_row_and_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": words()}), tmp_path / "a.parquet")
    with pytest.raises(RowError, match=r"row 4: .*column 'text' holds text that is not UTF-8"):
        Dataset.from_path("d", tmp_path).open().read(0, np.array([3, 4]), None)

"""Reading any rows in any order from every local format."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.core.block import Text, to_list
from headrace.errors import ConfigError, UnknownOptionError
from headrace.io import Dataset, InMemoryShard

TEXTS = [f"document {i} " + "é" * (i % 7) for i in range(50)]
ORDERS = [[0], list(range(50)), [3, 4, 5], [9, 8, 7], [5, 5, 6, 5], [49, 0, 48, 1], []]


def _jsonl(folder: Path) -> None:
    lines = [json.dumps({"text": t, "id": i, "x": [1, "a"]}, ensure_ascii=False) for i, t in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _parquet(folder: Path) -> None:
    table = pa.table({"text": TEXTS, "id": list(range(50)), "x": [["a"]] * 50})
    pq.write_table(table, folder / "a.parquet", row_group_size=7)


@pytest.mark.parametrize("write", [_jsonl, _parquet])
@pytest.mark.parametrize("rows", ORDERS)
def test_rows_in_the_order_asked_for(tmp_path: Path, write, rows: list[int]) -> None:
    write(tmp_path)
    data = Dataset.from_path("d", tmp_path)
    assert data.total() == len(data) == 50
    got = data.open().read(0, np.array(rows, np.int64), frozenset({"text", "id"}))
    assert isinstance(got, dict)
    assert to_list(got["text"]) == [TEXTS[r] for r in rows] if rows else not got or len(got["text"]) == 0
    if rows:
        assert to_list(got["id"]) == rows


def test_parquet_text_stays_bytes(tmp_path: Path) -> None:
    _parquet(tmp_path)
    got = Dataset.from_path("d", tmp_path).open().read(0, np.arange(20), frozenset({"text"}))
    assert isinstance(got, dict)
    assert isinstance(got["text"], Text)
    assert list(got) == ["text"]


def test_whole_rows_of_jsonl_do_not_alias(tmp_path: Path) -> None:
    _jsonl(tmp_path)
    got = Dataset.from_path("d", tmp_path).open().read(0, np.array([1, 1]), None)
    assert got == [{"text": TEXTS[1], "id": 1, "x": [1, "a"]}] * 2
    assert got[0] is not got[1]
    assert got[0]["x"] is not got[1]["x"]


def test_npy_rows(tmp_path: Path) -> None:
    rows = np.arange(40, dtype=np.uint16).reshape(10, 4)
    np.save(tmp_path / "a.npy", rows)
    reader = Dataset.from_path("d", tmp_path).open()
    for wanted in ([0, 1, 2], [9, 0, 9], []):
        got = reader.read(0, np.array(wanted, np.int64), frozenset({"input_ids"}))
        assert isinstance(got, dict)
        assert np.array_equal(got["input_ids"], rows[wanted])
    assert reader.read(0, np.array([1]), frozenset({"text"})) == {}


def test_memory_rows_are_copies() -> None:
    rows = [{"text": "a", "tags": [1]}, {"text": "b"}, {"id": 3}]
    data = Dataset.from_dict("m", {7: InMemoryShard(rows)})
    assert data.ids().tolist() == [7]
    got = data.open().read(7, np.array([0, 0]), None)
    got[0]["tags"].append(2)
    assert got[1] == rows[0] == {"text": "a", "tags": [1]}
    columns = data.open().read(7, np.array([2, 1]), frozenset({"text", "absent"}))
    assert list(columns) == ["text"]
    assert repr(columns["text"]) == "[MISSING, 'b']"


@pytest.mark.parametrize("write", [_jsonl, _parquet])
def test_a_row_that_does_not_exist_is_the_callers_error(tmp_path: Path, write) -> None:
    write(tmp_path)
    reader = Dataset.from_path("d", tmp_path).open()
    for shard, row in ((0, 50), (0, -1), (1, 0)):
        with pytest.raises(ConfigError, match="numbered from 0"):
            reader.read(shard, np.array([row]), None)


def test_a_dataset_is_small_to_send_and_reads_after(tmp_path: Path) -> None:
    _jsonl(tmp_path)
    data = Dataset.from_path("d", tmp_path)
    wire = pickle.dumps(data)
    assert len(wire) < 2000
    there = pickle.loads(wire)
    assert there.fingerprint() == data.fingerprint()
    assert there.open().read(0, np.array([3]), frozenset({"id"})) == {"id": [3]}
    assert copy.deepcopy(data) is data
    with pytest.raises(ValueError, match="read-only"):
        data.counts()[0] = 1


def test_unknown_names_say_the_nearest(tmp_path: Path) -> None:
    _jsonl(tmp_path)
    with pytest.raises(UnknownOptionError, match="did you mean 'jsonl'"):
        Dataset.from_path("d", tmp_path, fmt="json1")
    with pytest.raises(UnknownOptionError, match="did you mean 'limit_bytes'"):
        Dataset.from_path("d", tmp_path, options={"cache": {"limit_byte": 1}})

"""Faults that other loaders had with input files; each was tried here, and its right value kept.

The numbers are those of the list of public reports that the cases come from.
"""

from __future__ import annotations

import gzip
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.core.block import MISSING, to_list
from headrace.core.op import BadRows
from headrace.errors import DataChangedError, FormatError, RecordError
from headrace.io import Dataset, DatasetInspector, RowError

TEXT = frozenset({"text"})


def _file(tmp_path: Path, content: bytes, name: str = "a.jsonl") -> Dataset:
    (tmp_path / name).write_bytes(content)
    return Dataset.from_path("d", tmp_path / name)


def _all(data: Dataset, fields: frozenset[str] | None = TEXT, shard: int = 0, bad: BadRows | None = None) -> Any:
    got = data.open().read(shard, np.arange(data.counts()[shard]), fields, bad)
    return to_list(got["text"]) if fields == TEXT and isinstance(got, dict) and "text" in got else got


def test_b001_unicode_line_separators_do_not_split(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four"
    data = _file(tmp_path, json.dumps({"text": text}, ensure_ascii=False).encode() + b'\n{"text": "b"}\n')
    assert data.total() == 2
    assert _all(data) == [text, "b"]


def test_b002_blank_lines_are_not_rows_and_lines_stay_numbered(tmp_path: Path) -> None:
    data = _file(tmp_path, b'{"text": "a"}\n\n   \n{"text": "b"}\n{"text": \n\n\n\n{"text": "c"}\n\n\n\n')
    assert data.total() == 4
    bad = BadRows()
    assert _all(data, bad=bad) == ["a", "b", "c"]
    assert bad.rows == [2]
    assert "line 5, bytes 33-46" in str(bad.errors[0])


def test_b003_a_bom_at_the_start_is_dropped_and_elsewhere_an_error(tmp_path: Path) -> None:
    line = b'{"text": "a", "n": 1}\n'
    plain, marked = _file(tmp_path, line * 3), _file(tmp_path, b"\xef\xbb\xbf" + line * 3, "b.jsonl")
    assert _all(plain, None) == _all(marked, None)
    joined = _file(tmp_path, line + b"\xef\xbb\xbf" + line + line, "c.jsonl")
    bad = BadRows()
    assert len(_all(joined, None, bad=bad)) == 2
    assert bad.rows == [1]
    assert "line 2" in str(bad.errors[0])
    assert _file(tmp_path, b"\xef\xbb\xbf", "d.jsonl").total() == 0


def test_b007_integers_are_exact_or_an_error(tmp_path: Path) -> None:
    ids = [2**63, 2**64, 10**20 + 1, -(2**65) - 1, 10**1000 + 7]
    data = _file(tmp_path, b"".join(b'{"id": %d, "text": "t"}\n' % i for i in ids))
    reader = data.open()
    assert reader.read(0, np.arange(5), frozenset({"id"})) == {"id": ids}
    assert [row["id"] for row in reader.read(0, np.arange(5), None)] == ids
    huge = _file(tmp_path, b'{"id": 1}\n{"id": ' + b"9" * 5000 + b', "text": "t"}\n', "b.jsonl")
    bad = BadRows()
    assert huge.open().read(0, np.arange(2), frozenset({"id"}), bad) == {"id": [1]}
    assert bad.rows == [1]
    assert "4300" in str(bad.errors[0])
    assert huge.open().read(0, np.array([1]), TEXT) == {"text": ["t"]}


def test_b008_a_cut_off_last_line_is_not_a_missing_newline(tmp_path: Path) -> None:
    whole = b'{"text": "a"}\n{"text": "\xc3\xa9"}'
    assert _all(_file(tmp_path, whole)) == ["a", "é"]
    assert _all(_file(tmp_path, whole + b"\r", "b.jsonl")) == ["a", "é"]
    for name, content in (("c.jsonl", b'{"text": "a"}\n{"text": "b'), ("d.jsonl", b'{"text": "a"}\n{"text": "\xc3')):
        data = _file(tmp_path, content, name)
        assert data.total() == 2
        bad = BadRows()
        assert _all(data, bad=bad) == ["a"]
        assert f"cut off: it ends at byte {len(content)}" in str(bad.errors[0])
        with pytest.raises(RecordError, match=name) as caught:
            _all(data)
        assert isinstance(caught.value, RowError)
        assert (caught.value.row, caught.value.offset) == (1, 14)


def test_b009_two_objects_on_a_line(tmp_path: Path) -> None:
    content = b'{"text": "a"}\n{"text": "b"}{"text": "c"}\n{"text": "d"}\n'
    for fields in (TEXT, None):
        bad = BadRows()
        _all(_file(tmp_path, content), fields, bad=bad)
        assert bad.rows == [1]
        assert "line 2" in str(bad.errors[0])
        assert "character 14" in str(bad.errors[0])


@pytest.mark.parametrize(
    "content", [b'{"text": "a"}{"text": "b"}', b'{"text": "a"}\r{"text": "b"}\r', b"\0" * 40, b"\xff"]
)
def test_b009_a_last_line_that_is_wrong_is_not_called_cut_off(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(RowError) as caught:
        _all(_file(tmp_path, b'{"text": "z"}\n' + content))
    assert "cut off" not in str(caught.value)
    assert caught.value.row == 1


def test_b009_an_object_over_two_lines_does_not_make_up_for_it(tmp_path: Path) -> None:
    data = _file(tmp_path, b'{"text":\n"a"}\n{"text": "b"}{"text": "c"}\n{"text": "d"}\n')
    assert data.total() == 4
    for fields in (TEXT, None):
        bad = BadRows()
        got = _all(data, fields, bad=bad)
        assert got == (["d"] if fields else [{"text": "d"}])
        assert bad.rows == [0, 1, 2]


def test_b010_missing_null_empty_number_and_rows_that_are_no_object(tmp_path: Path) -> None:
    content = b'{"text": null}\n{}\n{"text": ""}\n{"text": 5}\n"just a string"\n[1, 2]\n{"content": "x"}\nnull\n'
    bad = BadRows()
    assert _all(_file(tmp_path, content), bad=bad) == [None, MISSING, "", 5, MISSING]
    assert bad.rows == [4, 5, 7]
    assert "a row must be an object, this line is of type str" in str(bad.errors[0])
    bad = BadRows()
    assert len(_all(_file(tmp_path, content), None, bad=bad)) == 5
    assert bad.rows == [4, 5, 7]


def test_b011_b012_only_wanted_fields_matter_and_types_may_change(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "1.jsonl").write_bytes(b'{"text": null, "metadata": null}\n' * 2000 + b'{"text": "last"}\n')
    (folder / "2.jsonl").write_bytes(b'{"text": "b", "metadata": {"a": 1}}\n')
    (folder / "3.jsonl").write_bytes(b'{"text": "c", "metadata": [1, "two", [3, {}]]}\n')
    data = Dataset.from_path("d", folder)
    assert _all(data) == [None] * 2000 + ["last"]
    assert _all(data, shard=1) + _all(data, shard=2) == ["b", "c"]
    assert data.open().read(2, np.array([0]), frozenset({"metadata"})) == {"metadata": [[1, "two", [3, {}]]]}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_b014_very_long_lines(tmp_path: Path, place: int) -> None:
    texts = ["x" * 1000, "y" * 3_000_000]
    texts.insert(place, "é" * 15_000_000)
    data = _file(tmp_path, b"".join(json.dumps({"text": t}, ensure_ascii=False).encode() + b"\n" for t in texts))
    assert [len(t) for t in _all(data)] == [len(t) for t in texts]
    limited = Dataset.from_path("d", tmp_path / "a.jsonl", options={"jsonl": {"max_line_bytes": "8mb"}})
    bad = BadRows()
    assert _all(limited, bad=bad) == [t for t in texts if len(t) < 10_000_000]
    assert bad.rows == [place]
    assert "more than max_line_bytes=8388608" in str(bad.errors[0])


def test_b015_every_gzip_member(tmp_path: Path) -> None:
    lines = b'{"text": "a"}\n{"text": "bb"}\n{"text": "ccc"}\n'
    for cut in (0, 5, 14, 30, len(lines)):
        content = gzip.compress(lines[:cut]) + gzip.compress(b"") + gzip.compress(lines[cut:]) + b"\0" * 512
        data = _file(tmp_path, content, f"{cut}.jsonl.gz")
        assert _all(data) == ["a", "bb", "ccc"]


def test_b018_empty_shards_contribute_nothing(tmp_path: Path) -> None:
    jsonl, parquet = tmp_path / "j", tmp_path / "p"
    jsonl.mkdir()
    parquet.mkdir()
    for name, content in (
        ("1.jsonl", b'{"text": "a"}\n'),
        ("2.jsonl", b""),
        ("3.jsonl", b"\n \n"),
        ("4.jsonl", b'{"text": "b"}'),
    ):
        (jsonl / name).write_bytes(content)
    (jsonl / "5.jsonl.gz").write_bytes(b"")
    (jsonl / "6.jsonl.gz").write_bytes(gzip.compress(b""))
    data = Dataset.from_path("d", jsonl)
    assert data.counts().tolist() == [1, 0, 0, 1, 0, 0]
    assert _all(data, shard=0) + _all(data, shard=3) == ["a", "b"]
    assert _all(data, shard=1) == {}
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(parquet / "1.parquet", schema) as out:
        for rows in (["a", "b"], [], ["c"]):
            out.write_table(pa.table({"text": rows}, schema=schema))
    with pq.ParquetWriter(parquet / "2.parquet", schema):
        pass
    data = Dataset.from_path("d", parquet)
    assert data.counts().tolist() == [3, 0]
    assert _all(data) == ["a", "b", "c"]
    assert _all(data, shard=1) == {}


def test_b019_nested_columns_of_one_row_group(tmp_path: Path) -> None:
    rows = [{"m": [[str(i)] * (i % 5)] * 3, "t": {"a": i, "b": [i] * (i % 3)}} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = Dataset.from_path("d", tmp_path)
    order = np.array([2999, 0, 5, 5])
    got: Any = data.open().read(0, order, None)
    assert got["m"] == [rows[i]["m"] for i in order]
    assert got["t"] == [rows[i]["t"] for i in order]
    assert got["t"][2] is not got["t"][3]


@pytest.mark.slow
def test_b019_a_text_column_over_two_gigabytes_in_one_row_group(tmp_path: Path) -> None:
    row = "x" * (1 << 20)
    column = pa.chunked_array([pa.array([row] * 1100), pa.array([row] * 1100)])
    pq.write_table(pa.table({"text": column, "id": list(range(2200))}), tmp_path / "a.parquet", row_group_size=2200)
    data = Dataset.from_path("d", tmp_path)
    got: Any = data.open().read(0, np.array([0, 2199]), TEXT)
    assert [len(t) for t in got["text"].to_bytes()] == [1 << 20] * 2


@pytest.mark.parametrize("first", [0, 4])
def test_b021_parquet_shards_may_differ(tmp_path: Path, first: int) -> None:
    kinds = [
        pa.table({"text": pa.array(["s"], pa.string())}),
        pa.table({"text": pa.array(["l"], pa.large_string()), "extra": [1]}),
        pa.table({"text": pa.array(["d"]).dictionary_encode()}),
        pa.table({"text": pa.nulls(1)}),
        pa.table({"other": ["x"]}),
        pa.table({"text": pa.array(["v"], pa.string_view())}),
    ]
    for i, table in enumerate(kinds[first:] + kinds[:first]):
        pq.write_table(table, tmp_path / f"{i}.parquet")
    data = Dataset.from_path("d", tmp_path)
    got = [_all(data, shard=shard) for shard in range(6)]
    assert got[-first:] + got[:-first] == [["s"], ["l"], ["d"], [None], {}, ["v"]]


def test_b022_an_unreadable_shard_is_found_when_the_dataset_is_made(tmp_path: Path) -> None:
    for i in range(6):
        pq.write_table(pa.table({"text": [f"{i}"] * 100}), tmp_path / f"{i}.parquet")
    good = (tmp_path / "3.parquet").read_bytes()
    for content in (good[:-20], b"<html>not found</html>", good[:4], b""):
        (tmp_path / "3.parquet").write_bytes(content)
        with pytest.raises(FormatError, match=rf"3\.parquet \({len(content)} bytes\)"):
            Dataset.from_path("d", tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(b'{"text": "a"}', mtime=0), "is gzip data; let its name end in .gz"),
        ('{"text": "a"}\n'.encode("utf-16"), "is UTF-16 text"),
        (b"\n <!DOCTYPE html><html>", "is an HTML page"),
        (b"PAR1\x15\x04", "is a Parquet file"),
        (b"<?xml version='1.0'?><Error>", "is an XML document"),
    ],
    ids=["gzip", "utf-16", "html", "parquet", "xml"],
)
def test_b022_a_file_of_another_kind_is_found_when_the_dataset_is_made(
    tmp_path: Path, content: bytes, words: str
) -> None:
    _file(tmp_path, b'{"text": "a"}\n')
    for name in ("b.jsonl", "c.jsonl.gz"):
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        with pytest.raises(FormatError, match=rf"{name} {words}"):
            Dataset.from_path("d", tmp_path)
        (tmp_path / name).unlink()


def test_b022_a_damaged_row_group_costs_only_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    text = [f"{i} " + os.urandom(3000).hex() for i in range(600)]
    pq.write_table(pa.table({"text": text}), path, row_group_size=200, compression="zstd", use_dictionary=False)
    where = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[where + 40 : where + 4000] = b"\xff" * 3960
    path.write_bytes(content)
    data = Dataset.from_path("d", path)
    rows = np.array([599, 250, 0, 399, 1])
    bad = BadRows()
    got: Any = data.open().read(0, rows, TEXT, bad)
    assert to_list(got["text"]) == [text[599], text[0], text[1]]
    assert bad.rows == [1, 3]
    assert "row groups 1-1, columns ['text']" in str(bad.errors[0])
    with pytest.raises(RowError) as caught:
        data.open().read(0, rows, TEXT)
    assert caught.value.row == 250


@pytest.mark.parametrize("kind", ["plain", "nulls", "list", "chat"])
def test_text_that_is_not_utf_8_costs_only_its_rows(tmp_path: Path, kind: str) -> None:
    raw = [b"a", b"\xff", b"b", b"c\xc3", b"\xc3\xa9"]
    text: Any = pa.Array.from_buffers(pa.string(), 5, pa.array(raw).buffers())
    if kind == "nulls":
        text = pa.concat_arrays([text, pa.nulls(1, pa.string())])
    elif kind == "list":
        text = pa.ListArray.from_arrays(pa.array(range(6), pa.int32()), text)
    elif kind == "chat":
        text = pa.ListArray.from_arrays(pa.array(range(6), pa.int32()), pa.StructArray.from_arrays([text], ["content"]))
    pq.write_table(pa.table({"text": text, "n": range(len(text))}), tmp_path / "a.parquet")
    data = Dataset.from_path("d", tmp_path)
    good: list[Any] = ["a", "b", "é"]
    if kind in ("list", "chat"):
        good = [[{"content": row}] if kind == "chat" else [row] for row in good]
    for order, lost, kept in (([0, 1, 2, 3, 4], [1, 3], [0, 1, 2]), ([4, 3, 0, 1], [1, 3], [2, 0])):
        bad = BadRows()
        got: Any = data.open().read(0, np.array(order), TEXT, bad)
        assert to_list(got["text"]) == [good[i] for i in kept]
        assert bad.rows == lost
        assert "a.parquet, column 'text' holds text that is not UTF-8" in str(bad.errors[0])
    assert data.open().read(0, np.array([1, 3]), frozenset({"n"}))["n"].tolist() == [1, 3]


NOW = datetime(2024, 5, 6, 7, 8, 9, 123456)


@pytest.mark.parametrize(
    ("value", "kind", "read"),
    [
        (NOW, pa.timestamp("us"), NOW),
        (NOW, pa.timestamp("ns"), np.datetime64("2024-05-06T07:08:09.123456000")),
        (NOW.replace(tzinfo=UTC), pa.timestamp("us", "UTC"), NOW.replace(tzinfo=UTC)),
        ([1, 2], pa.list_(pa.int16()), np.array([1, 2], np.int16)),
        ([], pa.large_list(pa.float32()), np.array([], np.float32)),
        ([True, False], pa.list_(pa.bool_(), 2), np.array([True, False])),
        ([0.5, None], pa.list_(pa.float32(), 2), [0.5, None]),
        ([0.5, None], pa.list_(pa.float32()), [0.5, None]),
        (3, pa.int8(), 3),
        (0.1, pa.float32(), float(np.float32(0.1))),
        ("a", pa.dictionary(pa.int32(), pa.string()), "a"),
        ([("a", 1)], pa.map_(pa.string(), pa.int32()), [("a", 1)]),
    ],
)
def test_a_value_does_not_depend_on_nulls_in_other_rows(
    tmp_path: Path, value: Any, kind: pa.DataType, read: Any
) -> None:
    for i, rows in enumerate(([value], [value, None])):
        pq.write_table(pa.table({"x": pa.array(rows, kind)}), tmp_path / f"{i}.parquet")
    with DatasetInspector(Dataset.from_path("d", tmp_path)) as look:
        for got in (look.read(0, 0)["x"], look.read(1, 0)["x"], look.read_many(1, [1, 0])[1]["x"]):
            assert type(got) is type(read)
            assert getattr(got, "dtype", None) == getattr(read, "dtype", None)
            assert np.array_equal(got, read) if isinstance(read, np.ndarray) else got == read
            assert getattr(got, "tzinfo", None) is None or got.utcoffset() == timedelta(0)
        assert look.read(1, 1)["x"] is None


def test_two_columns_of_one_name_are_an_error_only_where_wanted(tmp_path: Path) -> None:
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array([7])]
    pq.write_table(pa.Table.from_arrays(columns, ["text", "text", "n"]), tmp_path / "a.parquet")
    data = Dataset.from_path("d", tmp_path)
    with pytest.raises(RowError, match=r"a\.parquet has 2 columns named 'text'"):
        _all(data)
    got: Any = data.open().read(0, np.array([0]), frozenset({"n"}))
    assert got["n"].tolist() == [7]


def test_a_cut_off_compressed_file_is_an_error_with_its_offset(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(5000)))
    for size in (len(whole) - 1, len(whole) // 2, 12):
        (tmp_path / "a.jsonl.gz").write_bytes(whole[:size])
        with pytest.raises(FormatError, match=rf"cut off: its gz data ends at byte {size}"):
            Dataset.from_path("d", tmp_path)


def test_python_s_own_nan_is_read(tmp_path: Path) -> None:
    data = _file(tmp_path, b'{"text": "a", "score": NaN}\n{"text": "b", "score": -Infinity}\n')
    assert _all(data) == ["a", "b"]
    assert data.open().read(0, np.array([1]), frozenset({"score"})) == {"score": [float("-inf")]}


def test_lone_surrogates_are_an_error_only_where_wanted(tmp_path: Path) -> None:
    data = _file(tmp_path, b'{"text": "\\ud800", "id": 1}\n{"text": "\\ud83d\\ude00", "id": 2}\n')
    bad = BadRows()
    assert _all(data, bad=bad) == ["\U0001f600"]
    assert "lone surrogate" in str(bad.errors[0])
    assert data.open().read(0, np.arange(2), frozenset({"id"})) == {"id": [1, 2]}


def test_deep_nesting_is_an_error_of_its_row(tmp_path: Path) -> None:
    data = _file(tmp_path, b'{"text": "a"}\n{"x": ' + b"[" * 100_000 + b'}\n{"text": "b"}\n')
    bad = BadRows()
    assert _all(data, bad=bad) == ["a", "b"]
    assert bad.rows == [1]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "npy", "jsonl.gz"])
def test_a_file_that_changes_under_the_run_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"

    def write(n: int) -> None:
        if suffix == "npy":
            np.save(path, np.zeros((n, 4), np.int32))
        elif suffix == "parquet":
            pq.write_table(pa.table({"text": ["a"] * n}), path)
        else:
            content = b'{"text": "a"}\n' * n
            path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)

    write(3)
    data = Dataset.from_path("d", path)
    reader = data.open()
    reader.read(0, np.arange(2), None)
    write(300)
    for stale in (reader, data.open()):
        with pytest.raises(DataChangedError, match=r"a\." + suffix):
            stale.read(0, np.arange(3), frozenset({"text", "input_ids"}))
    path.unlink()
    with pytest.raises(DataChangedError, match="is gone"):
        data.open().read(0, np.arange(2), None)

"""What a folder is: which files, in which order, of which format."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError, FormatError, UnknownOptionError
from headrace.io import CacheOptions, Dataset, DatasetInspector, InMemoryShard, StoreOptions
from headrace.io.formats.base import sorted_runs
from headrace.io.options import parse_bytes

LINE = b'{"text": "a"}\n'


def _tree(root: Path, names: list[str], content: bytes = LINE) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_shards_are_ordered_by_name_whatever_the_order_of_creation(tmp_path: Path) -> None:
    names = ["b.jsonl", "a/2.jsonl", "B.jsonl", "a.jsonl", "a/10.jsonl", "é.jsonl", "c/d/e.jsonl"]
    one = Dataset.from_path("d", _tree(tmp_path / "x", names))
    two = Dataset.from_path("d", _tree(tmp_path / "y", names[::-1]))
    assert one.shard_names == tuple(sorted(names, key=os.fsencode)) == two.shard_names
    assert one.fingerprint() == two.fingerprint()
    _tree(tmp_path / "y", ["z.jsonl"])
    assert Dataset.from_path("d", tmp_path / "y").fingerprint() != one.fingerprint()


def test_hidden_index_and_unknown_files_are_left_out(tmp_path: Path) -> None:
    _tree(tmp_path, ["a.jsonl", ".b.jsonl", ".c/d.jsonl", "_temporary/e.jsonl", "index.json", "README.md", "_SUCCESS"])
    assert Dataset.from_path("d", tmp_path).shard_names == ("a.jsonl",)


def test_a_link_back_does_not_loop(tmp_path: Path) -> None:
    _tree(tmp_path, ["a/1.jsonl"])
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "2.jsonl").symlink_to(tmp_path / "a" / "1.jsonl")
    assert Dataset.from_path("d", tmp_path).shard_names == ("2.jsonl", "a/1.jsonl")


def test_several_formats_are_an_error_unless_one_is_chosen(tmp_path: Path) -> None:
    _tree(tmp_path, ["a.jsonl"])
    pq.write_table(pa.table({"text": ["p"]}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"1 of jsonl \(as 'a.jsonl'\); 1 of parquet"):
        Dataset.from_path("d", tmp_path)
    assert Dataset.from_path("d", tmp_path, fmt="parquet").shard_names == ("b.parquet",)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.jsonl", "a.jsonl.gz"], "one shard twice"),
        (["a.jsonl", "stats.json"], "'stats.json' beside"),
        (["README.md"], "no files of a known format"),
        ([], "no files of a known format"),
    ],
)
def test_doubtful_folders_are_errors(tmp_path: Path, names: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Dataset.from_path("d", _tree(tmp_path, names))


def test_a_missing_path_and_an_empty_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Dataset.from_path("d", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="needs a name"):
        Dataset.from_path("", _tree(tmp_path, ["a.jsonl"]))


def test_a_file_named_by_the_user_may_have_any_suffix(tmp_path: Path) -> None:
    _tree(tmp_path, ["data.txt"])
    with pytest.raises(ConfigError, match="known suffixes"):
        Dataset.from_path("d", tmp_path / "data.txt")
    assert Dataset.from_path("d", tmp_path / "data.txt", fmt="jsonl").total() == 1


def test_a_list_of_files(tmp_path: Path) -> None:
    _tree(tmp_path, ["x/1.jsonl", "y/1.jsonl", "y/2.jsonl", "y/no.jsonl"])
    paths = [tmp_path / "y" / "2.jsonl", tmp_path / "x" / "1.jsonl", tmp_path / "y" / "1.jsonl"]
    data = Dataset.from_files("d", paths)
    assert data.shard_names == ("x/1.jsonl", "y/1.jsonl", "y/2.jsonl")
    assert data.fingerprint() == Dataset.from_files("d", paths[::-1]).fingerprint()
    assert Dataset.from_files("d", paths[:1]).shard_names == ("2.jsonl",)
    with pytest.raises(ConfigError, match="twice"):
        Dataset.from_files("d", [*paths, paths[0]])
    with pytest.raises(ConfigError, match="empty"):
        Dataset.from_files("d", [])


def test_memory_shards_are_ordered_by_id() -> None:
    data = Dataset.from_dict(
        "m", {9: InMemoryShard([{"x": 1}]), 2: InMemoryShard([]), 5: InMemoryShard([{"x": 2}] * 3)}
    )
    assert data.ids().tolist() == [2, 5, 9]
    assert data.counts().tolist() == [0, 3, 1]
    assert (data.total(), data.max_count(), data.shard_count(), len(data)) == (4, 3, 3, 4)
    assert (data.raw_bytes() > 0).tolist() == [False, True, True]
    assert data.open().read(9, np.array([0]), frozenset({"x"})) == {"x": [1]}
    for shards in ({-1: InMemoryShard([])}, {"0": InMemoryShard([])}, {0: [{"x": 1}]}, {True: InMemoryShard([])}):
        with pytest.raises(ConfigError):
            Dataset.from_dict("m", shards)


def test_npy_files_must_be_rows_of_integers_of_one_length(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 4), np.int32))
    np.save(tmp_path / "b.npy", np.zeros((0, 4), np.int32))
    assert Dataset.from_path("d", tmp_path).counts().tolist() == [3, 0]
    for array in (np.zeros((2, 5), np.int32), np.zeros(8, np.int32), np.zeros((2, 4)), np.array([[object()]])):
        np.save(tmp_path / "c.npy", array, allow_pickle=True)
        with pytest.raises(FormatError, match=r"c\.npy"):
            Dataset.from_path("d", tmp_path)
    np.save(tmp_path / "c.npy", np.zeros((9, 4), np.int32))
    whole = (tmp_path / "c.npy").read_bytes()
    for content in (whole[:-3], whole[:100], b"", b"\x93NUMPY"):
        (tmp_path / "c.npy").write_bytes(content)
        with pytest.raises(FormatError, match=rf"c\.npy \({len(content)} bytes\)"):
            Dataset.from_path("d", tmp_path)


@pytest.mark.parametrize("dtype", [">i4", "<u2", "<i8"])
@pytest.mark.parametrize("fortran", [False, True])
def test_npy_layouts(tmp_path: Path, dtype: str, fortran: bool) -> None:
    rows = np.arange(60).reshape(12, 5).astype(dtype)
    np.save(tmp_path / "a.npy", np.asfortranarray(rows) if fortran else rows)
    reader = Dataset.from_path("d", tmp_path).open()
    for wanted in ([3, 4, 5], [11, 0, 0, 7]):
        got = reader.read(0, np.array(wanted), None)["input_ids"]
        assert got.dtype.isnative
        assert got.tolist() == rows[wanted].tolist()


def test_inspector(tmp_path: Path) -> None:
    _tree(tmp_path, ["a.jsonl", "b.jsonl"], b'{"text": "a", "n": 1}\n{"text": null}\n')
    with DatasetInspector(Dataset.from_path("d", tmp_path)) as look:
        assert look.read(1, 1) == {"text": None}
        assert look.read_many(0, [1, 0, 0]) == [{"text": None}, {"text": "a", "n": 1}, {"text": "a", "n": 1}]
        assert look.schema() == {"text": "null | str", "n": "int"}
        assert len(look.head(3)) == 3
    pq.write_table(pa.table({"text": ["p", "q"], "ids": [[1, 2], [3]], "v": [1.5, None]}), tmp_path / "c.parquet")
    with DatasetInspector(Dataset.from_path("d", tmp_path / "c.parquet")) as look:
        row = look.read(0, 1)
        assert (row["text"], row["ids"].tolist(), row["v"]) == ("q", [3], None)
        assert look.schema() == {"text": "str", "ids": "int64[]", "v": "float | null"}


def test_options() -> None:
    assert parse_bytes("750gb", "x") == 750 << 30
    assert StoreOptions.from_any(None) == StoreOptions() == StoreOptions.from_any(False)
    for wrong in ({"cahce": {}}, {"cache": {"limit": 1}}, {"parquet": {"rg_cache": {"size": 1}}}):
        with pytest.raises(UnknownOptionError):
            StoreOptions.from_any(wrong)
    for bad in (
        {"cache": {"limit_bytes": "much"}},
        {"cache": {"limit_bytes": -1}},
        {"cache": 3},
        {"read_block_bytes": 1},
    ):
        with pytest.raises(ConfigError):
            StoreOptions.from_any(bad)
    merged = StoreOptions(cache=CacheOptions(root="/x")).merge(StoreOptions.from_any({"cache": {"limit_bytes": 5}}))
    assert (merged.cache.root, merged.cache.limit_bytes) == ("/x", 5)


@given(st.lists(st.integers(0, 12), max_size=30))
def test_sorted_runs_cover_the_rows(values: list[int]) -> None:
    rows = np.array(values, np.int64)
    runs, order = sorted_runs(rows)
    flat = [row for first, stop in runs for row in range(first, stop)]
    assert flat == sorted(values)
    assert [values[i] for i in (order if order is not None else range(len(values)))] == flat
    assert all(a[1] != b[0] for a, b in zip(runs[:-1], runs[1:], strict=True))

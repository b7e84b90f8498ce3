"""What a folder is: which files, in which order, of which format."""

from __future__ import annotations

import os
from collections.abc import Callable
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


def test_what_is_not_there_is_named_with_the_nearest_that_is(tmp_path: Path) -> None:
    _tree(tmp_path, ["train/a.jsonl"])
    with pytest.raises(ConfigError, match=r"dataset 'web': .*/trian does not exist; did you mean '.*/train'\?"):
        Dataset.from_path("web", tmp_path / "trian")
    with pytest.raises(
        FileNotFoundError, match=r"dataset 'web': .*/train/b/c.jsonl does not exist; .*'.*/train' does.*no 'b'"
    ):
        Dataset.from_path("web", tmp_path / "train" / "b" / "c.jsonl")
    with pytest.raises(FileNotFoundError, match=r"dataset 'web': .*/train/x.jsonl does not exist"):
        Dataset.from_files("web", [tmp_path / "train" / "a.jsonl", tmp_path / "train" / "x.jsonl"])
    with pytest.raises(ConfigError, match="the dataset's name comes first, then its path"):
        Dataset.from_path(str(tmp_path), "web")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Dataset.from_path("d", None), "give the path of a folder or file, found None"),  # type: ignore[arg-type]
        (lambda: Dataset.from_path("d", ""), "give the path of a folder or file, found ''"),
        (lambda: Dataset.from_path("d", ["a", "b"]), "for several files there is Dataset.from_files"),  # type: ignore[arg-type]
        (lambda: Dataset.from_path(None, "a"), "a dataset needs a name .*, found None"),  # type: ignore[arg-type]
        (
            lambda: Dataset.from_files("d", "/data/a.jsonl"),
            "from_files takes a list of paths, found one: '/data/a.jsonl'",
        ),
        (lambda: Dataset.from_files("d", [3]), "give the path of a folder or file, found 3"),  # type: ignore[list-item]
        (lambda: Dataset.from_dict("d", [{"x": 1}]), r"from_dict takes .*, found a list .*write \{0: InMemoryShard"),  # type: ignore[arg-type]
        (lambda: Dataset.from_dict("d", {0: [{"x": 1}]}), r"shard 0 is a list.*wrap its rows"),  # type: ignore[dict-item]
        (lambda: Dataset.from_dict(3, {}), "a dataset needs a name .*, found 3"),  # type: ignore[arg-type]
        (lambda: InMemoryShard("rows"), "InMemoryShard takes a list of rows, found a str"),
        (lambda: InMemoryShard(None), "InMemoryShard takes a list of rows, found a NoneType"),  # type: ignore[arg-type]
        (lambda: InMemoryShard({"x": 1}), "InMemoryShard takes a list of rows, found a dict"),  # type: ignore[arg-type]
    ],
)
def test_what_a_newcomer_gives_instead(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_it_says_what_it_is() -> None:
    shard = InMemoryShard([{"x": 1}] * 3)
    assert repr(shard) == "InMemoryShard(3 rows)"
    assert repr(Dataset.from_dict("d", {0: shard})) == "Dataset('d', memory, 1 shards, 3 rows)"


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


def test_no_file_of_a_list_is_left_out(tmp_path: Path) -> None:
    _tree(tmp_path, ["a.jsonl", "b.txt", "c.txt", "index.json", "stats.json"])
    pq.write_table(pa.table({"text": ["p"]}), tmp_path / "d.parquet")

    def made(*names: str, fmt: str | None = None) -> Dataset:
        return Dataset.from_files("d", [tmp_path / name for name in names], fmt)

    with pytest.raises(ConfigError, match=r"'b.txt' of .* is not of a known format.*needs fmt="):
        made("a.jsonl", "b.txt")
    with pytest.raises(ConfigError, match=r"'d.parquet' of .* is not jsonl"):
        made("a.jsonl", "d.parquet", fmt="jsonl")
    with pytest.raises(ConfigError, match="several formats"):
        made("a.jsonl", "d.parquet")
    assert made("a.jsonl", "b.txt", "c.txt", fmt="jsonl").total() == 3
    assert made("a.jsonl", "index.json", "stats.json").total() == 3


@pytest.mark.parametrize("name", ["b.jsonl.lz4", "b.JSONL.zip", "b.parquet.gz", "b.npy.zst"])
@pytest.mark.parametrize("fmt", [None, "jsonl"])
def test_a_shard_of_an_unknown_compression_is_not_left_out(tmp_path: Path, name: str, fmt: str | None) -> None:
    _tree(tmp_path, ["a.jsonl", name])
    with pytest.raises(ConfigError, match=rf"{name}.* is compressed in a way that is not read"):
        Dataset.from_path("d", tmp_path, fmt)


@pytest.mark.parametrize("link", ["b.jsonl", "more"])
def test_a_broken_link_is_not_left_out(tmp_path: Path, link: str) -> None:
    _tree(tmp_path, ["a.jsonl"])
    (tmp_path / link).symlink_to("gone")
    with pytest.raises(ConfigError, match=rf"{link} is a link to 'gone', which is not there"):
        Dataset.from_path("d", tmp_path)


def test_what_may_be_an_unfinished_shard_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _tree(tmp_path, ["a.jsonl", "README.md", "_SUCCESS", "a.jsonl.md5", "._x.jsonl"])
    assert Dataset.from_path("d", tmp_path).shard_names == ("a.jsonl",)
    assert not caplog.messages
    _tree(tmp_path, ["b.jsonl.tmp", "c.jsonl.gz.6eF4c2A1"])
    assert Dataset.from_path("d", tmp_path).shard_names == ("a.jsonl",)
    assert "2 files that are left out by their names" in caplog.messages[0]
    assert "b.jsonl.tmp, c.jsonl.gz.6eF4c2A1" in caplog.messages[0]


def test_a_pattern_is_not_a_path(tmp_path: Path) -> None:
    _tree(tmp_path, ["a.jsonl"])
    with pytest.raises(ConfigError, match=r"\*.jsonl does not exist; patterns are not filled in.*glob\.glob"):
        Dataset.from_path("d", tmp_path / "*.jsonl")


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
    (tmp_path / "c.npy").write_bytes(whole * 2)
    with pytest.raises(
        FormatError, match=rf"c\.npy has {2 * len(whole)} bytes and its array ends at byte {len(whole)}"
    ):
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

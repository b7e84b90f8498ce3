"""Notes in the cache folder: kept whole, and never in the way."""

from __future__ import annotations

from pathlib import Path

from headrace.io.notes import Notes
from headrace.io.options import CacheOptions, StoreOptions


def notes(folder: Path) -> Notes:
    return Notes("facts", StoreOptions(cache=CacheOptions(root=str(folder))))


def test_a_note_is_there_for_the_next_process(tmp_path: Path) -> None:
    assert notes(tmp_path).get("a") is None
    notes(tmp_path).put("a", b"one")
    notes(tmp_path).put("a", b"two")
    assert notes(tmp_path).get("a") == b"two"
    assert [path.name for path in (tmp_path / "facts").iterdir()] == ["a"]


def test_a_folder_that_cannot_be_used_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    beside = notes(tmp_path / "file")
    beside.put("a", b"one")
    assert beside.get("a") is None


def test_what_is_too_large_for_a_note_is_none(tmp_path: Path) -> None:
    notes(tmp_path).put("a", b"x" * (1 << 20))
    assert notes(tmp_path).get("a") is None

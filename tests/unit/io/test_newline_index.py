"""The index of row starts: compact, exact beyond 4 GiB, and bounded in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.io.newline_index import NewlineIndex, read_index, write_index


def _index(path: Path, chunks: Iterator[bytes]) -> NewlineIndex:
    with path.open("wb") as out:
        write_index(chunks, out, lambda: (0, 0))
    index = read_index(str(path))
    assert index is not None
    return index


def test_four_bytes_a_row(tmp_path: Path) -> None:
    index = _index(tmp_path / "i", iter([b'{"a": 1}\n' * 100_000]))
    assert index.rows == 100_000
    assert (tmp_path / "i").stat().st_size < 4 * 100_000 + 200
    assert index.starts(np.array([0, 1, 99_999])).tolist() == [0, 9, 899_991]
    assert index.data_end == 900_000


def test_offsets_beyond_four_gigabytes() -> None:
    starts = np.array([0, 100, (1 << 32) - 1, 1 << 32, (1 << 32) + 5, (5 << 32) + 1, (5 << 32) + 9], np.int64)
    wraps = np.searchsorted(starts, np.arange(1, 6) << 32)
    none = np.empty(0, np.int64)
    index = NewlineIndex((starts & 0xFFFFFFFF).astype(np.uint32), wraps, none, none, 0, 0, True)
    assert index.starts(np.arange(7)).tolist() == starts.tolist()
    assert [index.start(row) for row in range(7)] == starts.tolist()


@pytest.mark.slow
def test_a_line_of_more_than_four_gigabytes(tmp_path: Path) -> None:
    filler = b"x" * (64 << 20)

    def chunks() -> Iterator[bytes]:
        yield b"{}\n{}\n"
        for _ in range(130):  # 8.1 GiB: two wraps within one line
            yield filler
        yield b"\n{}\n{}"

    index = _index(tmp_path / "i", chunks())
    end = 6 + 130 * (64 << 20)
    assert index.starts(np.arange(6)).tolist() == [0, 3, 6, end + 1, end + 4, end + 6]
    assert index.odd.tolist() == [2]
    assert not index.ends_in_newline


def test_lines_are_numbered_as_an_editor_does(tmp_path: Path) -> None:
    index = _index(tmp_path / "i", iter([b"\n{}\n\n \t\n{}\n{}\n\n"]))
    assert [index.line(row) for row in range(3)] == [2, 5, 6]
    assert index.blanks.tolist() == [0, 1, 1, 3]
    assert index.is_plain(0, 3)


def test_odd_rows_are_found(tmp_path: Path) -> None:
    lines = [b"{}", b"[1]", b"{} {", b" {} ", b"{}}", b'"s"', b"{}\r", b"\xef\xbb\xbf{}", b"{"]
    index = _index(tmp_path / "i", iter([b"{}\n" + b"\n".join(lines) + b"\n{}"]))
    assert index.odd.tolist() == [2, 3, 6, 8, 9]
    assert not index.is_plain(1, 3)
    assert index.is_plain(0, 2)
    assert index.is_plain(4, 6)

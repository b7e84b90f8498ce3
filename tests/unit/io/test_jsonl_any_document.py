"""Whatever the documents, line endings, compression and chunking: any rows read equal `json.loads` of their lines."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.block import MISSING
from headrace.io import Dataset
from headrace.io.newline_index import LineScanner

KEYS = st.sampled_from(["text", "id", "a.b", "a", "é", 'long key with "quotes"'])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["\u2028\u2029\x85", "\\n", "line\nbreak\r\n", "}\n{", "", "\x00"]
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=3), max_leaves=6)
DOCUMENTS = st.dictionaries(KEYS, VALUES, max_size=4)
ENDINGS = st.sampled_from([b"\n", b"\r\n", b" \n", b"\t\r\n", b"\n\n", b"\n \t\r\n\r\n"])
COMPRESS = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data, 1),
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
    ".bz2": lambda data: bz2.compress(data),
    ".xz": lambda data: lzma.compress(data, preset=0),
}


@st.composite
def files(draw: st.DrawFn) -> tuple[list[bytes], bytes]:
    """Lines of a file (with some that are only just legal), and its bytes."""
    lines, data = [], b""
    if draw(st.booleans()):
        data += b"\xef\xbb\xbf"
    if draw(st.booleans()):
        data += draw(ENDINGS)
    for document in draw(st.lists(DOCUMENTS, max_size=12)):
        line = json.dumps(document, ensure_ascii=draw(st.booleans())).encode()
        line = draw(st.sampled_from([b"", b" ", b"\t"])) + line
        lines.append(line)
        data += line + draw(ENDINGS)
    if draw(st.booleans()):
        data = data.rstrip(b" \t\r\n")
    return lines, data


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=files(), suffix=st.sampled_from(sorted(COMPRESS)), split=st.booleans(), data=st.data())
def test_reading_equals_json_loads(
    tmp_path: Path, file: tuple[list[bytes], bytes], suffix: str, split: bool, data
) -> None:
    lines, content = file
    path = tmp_path / f"a.jsonl{suffix}"
    for old in tmp_path.glob("a.jsonl*"):
        old.unlink()
    if split and suffix:  # several members, cut anywhere
        at = data.draw(st.integers(0, len(content)))
        path.write_bytes(COMPRESS[suffix](content[:at]) + COMPRESS[suffix](content[at:]))
    else:
        path.write_bytes(COMPRESS[suffix](content))
    dataset = Dataset.from_path("d", path)
    expected = [json.loads(line) for line in lines]
    assert dataset.total() == len(expected)
    if not expected:
        return
    rows = np.array(data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=20)), np.int64)
    reader = dataset.open()
    assert reader.read(0, rows, None) == [expected[r] for r in rows]
    names = frozenset({"text", "a.b", "a"})
    columns: Any = reader.read(0, rows, names)
    for name in names:
        wanted = [expected[r].get(name, MISSING) for r in rows]
        if name == "a.b":
            wanted = [
                expected[r]["a"]["b"]
                if value is MISSING and isinstance(expected[r].get("a"), dict) and "b" in expected[r]["a"]
                else value
                for r, value in zip(rows, wanted, strict=True)
            ]
        got = columns.get(name)
        if got is None:  # no row has the key itself: a block looks the path up
            assert all(name not in expected[r] for r in rows)
        else:
            assert got == wanted


@settings(max_examples=200, deadline=None)
@given(file=files(), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_the_index_does_not_depend_on_chunks(file: tuple[list[bytes], bytes], cuts: list[int]) -> None:
    _, content = file
    whole, pieces = LineScanner(), LineScanner()
    starts = [whole.feed(content)]
    starts.append(whole.finish()[0])
    edges = sorted({0, len(content), *(c for c in cuts if c < len(content))})
    got = [pieces.feed(content[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    got.append(pieces.finish()[0])
    assert np.concatenate(got).tolist() == np.concatenate(starts).tolist()
    assert pieces.blanks == whole.blanks
    assert pieces.rows == whole.rows
    assert set(whole.odd) <= set(pieces.odd)  # a line across chunks is judged more strictly

"""Bytes and digests that other runs, machines and versions rely on. A change here needs a new version number."""

from __future__ import annotations

import io

from headrace.io import Dataset, InMemoryShard
from headrace.io.newline_index import VERSION, write_index

CONTENT = b'\xef\xbb\xbf{"text": "a"}\r\n\n {"text": "b"} \n{"text": \n{"text": "d"}'


def test_the_newline_index_file() -> None:
    out = io.BytesIO()
    write_index([CONTENT[:20], CONTENT[20:]], out, lambda: (len(CONTENT), 1_700_000_000_000_000_000))
    assert VERSION == 1
    assert out.getvalue().hex(" ", 4) == (
        "48524e4c 49445831 03000000 13000000 23000000 2d000000 3a000000 88a77665 7273696f 6e01a472 6f777304 "
        "a473697a 653aa573 74616d70 cf17979c fe362a00 00a6636c 6f736564 c2a57772 617073c4 00a36f64 64c41001 "
        "00000000 00000002 00000000 000000a6 626c616e 6b73c408 01000000 00000000 5c000000 48524e4c 49445831"
    )


def test_a_fingerprint() -> None:
    data = Dataset.from_dict("toy", {3: InMemoryShard([{"x": 1}]), 1: InMemoryShard([{"x": 2}] * 5)})
    assert data.fingerprint() == {
        "name": "toy",
        "format": "memory",
        "shards": 2,
        "rows": 6,
        "shard_names": "917ee4feee93eede79a07a7c69869c94",
        "shard_rows": "903cb7bf196499bc343c1d7366391a39",
    }

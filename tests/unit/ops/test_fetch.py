"""fetch puts the rows of several shards back into the order of the stream."""

from __future__ import annotations

import numpy as np

from headrace.core.block import Block, Origin, Text
from headrace.ops.fetch import interleave


def test_texts_of_several_shards_are_decoded_once_and_bad_bytes_stay_bytes() -> None:
    ids = np.zeros((2, 7), np.int64)
    good = [
        Block(0, Origin(ids), {"text": Text.from_bytes([b"a", b"c"])}),
        Block(0, Origin(ids[:1]), {"text": Text.from_bytes([b"b"])}),
    ]
    assert interleave(good, np.array([0, 2, 1])).column("text") == ["a", "b", "c"]
    bad = [good[0], Block(0, Origin(ids[:1]), {"text": Text.from_bytes([b"\xff"])})]
    column = interleave(bad, np.array([0, 2, 1])).column("text")
    assert isinstance(column, Text) and column.to_bytes() == [b"a", b"\xff", b"c"]


def test_rows_of_one_width_from_several_shards_are_put_in_place() -> None:
    ids = np.zeros((2, 7), np.int64)
    rows = np.arange(6, dtype=np.int32).reshape(3, 2)
    parts = [Block(0, Origin(ids), {"x": rows[[2, 0]]}), Block(0, Origin(ids[:1]), {"x": rows[[1]]})]
    column = interleave(parts, np.array([1, 2, 0])).column("x")
    assert isinstance(column, np.ndarray) and column.dtype == np.int32
    assert column.tolist() == rows.tolist()

"""`batch`: exact sizes, views where possible, and what happens to the rest."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.core.block import Block, Origin, Ragged
from headrace.errors import ConfigError
from headrace.ops.batch import Batch


def rows(n: int, start: int = 0) -> Block:
    ids = np.zeros((n, 7), np.int64)
    ids[:, 2] = np.arange(start, start + n)
    tokens = np.repeat(np.arange(start, start + n, dtype=np.int32)[:, None], 5, axis=1)
    return Block(0, Origin(ids), {"input_ids": tokens})


def test_batches_have_exactly_the_size_and_keep_the_order() -> None:
    accumulator = Batch(8).accumulator(0)
    out = [batch for at in range(0, 100, 7) for batch in accumulator.push(rows(min(7, 100 - at), at))]
    assert [len(b) for b in out] == [8] * 12
    assert [int(v) for b in out for v in b.columns["input_ids"][:, 0]] == list(range(96))


def test_batches_of_one_block_are_views() -> None:
    block = rows(64)
    batches = Batch(8).accumulator(0).push(block)
    assert len(batches) == 8
    assert all(np.shares_memory(b.columns["input_ids"], block.columns["input_ids"]) for b in batches)


def test_the_partial_batch_is_carried_over_a_flush_and_counted_at_the_end() -> None:
    accumulator = Batch(8).accumulator(0)
    accumulator.push(rows(13))
    assert accumulator.flush() == []
    assert len(accumulator.held()) == 5
    assert len(accumulator.push(rows(3, 13))[0]) == 8
    accumulator.push(rows(2, 16))
    (word,) = accumulator.end()
    assert len(word) == 0
    (drop,) = word.drops
    assert (drop.operator, drop.reason, drop.ids[:, 2].tolist(), drop.tokens) == (
        "batch",
        "last partial batch",
        [16, 17],
        10,
    )


def test_with_drop_last_off_a_short_batch_leaves_at_each_flush() -> None:
    accumulator = Batch(8, drop_last=False).accumulator(0)
    accumulator.push(rows(13))
    assert [len(b) for b in accumulator.flush()] == [5]
    accumulator.push(rows(3))
    assert [len(b) for b in accumulator.end()] == [3]
    assert accumulator.end() == []


def test_a_set_smaller_than_one_batch_is_not_lost_in_silence() -> None:
    """B104."""
    accumulator = Batch(100).accumulator(0)
    assert accumulator.push(rows(10)) == []
    assert len(accumulator.end()[0].drops[0].ids) == 10


def test_ragged_rows_of_several_blocks_are_joined() -> None:
    accumulator = Batch(3).accumulator(0)
    parts = [rows(2, at).with_columns({"input_ids": Ragged(np.arange(3), np.array([0, 1, 3]))}) for at in (0, 2)]
    (batch,) = [b for part in parts for b in accumulator.push(part)]
    assert batch.columns["input_ids"].lengths.tolist() == [1, 2, 1]


def test_sizes_below_one_are_an_error() -> None:
    with pytest.raises(ConfigError, match="microbatch_size must be at least 1, found 0"):
        Batch(0)

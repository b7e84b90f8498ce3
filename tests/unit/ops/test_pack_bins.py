"""`pack_flat` with `first_fit` and `best_fit`: placement, padding, and when a bin leaves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.block import Block, Origin, Ragged, concat_blocks
from headrace.errors import CheckpointError, RecordError
from headrace.ops.pack.best_fit import BestFit
from headrace.ops.pack.first_fit import FirstFit
from headrace.ops.pack.flat import PackFlat


def of_lengths(*lengths: int) -> Block:
    """Document `i` is the token `i + 1`, repeated."""
    ids = np.zeros((len(lengths), 7), np.int64)
    ids[:, 2] = np.arange(len(lengths))
    tokens = [np.full(length, number + 1, np.int32) for number, length in enumerate(lengths)]
    return Block(0, Origin(ids), {"input_ids": Ragged.from_rows(tokens)})


def rows(op: PackFlat, *lengths: int) -> list[list[int]]:
    """Documents in each row, in the order in which rows leave."""
    accumulator = op.accumulator(0)
    blocks = [b for b in accumulator.push(of_lengths(*lengths)) + accumulator.end() if len(b)]
    return [b.origin.slice(r, r + 1).ids[:, 2].tolist() for b in blocks for r in range(len(b))]


def test_first_fit_takes_the_first_bin_with_room() -> None:
    assert rows(PackFlat(10, num_bins=3, pad_token_id=0), 6, 7, 4, 3) == [[0, 2], [1, 3]]
    assert rows(PackFlat(10, num_bins=3, pad_token_id=0), 6, 7, 3) == [[0, 2], [1]]


def test_best_fit_takes_the_tightest() -> None:
    assert rows(PackFlat(10, num_bins=3, pad_token_id=0, algorithm="best_fit"), 6, 7, 3) == [[1, 2], [0]]


def test_rows_are_padded_and_say_so() -> None:
    accumulator = PackFlat(6, num_bins=2, pad_token_id=7).accumulator(0)
    (block,) = accumulator.push(of_lengths(2, 3)) + accumulator.end()
    assert block.columns["input_ids"].tolist() == [[1, 1, 2, 2, 2, 7]]
    assert block.columns["positions"].tolist() == [[0, 1, 0, 1, 2, 0]]
    assert block.columns["_padding"].tolist() == [1]
    assert block.origin.spans.tolist() == [[0, 2], [0, 3]]


def test_when_no_bin_has_room_the_oldest_leaves_or_the_fullest() -> None:
    fifo = PackFlat(10, num_bins=2, pad_token_id=0)
    assert rows(fifo, 6, 8, 7, 1) == [[0], [1], [2, 3]]
    fullest = PackFlat(10, num_bins=2, pad_token_id=0, flush_strategy="fullest")
    assert rows(fullest, 6, 8, 7, 1) == [[1], [0, 3], [2]]


def test_a_bin_leaves_when_full_capped_or_nearly_full() -> None:
    accumulator = PackFlat(10, num_bins=4, pad_token_id=0).accumulator(0)
    assert len(accumulator.push(of_lengths(10))) == 1
    capped = PackFlat(10, num_bins=4, pad_token_id=0, max_sequences_per_bin=2).accumulator(0)
    assert len(capped.push(of_lengths(1, 1))) == 1
    nearly = PackFlat(10, num_bins=4, pad_token_id=0, min_sequence_length=3).accumulator(0)
    assert nearly.push(of_lengths(7)) == []
    assert len(nearly.push(of_lengths(8))) == 1


@pytest.mark.parametrize("algorithm", ["first_fit", "best_fit"])
def test_long_and_empty_documents_are_dropped_and_counted(algorithm: str) -> None:
    """B055: lengths 1, L-1, L, L+1 and 10 L."""
    accumulator = PackFlat(8, num_bins=4, pad_token_id=0, algorithm=algorithm).accumulator(0)
    blocks = accumulator.push(of_lengths(1, 7, 0, 8, 9, 80)) + accumulator.end()
    drops = {d.reason: (d.ids[:, 2].tolist(), d.tokens) for b in blocks for d in b.drops}
    assert drops == {"empty document": ([2], 0), "longer than a row": ([4, 5], 89)}
    kept = concat_blocks([b for b in blocks if len(b)]).columns["input_ids"]
    assert np.bincount(kept.reshape(-1), minlength=5)[1:].tolist() == [1, 7, 0, 8]


def test_a_long_document_is_an_error_if_asked() -> None:
    accumulator = PackFlat(8, num_bins=4, pad_token_id=0, drop_oversized=False).accumulator(0)
    with pytest.raises(RecordError, match=r"9 tokens does not fit a row of 8 \(dataset 0, shard 0, row 1\)"):
        accumulator.push(of_lengths(3, 9))
    assert len(accumulator.held()) == 0  # nothing of the block was taken


def test_restoring_other_documents_is_an_error() -> None:
    op = PackFlat(8, num_bins=4, pad_token_id=0)
    accumulator = op.accumulator(0)
    accumulator.push(of_lengths(3, 3, 6))
    with pytest.raises(CheckpointError, match="open rows held 3 documents and 2 were read back"):
        op.accumulator(0).restore(accumulator.state(), of_lengths(3, 3))


def test_best_fit_fills_better_than_first_fit() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 3000).tolist()
    first = len(rows(PackFlat(1024, num_bins=32, pad_token_id=0), *lengths))
    best = len(rows(PackFlat(1024, num_bins=32, pad_token_id=0, algorithm="best_fit"), *lengths))
    assert sum(lengths) / 1024 < best <= first


def test_longest_first_helps_where_the_bins_cover_a_window() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 3000).tolist()
    as_they_come = PackFlat(1024, num_bins=600, pad_token_id=0, algorithm="best_fit")
    longest_first = PackFlat(1024, num_bins=600, pad_token_id=0, algorithm="best_fit", shuffle_strategy="length")
    assert len(rows(longest_first, *lengths)) < len(rows(as_they_come, *lengths))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-1, 20)), max_size=60), st.integers(0, 20))
def test_both_searches_agree_with_a_plain_loop(changes: list[tuple[int, int]], length: int) -> None:
    first, best, plain = FirstFit(7), BestFit(7), [-1] * 7
    for slot, room in changes:
        first.update(slot, room)
        best.update(slot, room)
        plain[slot] = room
    fitting = [slot for slot, room in enumerate(plain) if room >= length]
    assert first.find(length) == (fitting[0] if fitting else -1)
    assert best.find(length) == (min(fitting, key=lambda slot: (plain[slot], slot)) if fitting else -1)

"""`pack_flat(algorithm="best_fit_wrap")`: full rows, few cuts, tokens in their order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.block import Block, Origin, Ragged, concat_blocks
from headrace.errors import CheckpointError
from headrace.ops.pack.flat import PackFlat


def of_lengths(*lengths: int) -> Block:
    ids = np.zeros((len(lengths), 7), np.int64)
    ids[:, 2] = np.arange(len(lengths))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Block(0, Origin(ids), {"input_ids": Ragged(np.arange(1, offsets[-1] + 1, dtype=np.int32), offsets)})


def segments(op: PackFlat, *lengths: int) -> list[list[tuple[int, int, int]]]:
    """Document, first token and tokens of each segment, row by row."""
    accumulator = op.accumulator(0)
    blocks = [b for b in accumulator.push(of_lengths(*lengths)) + accumulator.end() if len(b)]
    rows = concat_blocks(blocks).origin
    assert rows.rows is not None and rows.spans is not None
    every = [(i, a, n) for i, (a, n) in zip(rows.ids[:, 2].tolist(), rows.spans.tolist(), strict=True)]
    return [every[a:b] for a, b in zip(rows.rows[:-1].tolist(), rows.rows[1:].tolist(), strict=True)]


def op(length: int = 10, **parameters: int) -> PackFlat:
    return PackFlat(length, pad_token_id=0, algorithm="best_fit_wrap", **parameters)


def test_full_rows_of_a_long_document_leave_at_once() -> None:
    accumulator = op().accumulator(0)
    (block,) = accumulator.push(of_lengths(25))
    assert block.columns["input_ids"].tolist() == [list(range(1, 11)), list(range(11, 21))]
    assert len(accumulator.held()) == 1


def test_the_longest_that_fits_is_taken_first() -> None:
    assert segments(op(candidate_pool_size=3), 3, 7, 2, 9) == [
        [(3, 0, 9), (2, 0, 1)],
        [(1, 0, 7), (0, 0, 3)],
        [(2, 1, 1)],
    ]


def test_one_that_has_waited_too_long_goes_first() -> None:
    rows = segments(op(candidate_pool_size=3, max_candidate_age=2), 4, 7, 2, 9)
    assert rows[0] == [(0, 0, 4), (2, 0, 2), (1, 0, 4)]


def test_a_cap_limits_the_segments_of_a_row() -> None:
    rows = segments(op(candidate_pool_size=2, max_sequences_per_bin=2), 1, 1, 1, 1, 1)
    assert max(map(len, rows)) == 2


@settings(deadline=None)
@given(st.lists(st.integers(1, 45), max_size=80), st.integers(1, 10))
def test_rows_are_full_and_cut_at_most_once(lengths: list[int], size: int) -> None:
    """Every row but the last is full; a document begins before it continues; each row cuts at most one document."""
    if not lengths:
        return
    rows = segments(op(candidate_pool_size=size), *lengths)
    assert [sum(n for _, _, n in row) for row in rows[:-1]] == [10] * (len(rows) - 1)
    seen = [0] * len(lengths)
    for row in rows:
        for document, start, taken in row:
            assert start == seen[document]
            seen[document] += taken
        assert len({document for document, _, _ in row}) == len(row)
        assert sum(seen[document] < lengths[document] for document, _, _ in row) <= 1
    assert seen == lengths


def test_it_cuts_far_fewer_documents_than_wrap() -> None:
    lengths = np.random.default_rng(1).integers(1, 500, 3000).tolist()
    best = segments(op(1024, candidate_pool_size=256), *lengths)
    wrap = segments(PackFlat(1024, pad_token_id=0, algorithm="wrap"), *lengths)
    assert len(best) == len(wrap)
    cuts = [sum(len(row) for row in rows) - len(lengths) for rows in (best, wrap)]
    assert cuts[0] < 0.6 * cuts[1]


def test_restoring_other_documents_is_an_error() -> None:
    accumulator = op().accumulator(0)
    accumulator.push(of_lengths(3, 4))
    with pytest.raises(CheckpointError, match="the pool held 2 documents and 1 were read back"):
        op().accumulator(0).restore(accumulator.state(), of_lengths(3))

"""`pack_flat(algorithm="wrap")`: cuts, positions, tails, caps, and what becomes of odd documents."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.core.block import Block, Origin, Ragged
from headrace.errors import CheckpointError, ConfigError
from headrace.ops.pack.flat import PackFlat


def documents(*tokens: list[int], dtype: type = np.int32) -> Block:
    ids = np.zeros((len(tokens), 7), np.int64)
    ids[:, 2] = np.arange(len(tokens))
    return Block(0, Origin(ids), {"input_ids": Ragged.from_rows([np.array(t, dtype) for t in tokens])})


def of_lengths(*lengths: int) -> Block:
    ends = np.cumsum([0, *lengths])
    return documents(*[list(range(a + 1, b + 1)) for a, b in zip(ends[:-1], ends[1:], strict=True)])


def pack(op: PackFlat, block: Block) -> tuple[Block | None, list[tuple[str, list[int], int]]]:
    accumulator = op.accumulator(0)
    blocks = accumulator.push(block) + accumulator.end()
    drops = [(d.reason, d.ids[:, 2].tolist(), d.tokens) for b in blocks for d in b.drops]
    full = [b for b in blocks if len(b)]
    from headrace.core.block import concat_blocks

    return (concat_blocks(full) if full else None), drops


def test_the_stream_is_cut_exactly_at_max_length() -> None:
    block, drops = pack(PackFlat(4, algorithm="wrap"), of_lengths(3, 6, 2))
    assert block is not None
    assert block.columns["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert block.columns["positions"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert block.columns["input_ids"].dtype == block.columns["positions"].dtype == np.int32
    assert block.columns["_padding"].tolist() == [0, 0]
    assert block.origin.rows.tolist() == [0, 2, 3]
    assert block.origin.ids[:, 2].tolist() == [0, 1, 1]
    assert block.origin.spans.tolist() == [[0, 3], [0, 1], [1, 4]]
    assert drops == [("tail of a flush", [2], 3)]  # one token of document 1 and all of document 2; 1 began in a row


def test_with_a_pad_token_the_tail_is_a_padded_row() -> None:
    block, drops = pack(PackFlat(4, algorithm="wrap", pad_token_id=99), of_lengths(3, 3))
    assert block is not None
    assert block.columns["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 99, 99]]
    assert block.columns["positions"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]
    assert block.columns["_padding"].tolist() == [0, 2]
    assert block.origin.spans.tolist() == [[0, 3], [0, 1], [1, 2]]
    assert drops == []


@pytest.mark.parametrize("length", [1, 7, 8, 9, 80])
def test_long_documents_are_split_and_lose_nothing(length: int) -> None:
    """B055: lengths 1, L-1, L, L+1 and 10 L."""
    block, drops = pack(PackFlat(8, algorithm="wrap", pad_token_id=0), of_lengths(length, 3, length))
    assert block is not None
    assert drops == []
    kept = block.columns["input_ids"].reshape(-1)
    assert kept[kept > 0].tolist() == list(range(1, 2 * length + 4))


def test_positions_restart_in_the_row_where_a_document_continues() -> None:
    """B052: the rule for a document split over two rows is to count from zero again."""
    block, _ = pack(PackFlat(4, algorithm="wrap"), of_lengths(5, 4, 3))
    assert block is not None
    assert block.columns["positions"].tolist() == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 0, 1, 2]]


def test_empty_documents_are_dropped_and_counted() -> None:
    block, drops = pack(PackFlat(4, algorithm="wrap"), of_lengths(0, 2, 0, 2, 0))
    assert block is not None
    assert block.origin.ids[:, 2].tolist() == [1, 3]
    assert drops == [("empty document", [0, 2, 4], 0)]


def test_nothing_but_empty_documents() -> None:
    block, drops = pack(PackFlat(4, algorithm="wrap", pad_token_id=0), of_lengths(0, 0))
    assert block is None
    assert drops == [("empty document", [0, 1], 0)]


def test_a_cap_closes_rows_early() -> None:
    op = PackFlat(8, algorithm="wrap", max_sequences_per_bin=2, pad_token_id=0)
    block, drops = pack(op, of_lengths(2, 3, 4, 1, 20))
    assert block is not None
    rows = block.columns["input_ids"].tolist()
    assert rows[0] == [1, 2, 3, 4, 5, 0, 0, 0]
    assert rows[1] == [6, 7, 8, 9, 10, 0, 0, 0]
    assert rows[2] == list(range(11, 19))
    assert rows[4] == [27, 28, 29, 30, 0, 0, 0, 0]
    assert np.diff(block.origin.rows).max() == 2
    assert block.columns["_padding"].tolist() == [3, 3, 0, 0, 4]
    assert drops == []


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.uint32, np.int64])
def test_token_ids_are_packed_as_int32(kind: type) -> None:
    block, _ = pack(
        PackFlat(2, algorithm="wrap"), documents([1, 2], [3, 70_000 if kind != np.uint16 else 4], dtype=kind)
    )
    assert block is not None
    assert block.columns["input_ids"].dtype == np.int32


def test_positions_of_very_many_short_segments() -> None:
    """Below a mean length another way of counting is used; both must agree."""
    block, _ = pack(PackFlat(64, algorithm="wrap"), of_lengths(*([1, 2, 3] * 64)))
    assert block is not None
    expected = [0, 0, 1, 0, 1, 2] * 10 + [0, 0, 1, 0]
    assert block.columns["positions"][0].tolist() == expected


def test_tokens_are_copied_once_at_most() -> None:
    """A block that is all whole rows is handed on as it is."""
    source = of_lengths(4, 4, 8)
    block, _ = pack(PackFlat(4, algorithm="wrap"), source)
    assert block is not None
    assert np.shares_memory(block.columns["input_ids"], source.columns["input_ids"].values)


def test_an_open_row_does_not_keep_its_block_alive() -> None:
    accumulator = PackFlat(10, algorithm="wrap").accumulator(0)
    source = of_lengths(9, 9, 9)
    accumulator.push(source)
    (piece,) = accumulator._pieces["input_ids"]
    assert not np.shares_memory(piece, source.columns["input_ids"].values)


def test_restoring_other_tokens_is_an_error() -> None:
    op = PackFlat(10, algorithm="wrap")
    accumulator = op.accumulator(0)
    accumulator.push(of_lengths(12))
    assert accumulator.state()["skip"] == 10
    with pytest.raises(CheckpointError, match="the open row held 2 tokens and 3 were read back"):
        op.accumulator(0).restore(accumulator.state(), of_lengths(13))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"max_length": 0}, "max_length must be at least 1, found 0"),
        ({"algorithm": "worst_fit"}, "unknown algorithm 'worst_fit'"),
        ({"max_sequences_per_bin": 0, "pad_token_id": 0}, "max_sequences_per_bin must be at least 1"),
        ({"min_sequence_length": -1}, "min_sequence_length must not be negative"),
        ({"num_bins": 4}, "num_bins has no meaning for 'wrap'"),
        ({"algorithm": "first_fit", "pad_token_id": 0}, "'first_fit' needs num_bins"),
        ({"algorithm": "first_fit", "pad_token_id": 0, "num_bins": 0}, "num_bins must be at least 1, found 0"),
        ({"algorithm": "best_fit", "num_bins": 4}, "'best_fit' pads rows, so it needs pad_token_id"),
        ({"drop_oversized": True}, "drop_oversized=True has no meaning"),
        ({"max_sequences_per_bin": 3}, "closes rows early, so it needs pad_token_id"),
        ({"candidate_pool_size": 5}, "candidate_pool_size must be at least 1, and is for 'best_fit_wrap' only"),
        (
            {"algorithm": "best_fit_wrap", "pad_token_id": 0, "max_candidate_age": 0},
            "max_candidate_age must be at least 1",
        ),
        ({"algorithm": "best_fit_wrap"}, "'best_fit_wrap' pads rows, so it needs pad_token_id"),
        ({"shuffle_strategy": "sorted"}, "unknown shuffle_strategy 'sorted'"),
        ({"flush_strategy": "lifo"}, "unknown flush_strategy 'lifo'"),
    ],
)
def test_parameters_are_checked_at_once(parameters: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PackFlat(**({"max_length": 8, "algorithm": "wrap"} | parameters))

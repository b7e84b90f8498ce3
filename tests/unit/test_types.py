"""Records as views: lazy, complete, and able to become a block again."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from headrace.core.block import MISSING, Block, Origin, Ragged, Text
from headrace.errors import DataError
from headrace.ops.batch import Batch
from headrace.ops.pack.flat import PackFlat
from headrace.types import (
    ContributorRef,
    SampleBatch,
    SampleCursor,
    SampleMeta,
    SampleRecord,
    block_from_records,
    records_from_block,
)


def documents(lengths: list[int]) -> Block:
    n = len(lengths)
    ids = np.zeros((n, 7), np.int64)
    ids[:, 0], ids[:, 2], ids[:, 3], ids[:, 4], ids[:, 5] = 1, np.arange(n), np.arange(n) % 2, 7, np.arange(n)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Block(3, Origin(ids), {"input_ids": Ragged(np.arange(1, offsets[-1] + 1, dtype=np.int32), offsets)})


def packed(lengths: list[int], **parameters: object) -> Block:
    op = PackFlat(8, **({"algorithm": "wrap", "pad_token_id": 0} | parameters))
    accumulator = op.accumulator(3)
    blocks = accumulator.push(documents(lengths)) + accumulator.end()
    (batch,) = Batch(sum(map(len, blocks))).accumulator(3).push(blocks[0]) if len(blocks) == 1 else [_join(blocks)]
    return batch


def _join(blocks: list[Block]) -> Block:
    from headrace.core.block import concat_blocks

    return concat_blocks(blocks)


def test_cursors_order_by_place_then_lineage() -> None:
    low = SampleCursor(0, 5, (9, 9, 9))
    assert low < low.child(0) < low.child(1) < SampleCursor(0, 6, (0, 0, 0)) < SampleCursor(1, 0, (0, 0, 0))
    assert SampleCursor.from_key(low.child(2).as_key()) == low.child(2)
    assert low.child(2).base_offset == (0, 5)
    with pytest.raises(ValueError, match="counts from 0"):
        low.child(-1)


def test_meta_of_a_plain_record() -> None:
    batch = SampleBatch.from_block(documents([2, 3]))
    meta = batch.records[1].meta
    assert (meta.sample_id, meta.lane_id, meta.chunk_id, meta.chunk_offset) == ((1, 0, 1), 3, 7, 1)
    assert meta.component_sample_counts == {1: 1}
    assert (meta.component_token_counts, meta.lineage, meta.tags) == (None, (), {})
    assert meta.contribution_refs() == (ContributorRef(meta.cursor, True),)
    assert batch.ids == ((1, 0, 0), (1, 0, 1))
    assert batch.lane_ids == (3, 3)
    assert batch.chunk_ids == (7, 7)


def test_meta_tags() -> None:
    meta = SampleMeta((0, 0, 0), 0, 0)
    assert not meta.is_sentinel
    assert meta.with_tombstone().is_sentinel
    assert not meta.with_tombstone().with_tombstone(False).tombstone
    ref = ContributorRef(meta.cursor)
    assert meta.with_contributors([ref]).contributors == (ref,)
    assert meta.with_contributors([ref]).with_contributors(None).tags == {}
    assert meta.child(4).child(1).lineage == (4, 1)
    assert meta.padding_length == 0


def test_meta_of_packed_rows() -> None:
    batch = SampleBatch.from_block(packed([5, 6, 2]))
    first, second = batch.records
    assert first.meta.sample_id == (1, 0, 0)
    assert first.meta.lineage == (0,)
    assert first.meta.component_token_counts == {0: 5, 1: 3}
    assert second.meta.sample_id == (1, 0, 1)
    assert second.meta.lineage == (3,)  # the row begins with the fourth token of the second document
    assert second.meta.component_token_counts == {1: 3, 0: 2}
    assert [ref.cursor.sample_id for ref in second.meta.contributors] == [(1, 0, 1), (1, 0, 2)]
    assert second.meta.padding_length == 3
    assert second.meta.tags["_packing_metadata"] == {
        "num_sequences": 2, "total_length": 5, "packing_efficiency": 0.625, "padding_length": 3
    }  # fmt: skip
    counts = [record.meta.component_sample_counts for record in batch.records]
    assert sum(c.get(0, 0) for c in counts) == 2  # each document once, in the row where it begins
    assert sum(c.get(1, 0) for c in counts) == 1
    assert set(first.payload) == {"input_ids", "positions"}


def test_records_become_the_same_block_again() -> None:
    block = packed([5, 6, 2])
    again = block_from_records(records_from_block(block))
    assert again.lane == block.lane
    assert again.origin.ids.tolist() == block.origin.ids.tolist()
    assert again.origin.spans.tolist() == block.origin.spans.tolist()
    assert again.origin.rows.tolist() == block.origin.rows.tolist()
    assert again.column("_padding").tolist() == block.column("_padding").tolist()
    assert np.array_equal(np.stack(again.column("input_ids")), block.column("input_ids"))


def test_hidden_columns_travel_in_tags() -> None:
    block = documents([2, 3]).with_columns({**documents([2, 3]).columns, "_pad_token_id": np.array([9, 9])})
    records = records_from_block(block)
    assert records[0].meta.tags == {"_pad_token_id": 9}
    assert "_pad_token_id" not in records[0].payload
    assert block_from_records(records).column("_pad_token_id").tolist() == [9, 9]


def test_a_field_of_the_user_may_begin_with_an_underscore() -> None:
    block = documents([2, 3])
    records = records_from_block(block.with_columns({**block.columns, "_id": np.array([4, 5])}))
    assert [record.payload["_id"] for record in records] == [4, 5]


def test_hidden_fields_of_python_payloads_travel_too() -> None:
    rows = packed([5, 6, 2])
    records = records_from_block(rows.with_rows(rows.payloads()))
    assert [record.meta.padding_length for record in records] == [0, 3]
    assert set(records[0].payload) == {"input_ids", "positions"}


def test_records_handed_out_are_the_truth() -> None:
    batch = SampleBatch.from_block(documents([3, 3]))
    before = batch.to_training(dtype=None)["input_ids"]
    batch.records[0].payload = {"input_ids": np.array([7, 7, 7])}
    assert batch.to_training(dtype=None)["input_ids"] == [[7, 7, 7], before[1]]
    assert batch.records is batch.records


def test_a_batch_can_be_made_from_records() -> None:
    records = [SampleRecord(SampleMeta((0, 0, i), 2, 5, i), {"input_ids": [i, i]}) for i in range(3)]
    batch = SampleBatch(records)
    assert len(batch) == 3
    assert batch.ids == ((0, 0, 0), (0, 0, 1), (0, 0, 2))
    assert (batch.lane_ids, batch.chunk_ids) == ((2,) * 3, (5,) * 3)
    assert batch.lineage_paths == ((),) * 3
    assert batch.to_training(dtype=None)["input_ids"] == [[0, 0], [1, 1], [2, 2]]
    assert len(SampleBatch(())) == 0
    assert SampleBatch(()).to_training()["ids"] == []


def test_records_of_two_lanes_are_no_batch() -> None:
    records = [SampleRecord(SampleMeta((0, 0, 0), lane, 0), {}) for lane in (0, 1)]
    with pytest.raises(ValueError, match=r"one lane, found lanes \[0, 1\]"):
        _ = SampleBatch(records).block


def test_a_pickled_batch_leaves_the_rest_of_its_arrays_behind() -> None:
    big = documents([1000] * 200)
    texts = Text.from_bytes([b"x" * 1000] * 200)
    batch = SampleBatch.from_block(big.with_columns({**big.columns, "text": texts}).slice(10, 12))
    data = pickle.dumps(batch)
    assert len(data) < 15_000
    again = pickle.loads(data)
    assert again.ids == batch.ids
    assert again.block.columns["input_ids"][1].tolist() == batch.block.columns["input_ids"][1].tolist()
    assert again.to_training(dtype=None)["texts"] == ["x" * 1000] * 2
    _ = again.records
    assert pickle.loads(pickle.dumps(again)).ids == batch.ids


def test_pieces_of_a_sample_differ_in_lineage() -> None:
    block = documents([2, 2])
    block = block.with_columns(block.columns, block.origin.with_piece(np.array([0, 1])))
    assert SampleBatch.from_block(block).lineage_paths == ((), (1,))


def test_repr_says_what_it_is() -> None:
    assert repr(SampleBatch.from_block(documents([1, 2]))) == "SampleBatch(2 rows, lane 3)"


def test_a_field_of_every_row_is_there_without_records() -> None:
    text = Text.from_bytes([b"a", "\u00e9".encode()])
    rows = Ragged.from_rows([np.array([1, 2]), np.array([3])])
    block = Block(
        0, documents([1, 1]).origin, {"text": text, "ids": rows, "n": np.array([4, 5]), "deep": [{"x": 1}, {}]}
    )
    batch = SampleBatch.from_block(block)
    assert batch.column("text") == ["a", "\u00e9"]
    assert [row.tolist() for row in batch.column("ids")] == [[1, 2], [3]]
    assert batch.column("n") == [4, 5]
    assert batch.column("deep.x") == [1, MISSING]
    assert batch._records is None
    with pytest.raises(DataError, match=r"field 'txt'; they have deep, ids, n, text"):
        batch.column("txt")
    changed = SampleBatch(batch.records)
    changed.records[0].payload["text"] = "b"
    assert changed.column("text") == ["b", "\u00e9"]

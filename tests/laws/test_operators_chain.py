"""Resume through shuffle, packing and batching together: each operator's held rows are rebuilt from source documents."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_streams import cut, find, joined, restored, rows_of, stream

from headrace.core.block import Block, Origin
from headrace.core.op import Accumulator
from headrace.ops.batch import Batch
from headrace.ops.pack.flat import PackFlat
from headrace.ops.shuffle import Shuffle

PACKERS = {
    "wrap": PackFlat(16, algorithm="wrap", pad_token_id=0),
    "first-fit": PackFlat(16, num_bins=3, pad_token_id=0),
    "best-fit-wrap": PackFlat(16, pad_token_id=0, algorithm="best_fit_wrap", candidate_pool_size=5),
    "best-fit": PackFlat(16, num_bins=3, pad_token_id=0, algorithm="best_fit", emit_positions=False),
}
lengths = st.lists(st.integers(0, 40), max_size=60)
cuts = st.lists(st.integers(0, 60), max_size=8)


def push(chain: list[Accumulator], block: Block) -> list[Block]:
    blocks = [block]
    for accumulator in chain:
        blocks = [out for each in blocks for out in accumulator.push(each)]
    return blocks


def end(chain: list[Accumulator]) -> list[Block]:
    out: list[Block] = []
    for number, accumulator in enumerate(chain):
        for block in accumulator.end():
            out += push(chain[number + 1 :], block)
    return out


@pytest.mark.parametrize("packer", PACKERS.values(), ids=list(PACKERS))
@settings(max_examples=30, deadline=None)
@given(lengths=lengths, first=cuts, second=cuts, stops=st.sets(st.integers(0, 8), max_size=3))
def test_a_chain_resumes_exactly(
    packer: PackFlat, lengths: list[int], first: list[int], second: list[int], stops: set[int]
) -> None:
    """Cut one way without a stop, and another way with saves and restores in between: the same batches."""
    whole = stream(lengths)
    ops: list[Any] = [Shuffle(12, seed=2), packer, Batch(3)]
    chain = [op.accumulator(0) for op in ops]
    straight = [b for piece in cut(whole, first) for b in push(chain, piece)] + end(chain)

    def documents(origin: Origin) -> Block:
        return find(whole, origin)

    def packed(origin: Origin) -> Block:
        records = find(whole, Origin(origin.ids))
        return packer.assemble(
            records.with_columns({n: records.column(n) for n in ("input_ids", "loss_mask", "weight")}), origin
        )

    chain = [op.accumulator(0) for op in ops]
    resumed: list[Block] = []
    for number, piece in enumerate(cut(whole, second)):
        resumed += push(chain, piece)
        if number in stops:
            fetches = (documents, documents, packed)
            chain = [restored(op, old, fetch) for op, old, fetch in zip(ops, chain, fetches, strict=True)]
    resumed += end(chain)
    assert [len(b) for b in straight if len(b)] == [len(b) for b in resumed if len(b)]
    assert rows_of(straight) == rows_of(resumed)


@pytest.mark.parametrize("packer", PACKERS.values(), ids=list(PACKERS))
@settings(max_examples=30, deadline=None)
@given(lengths=lengths, backwards=st.booleans())
def test_rows_are_assembled_from_their_segments(packer: PackFlat, lengths: list[int], backwards: bool) -> None:
    """`assemble` gives back exactly the rows that left, in any order of rows and of records."""
    whole = stream(lengths)
    accumulator = packer.accumulator(0)
    blocks = accumulator.push(whole) + accumulator.end()
    if not any(len(b) for b in blocks):
        return
    rows = joined(blocks)
    if backwards:
        import numpy as np

        rows = rows.take(np.arange(len(rows))[::-1])
        whole = whole.take(np.arange(len(whole))[::-1])
    assert rows_of([packer.assemble(whole, rows.origin)]) == rows_of([rows])

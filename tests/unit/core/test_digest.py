"""Digests of batches: blind to how columns are held, not to anything that the training loop sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.block import MISSING, Block, Origin, Ragged, Text, concat_blocks
from headrace.core.digest import MODULUS, RollingDigest, digest_block, digest_value, row_marks, term, with_digests
from headrace.errors import ConfigError
from headrace.types import SampleBatch


def origin(rows: int) -> Origin:
    ids = np.zeros((rows, 7), np.int64)
    ids[:, 2] = np.arange(rows)
    return Origin(ids)


def digest(**columns: Any) -> bytes:
    rows = len(next(iter(columns.values())))
    return digest_block(Block(0, origin(rows), columns)).digest


MATRIX = np.arange(12, dtype=np.int32).reshape(3, 4)
SAME: list[list[Any]] = [
    [MATRIX, Ragged.from_rows(list(MATRIX)), list(MATRIX), MATRIX.copy(order="F"), MATRIX[::1]],
    [Text.from_bytes([b"a", "é".encode(), b""]), ["a", "é", ""]],
    [np.array([1, 2, 3], np.int32), [1, 2, 3], np.array([1, 2, 3], np.uint8), np.array([1, 2, 3], np.int64)],
    [np.array([0.5, 1.0, 2.0], np.float32), [0.5, 1.0, 2.0]],
    [np.array([True, False, True]), [True, False, True]],
    [[{"b": 1, "a": [1, 2]}, None, MISSING], [{"a": [1, 2], "b": 1}, None, MISSING]],
]


@pytest.mark.parametrize("forms", SAME, ids=range(len(SAME)))
def test_the_same_values_held_otherwise(forms: list[Any]) -> None:
    assert len({digest(x=form) for form in forms}) == 1
    parent = [form for form in forms if isinstance(form, (Ragged, Text))]
    for form in parent:  # a slice of something longer
        longer = type(form)(
            np.concatenate([form.values if isinstance(form, Ragged) else form.data] * 2),
            np.concatenate([form.offsets, form.offsets[1:] + form.offsets[-1]]),
        )
        tail = type(form)(longer.values if isinstance(form, Ragged) else longer.data, longer.offsets[3:])
        assert digest(x=tail) == digest(x=form)


def test_different_values_differ() -> None:
    forms: list[Any] = [
        MATRIX,
        MATRIX.astype(np.int64),
        MATRIX + 1,
        MATRIX[:, :3],
        MATRIX.reshape(3, 2, 2),
        Ragged(MATRIX.ravel(), np.array([0, 4, 8, 12]) - np.array([0, 0, 1, 0])),
        ["a", "b", "c"],
        [b"a", b"b", b"c"],
        ["ab", "", "c"],
        [1, 2, 3],
        [1.0, 2.0, 3.0],
        [True, True, True],
        [1, 1, 1],
        [1, 2, MISSING],
        [1, 2, None],
        [1, 2, 2**64 - 1],
        [1, 2, -1],
        [1, 2, 2**70],
        [[1], [2], [3]],
        list(MATRIX.astype(np.float16)),
    ]
    assert len({digest(x=form) for form in forms}) == len(forms)
    assert digest(x=MATRIX, y=MATRIX) != digest(x=MATRIX, z=MATRIX) != digest(x=MATRIX)


def test_field_order_and_absent_fields_do_not_matter() -> None:
    assert digest(x=MATRIX, y=[1, 2, 3]) == digest(y=[1, 2, 3], x=MATRIX)
    assert digest(x=MATRIX, y=[MISSING] * 3) == digest(x=MATRIX)
    rows = [{"x": i, "t": str(i)} for i in range(3)]
    as_rows = digest_block(Block(0, origin(3), None, rows)).digest
    assert as_rows == digest(x=np.arange(3), t=Text.from_bytes([b"0", b"1", b"2"]))
    assert (
        digest_block(Block(0, origin(2), None, [1, 2])).digest != digest_block(Block(0, origin(2), None, [1, 3])).digest
    )


def test_the_origin_counts() -> None:
    moved = origin(3)
    moved.ids[1, 1] = 4
    assert digest_block(Block(0, moved, {"x": MATRIX})).digest != digest(x=MATRIX)
    packed = Origin(origin(3).ids, np.array([0, 1, 3]), np.zeros((3, 2), np.int64))
    found = digest_block(Block(0, packed, {"x": MATRIX[:2]}))
    assert found.digest != digest_block(Block(0, origin(2), {"x": MATRIX[:2]})).digest


def test_each_row_has_a_mark_of_its_own() -> None:
    other = MATRIX.copy()
    other[1, 2] += 1
    a, b = (digest_block(Block(0, origin(3), {"x": m, "y": [1.0, 2.0, 3.0]})) for m in (MATRIX, other))
    assert (row_marks([a]) != row_marks([b])).tolist() == [False, True, False]
    c = digest_block(Block(0, origin(3), {"x": MATRIX, "y": [1.0, 2.0, 4.0]}))
    assert (row_marks([a]) != row_marks([c])).tolist() == [False, False, True]
    nothing = digest_block(Block(0, origin(0), {"x": MATRIX[:0]}))
    value = digest_value(1, origin(1))
    assert row_marks([nothing]).tolist() == [] == row_marks([value]).tolist()
    one = digest_block(Block(0, origin(3), {"x": MATRIX}))
    for batches in ([a, b], [a, one, b], [value, a, nothing], [nothing, value]):
        alone = [mark for batch in batches for mark in row_marks([batch]).tolist()]
        assert row_marks(batches).tolist() == alone


WHOLE = {
    "matrix": np.arange(48, dtype=np.int32).reshape(12, 4),
    "ragged": Ragged(np.arange(30, dtype=np.uint16), np.array([0, 3, 3, 4, 8, 9, 10, 15, 20, 21, 22, 29, 30])),
    "text": Text.from_bytes([b"row %d" % i for i in range(12)]),
    "number": np.arange(12, dtype=np.uint8),
    "flag": np.arange(12) % 3 == 0,
    "score": np.arange(12, dtype=np.float32) / 3,
    "huge": np.arange(12, dtype=np.uint64) + np.uint64(2**63 - 6),  # what kind it is depends on the rows
    "objects": [{"k": i} if i % 5 else f"t{i}" for i in range(12)],  # so it does here
    "tall": Ragged(np.arange(24, dtype=np.float64).reshape(12, 2), np.arange(13)),
}


@given(
    st.sets(st.sampled_from(sorted(WHOLE)), min_size=1),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.booleans(),
)
def test_digests_taken_of_a_block_are_those_of_the_batches_cut_from_it(
    names: set[str], cuts: list[tuple[int, int]], taken: list[bool], shuffled: bool
) -> None:
    """However batches are cut, gathered and joined, from blocks with digests, without, or some of each."""

    def batch(with_them: list[bool]) -> Block:
        block = Block(0, origin(12), {name: WHOLE[name] for name in names})
        sources = {True: with_digests(block), False: block}
        parts = [sources[its].slice(min(cut), max(cut)) for cut, its in zip(cuts, with_them, strict=False)]
        joined = concat_blocks(parts)
        return joined.take(np.arange(len(joined))[::-1].copy()) if shuffled else joined

    a, b = (digest_block(batch(which)) for which in (taken, [False] * 4))
    assert a.digest == b.digest
    assert row_marks([a]).tolist() == row_marks([b]).tolist()


def test_a_block_without_rows_joins_others() -> None:
    block = Block(0, origin(3), {"x": MATRIX})
    nothing = with_digests(Block(0, origin(0), {"x": MATRIX[:0]}))
    joined = concat_blocks([nothing, with_digests(block), with_digests(block).slice(1, 1)])
    assert digest_block(joined).digest == digest_block(block).digest


def test_digests_do_not_outlive_the_values_they_are_of() -> None:
    block = with_digests(Block(0, origin(3), {"x": MATRIX}))
    assert block.digests is not None
    assert block.with_columns({"x": MATRIX + 1}).digests is None
    assert block.with_rows([1, 2, 3]).digests is None
    assert concat_blocks([block, Block(0, origin(1), None, [{"x": 1}])]).digests is None
    taken = digest_block(block)
    before = taken.digest
    MATRIX[0, 0] += 1  # a training loop that writes into its batch
    assert taken.digest == before
    MATRIX[0, 0] -= 1


def test_values_of_user_functions() -> None:
    def of(value: Any) -> bytes:
        return digest_value(value, origin(1)).digest

    tensor = torch.arange(4, dtype=torch.int64)
    values: list[Any] = [
        tensor,
        tensor.numpy(),
        tensor.reshape(2, 2),
        tensor.to(torch.bfloat16),
        tensor.float(),
        {"a": tensor},
        [tensor],
        np.float32(1.5),
        "text",
        None,
        SampleBatch.from_block(Block(0, origin(3), {"x": MATRIX})),
        SampleBatch.from_block(Block(0, origin(3), {"x": MATRIX + 1})),
    ]
    assert len({of(value) for value in values}) == len(values)
    assert of({"b": 1, "a": tensor}) == of({"a": tensor.clone(), "b": 1})
    assert of(torch.arange(8)[::2]) == of(torch.tensor([0, 2, 4, 6]))
    with pytest.raises(ConfigError, match=r"cannot look into a .*Opaque: deliver arrays"):
        of([Opaque()])


class Opaque:
    """Something without canonical bytes."""


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(min_size=16, max_size=16)), max_size=20), st.randoms())
def test_rolling_digests_are_sums_in_any_order(batches: list[tuple[int, bytes]], random: Any) -> None:
    whole, parts = RollingDigest(), [RollingDigest(), RollingDigest()]
    numbered = list(enumerate(batches))
    for j, (lane, value) in numbered:
        whole.add(j, lane, value)
    random.shuffle(numbered)
    for j, (lane, value) in numbered:
        parts[random.randrange(2)].add(j, lane, value)
    assert whole.total == sum(part.total for part in parts) % MODULUS
    assert whole.total == sum(whole.lanes.values()) % MODULUS
    for lane in whole.lanes:
        assert whole.lanes[lane] == sum(part.lanes.get(lane, 0) for part in parts) % MODULUS


def test_a_place_in_the_stream_is_part_of_a_term() -> None:
    assert term(1, b"x" * 16) != term(2, b"x" * 16)

"""Digests of batches: blind to how columns are held, not to anything that the training loop sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.block import MISSING, Block, Origin, Ragged, Text
from headrace.core.digest import MODULUS, RollingDigest, digest_block, digest_value, row_marks, term
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
    assert found.segments is not None and found.segments.tolist() == [1, 2] and found.samples.shape == (3, 3)


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

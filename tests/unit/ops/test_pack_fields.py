"""Which fields are packed: a rule about kinds, never about lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.block import COMPONENT, Block, Origin, Ragged, Text
from headrace.errors import PayloadTypeError, RecordError
from headrace.ops.pack.flat import PackFlat


def records(*payloads: Any) -> Block:
    ids = np.zeros((len(payloads), 7), np.int64)
    ids[:, 1], ids[:, 2] = 4, np.arange(len(payloads))
    return Block(0, Origin(ids), None, list(payloads))


def packed(*payloads: Any, **parameters: Any) -> Block:
    op = PackFlat(4, **({"algorithm": "wrap", "pad_token_id": 0} | parameters))
    accumulator = op.accumulator(0)
    blocks = [b for b in accumulator.push(records(*payloads)) + accumulator.end() if len(b)]
    return blocks[0]


@given(st.integers(0, 9))
def test_text_is_dropped_whatever_its_length(length: int) -> None:
    """B17."""
    block = packed({"input_ids": [1, 2, 3, 4], "text": "x" * length, "tags": ["a"] * length})
    assert set(block.columns) == {"input_ids", "positions", "_padding"}


def test_scalars_mappings_and_none_are_dropped() -> None:
    block = packed({"input_ids": [1, 2, 3, 4], "score": 1.5, "meta": {"a": 1}, "nothing": None, "raw": b"1234"})
    assert set(block.columns) == {"input_ids", "positions", "_padding"}
    columns = {
        "input_ids": Ragged(np.arange(4, dtype=np.int32), np.array([0, 4])),
        "score": np.array([1.0]),
        "text": Text.from_bytes([b"four"]),
    }
    accumulator = PackFlat(4, algorithm="wrap").accumulator(0)
    (block,) = accumulator.push(Block(0, Origin(np.zeros((1, 7), np.int64)), columns))
    assert set(block.columns) == {"input_ids", "positions", "_padding"}


@pytest.mark.parametrize("mask", ["011", 1, [[0], [1]], [None, 1], {"a": 1}], ids=str)
@pytest.mark.parametrize("before", [None, "nothing", []])
def test_a_mask_of_another_kind_is_an_error(mask: Any, before: Any) -> None:
    """B062: without it every label would count."""
    first = {"input_ids": [] if before == [] else [1, 2], "loss_mask": before}
    if before == "nothing":
        first.pop("loss_mask")
    with pytest.raises(
        RecordError, match=r"field 'loss_mask' holds a \w+, and a mask is one number per token .*row 1\)"
    ):
        packed(first, {"input_ids": [1, 2], "loss_mask": mask})


@pytest.mark.parametrize("homogeneity", ["none", "full"])
@pytest.mark.parametrize("empty", [{}, {"loss_mask": None}, {"loss_mask": "none"}, {"more": [1]}], ids=str)
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("one_by_one", [True, False])
def test_an_empty_document_is_asked_for_no_field(
    at: int, empty: dict[str, Any], homogeneity: Any, one_by_one: bool
) -> None:
    """Nor does it depend on blocks: a packer for each domain sees its documents in another order."""
    payloads: list[Any] = [{"input_ids": [1, 2], "loss_mask": [0, 1]} for _ in range(2)]
    payloads.insert(at, {"input_ids": [], **empty})
    block = records(*payloads)
    block.origin.ids[:, COMPONENT] = [1, 0, 1]
    accumulator = PackFlat(4, algorithm="wrap", pad_token_id=0, homogeneity=homogeneity).accumulator(0)
    parts = [block.slice(row, row + 1) for row in range(3)] if one_by_one else [block]
    out = [*(b for part in parts for b in accumulator.push(part)), *accumulator.end()]
    masks = [row for b in out if len(b) for row in b.columns["loss_mask"].tolist()]
    together = homogeneity == "none" or at == 1
    assert masks == ([[0, 1, 0, 1]] if together else [[0, 1, 0, 0]] * 2)
    assert [drop.reason for b in out for drop in b.drops] == ["empty document"]


def test_a_mask_of_none_is_no_mask() -> None:
    block = packed({"input_ids": [1, 2], "loss_mask": None}, {"input_ids": [3, 4], "loss_mask": None})
    assert set(block.columns) == {"input_ids", "positions", "_padding"}


def test_token_ids_of_another_shape_are_named() -> None:
    with pytest.raises(RecordError, match=r"field 'input_ids' holds a ndarray of shape \(1, 3\), and token ids are"):
        packed({"input_ids": np.array([[1, 2, 3]])})
    with pytest.raises(RecordError, match="field 'codes' holds a str, and token ids are"):
        packed({"input_ids": [1], "codes": "abc"}, tokens_field="codes")


def test_aligned_fields_are_packed_alike_and_padded_with_zero() -> None:
    block = packed(
        {"input_ids": [5, 6, 7], "loss_mask": [True, False, True], "weight": np.array([0.5, 1, 2], np.float16)},
        pad_token_id=9,
    )
    assert block.columns["input_ids"].tolist() == [[5, 6, 7, 9]]
    assert block.columns["loss_mask"].tolist() == [[True, False, True, False]]
    assert block.columns["weight"].tolist() == [[0.5, 1, 2, 0]]
    assert block.columns["weight"].dtype == np.float16


def test_another_number_of_values_is_an_error_that_names_the_field() -> None:
    with pytest.raises(RecordError, match=r"field 'loss_mask' has 3 values for 2 tokens \(dataset 0, shard 4, row 1\)"):
        packed({"input_ids": [1], "loss_mask": [1]}, {"input_ids": [1, 2], "loss_mask": [1, 2, 3]})


@pytest.mark.parametrize("name", ["input_ids", "tokens", "token_ids", "ids"])
def test_the_token_field_is_found(name: str) -> None:
    assert packed({name: [1, 2, 3, 4], "zzz": [1, 1, 1, 1]}).columns[name].tolist() == [[1, 2, 3, 4]]


def test_the_token_field_can_be_named() -> None:
    block = packed({"input_ids": [1, 2, 3, 4], "codes": [5, 6, 7, 8]}, tokens_field="codes", pad_token_id=3)
    assert next(iter(block.columns)) == "codes"


@pytest.mark.parametrize(
    ("payloads", "words"),
    [
        (({"text": "abc"},), "no token ids: looked for input_ids or tokens or token_ids or ids, the record has text"),
        (({"input_ids": [1]}, {"text": "abc"}), "field 'input_ids' must hold numbers.* it is missing"),
        (({"input_ids": [1]}, {"input_ids": "ab"}), "field 'input_ids' must hold numbers.* it is a str"),
        (({"input_ids": [1]}, {"input_ids": [1], "loss_mask": [1]}), "'loss_mask' appears in some records only"),
        (({"input_ids": [1], "positions": [0]},), "the record has 'positions' already"),
        (({"input_ids": np.array([1], np.uint16)}, {"input_ids": [1 << 31]}), "is int64 here and int32 in a packed row"),
        (({"input_ids": np.array([1], np.uint16)},), "pad_token_id 4294967296 does not fit the token type int32"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_packed(payloads: tuple[Any, ...], words: str) -> None:
    pad = 1 << 32 if "pad_token_id" in words else 0
    with pytest.raises(RecordError, match=words):
        for payload in payloads[:-1]:
            packed(payload)
        op = PackFlat(4, algorithm="wrap", pad_token_id=pad)
        accumulator = op.accumulator(0)
        for payload in payloads:  # each in its own block
            accumulator.push(records(payload))


@pytest.mark.parametrize("payload", ["text", 7, [1, 2, 3], None])
def test_a_payload_that_is_no_mapping_is_a_type_error(payload: Any) -> None:
    with pytest.raises(PayloadTypeError, match=f"found {type(payload).__name__}"):
        packed(payload)
    with pytest.raises(TypeError):
        packed(payload)


def test_packed_rows_are_not_packed_again() -> None:
    op = PackFlat(4, algorithm="wrap", emit_positions=False)
    (block,) = op.accumulator(0).push(records({"input_ids": [1, 2, 3, 4]}))
    with pytest.raises(RecordError, match="packed already"):
        op.accumulator(0).push(block)


def test_positions_of_the_input_are_kept_if_none_are_made() -> None:
    block = packed({"input_ids": [1, 2, 3, 4], "positions": [2, 3, 4, 5]}, emit_positions=False)
    assert block.columns["positions"].tolist() == [[2, 3, 4, 5]]


def test_types_that_fit_are_converted() -> None:
    accumulator = PackFlat(4, algorithm="wrap").accumulator(0)
    accumulator.push(records({"input_ids": np.array([1, 2], np.int32)}))
    (block,) = accumulator.push(records({"input_ids": [3, 4]}))
    assert block.columns["input_ids"].dtype == np.int32
    assert block.columns["input_ids"].tolist() == [[1, 2, 3, 4]]


def test_an_empty_first_list_does_not_decide_the_type() -> None:
    accumulator = PackFlat(2, algorithm="wrap").accumulator(0)
    accumulator.push(records({"input_ids": [], "weight": []}))
    (block,) = accumulator.push(records({"input_ids": [3, 4], "weight": [1, 2]}))
    assert block.columns["weight"].dtype == np.int64


def test_needs_asks_for_the_token_field_and_what_is_wanted() -> None:
    op = PackFlat(4, algorithm="wrap", tokens_field="codes")
    assert op.needs(None) is None
    assert op.needs(frozenset({"codes", "positions", "loss_mask"})) == {"codes", "loss_mask"}
    assert "input_ids" in (PackFlat(4, algorithm="wrap").needs(frozenset()) or ())


COUNTED = [{"tokens": n, "token_ids": list(range(1, n + 1))} for n in (1, 3, 2)]


def as_columns(payloads: list[dict[str, Any]]) -> Block:
    """As a format of columns reads them."""
    block = records(*payloads)
    ids = Ragged.from_rows([np.array(p["token_ids"]) for p in payloads])
    return block.with_columns({"tokens": np.array([p["tokens"] for p in payloads]), "token_ids": ids})


@pytest.mark.parametrize("form", [as_columns, lambda payloads: records(*payloads)])
@pytest.mark.parametrize(("strategy", "first"), [(None, [1, 1]), ("length", [1, 2])])
def test_a_number_of_tokens_is_not_taken_for_tokens(form: Any, strategy: Any, first: list[int]) -> None:
    op = PackFlat(2, algorithm="wrap", emit_positions=False, shuffle_strategy=strategy)
    accumulator = op.accumulator(0)
    blocks = [*accumulator.push(form(COUNTED)), *accumulator.flush()]
    columns = blocks[0].columns
    assert columns is not None and "token_ids" in columns and columns["token_ids"].tolist()[0] == first


@pytest.mark.parametrize(
    ("column", "kind"), [(np.array([3, 4]), "a int"), (Text.from_bytes([b"ab", b"c"]), "text"), ([3, 4], "a int")]
)
@pytest.mark.parametrize("field", ["auto", "tokens"])
def test_a_token_field_of_another_kind_is_named(column: Any, kind: str, field: str) -> None:
    block = records({}, {}).with_columns({"tokens": column})
    with pytest.raises(RecordError, match=f"field 'tokens' holds {kind}, and token ids are numbers"):
        PackFlat(4, algorithm="wrap", pad_token_id=0, tokens_field=field).accumulator(0).push(block)


def test_a_record_without_tokens_does_not_keep_its_window_from_being_sorted() -> None:
    op = PackFlat(3, algorithm="wrap", shuffle_strategy="length", on_error="skip", emit_positions=False)
    accumulator = op.accumulator(0)
    accumulator.push(records({"input_ids": None}, {"input_ids": [1]}, {"input_ids": [2, 3]}))
    block = accumulator.flush()[0]
    assert block.columns is not None and block.columns["input_ids"].tolist() == [[2, 3, 1]]

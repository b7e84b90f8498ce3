"""`to_training`: every option, with padding and boundaries known by position."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.block import Block, Origin, Ragged, Text, concat_blocks
from headrace.errors import ConfigError, DataError, PayloadTypeError, UnknownOptionError
from headrace.ops.pack.flat import PackFlat
from headrace.run.uneven import masked
from headrace.types import SampleBatch, SampleMeta, SampleRecord


def block(n: int, columns: dict[str, Any], **origin: Any) -> Block:
    ids = np.zeros((n, 7), np.int64)
    ids[:, 2] = np.arange(n)
    return Block(0, Origin(ids), columns)


def packed(*documents: list[int], length: int = 9, masks: list[list[int]] | None = None, **parameters: Any) -> Block:
    columns: dict[str, Any] = {"input_ids": Ragged.from_rows([np.array(d, np.int32) for d in documents])}
    if masks is not None:
        columns["loss_mask"] = Ragged.from_rows([np.array(m, np.uint8) for m in masks])
    op = PackFlat(length, **({"algorithm": "wrap", "pad_token_id": 0} | parameters))
    accumulator = op.accumulator(0)
    blocks = accumulator.push(block(len(documents), columns)) + accumulator.end()
    return concat_blocks([b for b in blocks if len(b)])


def training(rows: Block, **options: Any) -> dict[str, Any]:
    """As numpy, whatever is installed."""
    return {k: _numpy(v) for k, v in SampleBatch.from_block(rows).to_training(**options).items()}


def _numpy(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else value


# ---------------------------------------------------------------------------------------------------
# The worked example: two rows of five tokens and four pads
# ---------------------------------------------------------------------------------------------------


def example() -> Block:
    return concat_blocks([packed([1, 2, 3, 4, 5]), packed([6, 7, 8, 9, 10])])


def test_the_worked_example() -> None:
    out = training(
        example(), return_labels=True, flatten=True, return_cu_seqlens=True, return_loss_mask=True,
        return_padding_mask=True, return_num_valid_tokens=True,
    )  # fmt: skip
    assert out["input_ids"].tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 6, 7, 8, 9, 10, 0, 0, 0]
    assert out["labels"].tolist() == [2, 3, 4, 5, -100, -100, -100, -100, 7, 8, 9, 10, -100, -100, -100, -100]
    assert out["positions"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2] * 2
    assert out["cu_seqlens"].tolist() == [0, 5, 8, 13, 16]
    assert out["max_seqlen"] == 5
    assert out["num_valid_tokens"] == 8
    assert np.flatnonzero(out["padding_mask"]).tolist() == [5, 6, 7, 13, 14, 15]
    assert out["loss_mask"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0] * 2
    assert (out["cu_seqlens"].dtype, out["loss_mask"].dtype) == (np.int32, np.float32)


def test_rows_keep_their_shape_without_flatten() -> None:
    out = training(example(), return_labels=True, return_cu_seqlens=True)
    assert out["input_ids"].shape == out["labels"].shape == out["positions"].shape == (2, 8)
    assert out["cu_seqlens"].tolist() == [[0, 5, 8], [0, 5, 8]]
    assert out["max_seqlen"].tolist() == [5, 5]
    assert out["ids"] == [(0, 0, 0), (0, 0, 0)]
    assert out["texts"] == ["", ""]


def test_rows_with_fewer_segments_are_filled_up_with_the_row_length() -> None:
    rows = packed([1, 2, 3], [4, 5, 6], [7, 8, 9, 10, 11, 12], length=6)
    out = training(rows, return_cu_seqlens=True)
    assert out["cu_seqlens"].tolist() == [[0, 3, 6], [0, 6, 6]]
    assert out["max_seqlen"].tolist() == [3, 6]


# ---------------------------------------------------------------------------------------------------
# Types
# ---------------------------------------------------------------------------------------------------


def test_auto_makes_token_ids_int64_and_leaves_other_fields_alone() -> None:
    columns = {"input_ids": np.ones((2, 4), np.int32), "weight": np.full((2, 4), 0.5, np.float16)}
    out = training(block(2, columns), return_labels=True, extra_fields=("weight",))
    assert out["input_ids"].dtype == out["labels"].dtype == np.int64
    assert out["weight"].dtype == np.float16
    assert out["weight"].tolist() == [[0.5] * 3] * 2
    assert training(example())["positions"].dtype == np.int32


def test_a_type_that_is_asked_for_applies_to_every_stacked_field() -> None:
    torch = pytest.importorskip("torch")
    batch = SampleBatch.from_block(example())
    tensors = batch.to_training(dtype=torch.int32, return_padding_mask=True)
    assert tensors["input_ids"].dtype == tensors["positions"].dtype == torch.int32
    assert tensors["padding_mask"].dtype == torch.bool
    arrays = batch.to_training(dtype=np.int16)
    assert arrays["input_ids"].dtype == arrays["positions"].dtype == np.int16
    assert batch.to_training(dtype="int8")["input_ids"].dtype == np.int8
    lists = batch.to_training(dtype=None, return_labels=True, return_cu_seqlens=True, return_loss_mask=True)
    assert lists["input_ids"][0] == [1, 2, 3, 4, 5, 0, 0, 0]
    assert lists["cu_seqlens"] == [[0, 5, 8], [0, 5, 8]]
    assert lists["max_seqlen"] == [5, 5]
    with pytest.raises(ConfigError, match="dtype 'wide' is neither"):
        batch.to_training(dtype="wide")


def test_auto_gives_tensors_where_torch_is_installed() -> None:
    torch = pytest.importorskip("torch")
    out = SampleBatch.from_block(example()).to_training(return_labels=True)
    assert isinstance(out["input_ids"], torch.Tensor)
    assert out["input_ids"].dtype == torch.int64


def test_results_share_no_memory_with_the_batch() -> None:
    rows = example()
    before = rows.columns["positions"].copy()
    out = training(rows, return_labels=True, dtype=np.int32)
    for name in ("input_ids", "labels", "positions"):
        out[name][:] = 77
    assert (rows.columns["positions"] == before).all()
    assert rows.columns["input_ids"][0, 0] == 1


def test_read_only_arrays_are_no_trouble() -> None:
    tokens = np.ones((2, 4), np.int64)
    tokens.flags.writeable = False
    mask = np.ones((2, 4), np.uint8)
    mask.flags.writeable = False
    out = training(block(2, {"input_ids": tokens, "loss_mask": mask}))
    assert out["loss_mask"].tolist() == [[1] * 4] * 2


def test_torch_is_imported_only_by_a_call_that_gives_tensors() -> None:
    code = (
        "import sys, numpy as np\n"
        "from headrace.core.block import Block, Origin\n"
        "from headrace.types import SampleBatch\n"
        "b = SampleBatch.from_block(Block(0, Origin(np.zeros((1, 7), np.int64)), {'input_ids': np.ones((1, 4), np.int32)}))\n"
        "b.to_training(dtype=np.int64); b.to_training(dtype=None); b.records\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---------------------------------------------------------------------------------------------------
# Masks
# ---------------------------------------------------------------------------------------------------


def test_a_pad_id_equal_to_the_end_id_costs_no_label() -> None:
    """B061: padding is known by length, so true end tokens keep their label."""
    rows = packed([5, 6, 2], [7, 2], length=8, pad_token_id=2)
    out = training(rows, return_labels=True, return_padding_mask=True)
    assert out["labels"].tolist() == [[6, 2, 7, 2, -100, -100, -100]]
    assert out["padding_mask"].tolist() == [[False] * 5 + [True] * 2]


def test_document_boundaries_are_masked_by_position() -> None:
    """B053: [1,2,eos][3,4,eos], and a document of one token."""
    rows = packed([1, 2, 9], [3, 4, 9], [5], [6, 6], length=9)
    plain = training(rows, return_labels=True)["labels"].tolist()
    assert plain == [[2, 9, 3, 4, 9, 5, 6, 6]]
    masked = training(rows, return_labels=True, mask_document_boundaries=True, return_num_valid_tokens=True)
    assert masked["labels"].tolist() == [[2, 9, -100, 4, 9, -100, -100, 6]]
    assert masked["num_valid_tokens"] == 5  # B066: exactly the labels that count


def test_a_document_continued_in_the_next_row_begins_no_boundary_there() -> None:
    rows = packed([1, 2, 3, 4, 5, 6], [7, 8], length=4)
    out = training(rows, return_labels=True, mask_document_boundaries=True)
    assert out["labels"].tolist() == [[2, 3, 4], [6, -100, 8]]


def test_boundaries_are_read_from_positions_where_rows_were_packed_elsewhere() -> None:
    rows = block(1, {"tokens": np.array([[1, 2, 3, 4]]), "positions": np.array([[0, 1, 0, 1]])})
    out = training(rows, return_labels=True, mask_document_boundaries=True, return_document_ids=True)
    assert out["labels"].tolist() == [[2, -100, 4]]
    assert out["document_ids"].tolist() == [[0, 0, 1]]


def test_boundaries_that_nothing_tells_are_an_error() -> None:
    with pytest.raises(DataError, match="carry no document boundaries"):
        training(block(1, {"input_ids": np.ones((1, 4), int)}), return_labels=True, mask_document_boundaries=True)
    rows = block(1, {"input_ids": np.ones((1, 4), int), "positions": np.array([[2, 3, 2, 3]])})
    with pytest.raises(DataError, match="positions begin with 2"):
        training(rows, return_cu_seqlens=True)


def test_document_ids() -> None:
    rows = packed([1, 2], [3, 4, 5], length=7)
    assert training(rows, return_document_ids=True)["document_ids"].tolist() == [[0, 0, 1, 1, 1, -1, -1]]
    two = concat_blocks([packed([1, 2], [3], length=4), packed([4, 5, 6, 7], length=4)])
    flat = training(two, return_document_ids=True, flatten=True)["document_ids"]
    assert flat.tolist() == [0, 0, 1, -1, 2, 2, 2, 2]
    assert flat.dtype == np.int32


def test_the_supervision_mask_rules_out_labels_or_is_returned() -> None:
    rows = packed([1, 2, 3, 4], masks=[[0, 1, 0, 1]], length=4)
    assert training(rows)["loss_mask"].tolist() == [[0, 1, 0, 1]]
    out = training(rows, return_labels=True, return_loss_mask=True)
    assert out["labels"].tolist() == [[2, -100, 4]]
    assert out["loss_mask"].tolist() == [[1, 0, 1]]
    assert "loss_mask" not in training(rows, return_labels=True)


def test_end_tokens_as_inputs_can_be_masked() -> None:
    rows = packed([1, 9, 3, 9], length=4)
    out = training(rows, return_labels=True, eos_mask_loss=True, eos_token_id=9, ignore_index=-1)
    assert out["labels"].tolist() == [[9, -1, 9]]


def test_positions_can_be_replaced() -> None:
    out = training(
        packed([1, 2], [3, 4], length=4), return_labels=True, position_mode="sequence", return_cu_seqlens=True
    )
    assert out["positions"].tolist() == [[0, 1, 2]]
    assert out["cu_seqlens"].tolist() == [[0, 2, 3]]  # from the segments, not from what replaced them


@pytest.mark.parametrize("flatten", [True, False])
def test_padding_is_one_segment_whatever_its_positions(flatten: bool) -> None:
    """Zeros in the positions of padding begin no documents, and a row of padding begins with itself."""
    positions = np.array([[0, 1, 0, 0], [5, 6, 0, 1], [0, 1, 2, 3]])
    rows = block(
        3, {"input_ids": np.ones((3, 4), np.int32), "positions": positions, "_padding": np.array([2, 4, 0], np.int32)}
    )
    out = training(rows, return_cu_seqlens=True, return_document_ids=True, flatten=flatten)
    if flatten:
        assert out["cu_seqlens"].tolist() == [0, 2, 4, 8, 12] and out["max_seqlen"] == 4
        assert out["document_ids"].tolist() == [0, 0, -1, -1, -1, -1, -1, -1, 1, 1, 1, 1]
    else:
        assert out["cu_seqlens"].tolist() == [[0, 2, 4], [0, 4, 4], [0, 4, 4]]
        assert out["max_seqlen"].tolist() == [2, 4, 4]


def test_a_batch_that_only_fills_a_step_has_segments_too() -> None:
    rows = masked(concat_blocks([packed([1, 2], [3], length=4), packed([4, 5, 6, 7], length=4)]), 0)
    out = training(rows, return_cu_seqlens=True, flatten=True, return_labels=True, mask_document_boundaries=True)
    assert out["cu_seqlens"].tolist() == [0, 3, 6] and out["max_seqlen"] == 3
    assert set(out["labels"].tolist()) == {-100}


def test_padding_in_front_is_an_error_where_padding_matters() -> None:
    """B061: its labels would count."""
    mask = np.array([[1, 1, 1, 0], [0, 0, 1, 1]])
    rows = block(2, {"input_ids": np.array([[3, 4, 5, 0], [0, 0, 5, 6]]), "attention_mask": mask})
    with pytest.raises(
        DataError, match=r"'attention_mask' begins with 2 zeros.* \(row 1 of the batch.*pad rows at their end"
    ):
        training(rows, return_labels=True)
    with pytest.raises(DataError, match="begins with 2 zeros"):
        training(rows, return_padding_mask=True)
    assert training(rows)["input_ids"].shape == (2, 4)


def test_masks_and_positions_may_be_arrays_of_python_records() -> None:
    rows = [
        {"input_ids": np.arange(4), "attention_mask": np.array([1, 1, 1, 0]), "positions": np.array([0, 1, 0, 1])}
    ] * 2
    out = records(*rows).to_training(return_labels=True, mask_document_boundaries=True, dtype=None)
    assert out["labels"] == [[1, -100, -100]] * 2


@pytest.mark.parametrize("lacks", [0, 1])
@pytest.mark.parametrize("as_columns", [True, False])
@pytest.mark.parametrize("field", ["loss_mask", "positions", "attention_mask"])
def test_a_mask_that_some_records_lack_is_an_error_whichever_lack_it(field: str, as_columns: bool, lacks: int) -> None:
    """B062: a mask of the second record alone was not read, and all its labels counted."""
    payloads: list[dict[str, Any]] = [{"input_ids": [1, 2, 3], field: [0, 1, 1]} for _ in range(2)]
    del payloads[lacks][field]
    batch = records(*payloads)
    if as_columns:
        batch = SampleBatch.from_block(block(2, batch.block.as_columns()))
    with pytest.raises(DataError, match=rf"field '{field}' is missing \(row {lacks} of the batch"):
        batch.to_training(return_labels=True, dtype=None)


def test_labels_of_the_records_own_are_not_read_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match="own 'labels' are not read.*loss_mask"):
        out = records({"input_ids": [1, 2], "labels": [-100, 2]}).to_training(return_labels=True, dtype=None)
    assert out["labels"] == [[2]]
    own = records({"input_ids": [1, 2], "labels": [-100, 2]}).to_training(extra_fields=("labels",), dtype=None)
    assert own["labels"] == [[-100, 2]]


NOT_IN_THE_TYPE: list[tuple[Any, dict[str, Any], str]] = [
    (np.array([[1, 70000]]), {"dtype": np.int16}, "'input_ids' of row 0.* holds 70000, which does not fit int16"),
    (np.array([[1, 2]]), {"dtype": np.uint16, "return_labels": True, "eos_mask_loss": True, "eos_token_id": 1},
     "'labels' of row 0.* holds -100, which does not fit uint16"),
    (np.array([[1, 2049]]), {"dtype": np.float16}, "holds 2049, which does not fit float16"),
    (np.array([[1, (1 << 53) + 1]]), {"dtype": np.float64}, "which does not fit float64"),
    (np.array([[1, 2]]), {"dtype": np.bool_}, "holds 2, which does not fit bool"),
    (np.array([[1, 1 << 63]], np.uint64), {}, "holds 9223372036854775808, which does not fit int64"),
    (np.array([[1, 1 << 63]], np.uint64), {"return_labels": True}, "which does not fit int64"),
    (np.array([[1.5, 2]]), {}, "holds 1.5, .*token ids are whole numbers"),
    (np.array([[1, np.nan]]), {}, "holds nan, .*token ids are whole numbers"),
    (np.array([[1, np.inf]]), {}, "holds inf, .*token ids are whole numbers"),
    (np.array([[1, 2.0**63]]), {}, "which does not fit int64"),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "options", "words"), NOT_IN_THE_TYPE, ids=lambda value: str(value)[:40])
def test_a_type_that_would_change_a_number_is_an_error(tokens: Any, options: dict[str, Any], words: str) -> None:
    """B007: casts wrap around, round and cut without a word."""
    with pytest.raises(DataError, match=words):
        training(block(1, {"input_ids": tokens}), **options)


def test_types_that_hold_the_numbers_are_given() -> None:
    columns = {
        "input_ids": np.array([[1, 2048, 255]]),
        "weight": np.array([[0.1, 1, 2]]),
        "mask": np.ones((1, 3), bool),
    }
    out = training(block(1, columns), dtype=np.float16, extra_fields=("weight", "mask"))
    assert out["input_ids"].tolist() == [[1, 2048, 255]] and out["weight"].dtype == out["mask"].dtype == np.float16
    with pytest.raises(
        DataError, match=r"'weight' of row 0.*holds 0.1, which does not fit int32; name a floating-point type"
    ):
        training(block(1, columns), dtype=np.int32, extra_fields=("weight",))
    whole = training(block(1, {"input_ids": np.array([[1.0, 2.0**62]])}))
    assert whole["input_ids"].tolist() == [[1, 1 << 62]]


def test_types_of_torch_are_looked_at_as_well() -> None:
    torch = pytest.importorskip("torch")
    small, large = (block(1, {"input_ids": np.array([[1, last]])}) for last in (1, 1001))
    for dtype in (torch.bfloat16, torch.int8, torch.bool):
        assert SampleBatch.from_block(small).to_training(dtype=dtype)["input_ids"].dtype == dtype
        with pytest.raises(DataError, match=f"holds 1001, which does not fit {dtype}"):
            SampleBatch.from_block(large).to_training(dtype=dtype)


def test_a_row_of_nothing_but_padding() -> None:
    rows = block(2, {"input_ids": np.ones((2, 4), np.int32), "_padding": np.array([4, 0])})
    out = training(rows, return_labels=True, return_num_valid_tokens=True, return_padding_mask=True)
    assert out["labels"].tolist() == [[-100] * 3, [1] * 3]
    assert out["num_valid_tokens"] == 3
    assert out["padding_mask"].tolist() == [[True] * 3, [False] * 3]


def test_padding_that_cannot_be_is_an_error() -> None:
    rows = block(1, {"input_ids": np.ones((1, 4), np.int32), "_padding": np.array([5])})
    with pytest.raises(ValueError, match=r"padding length 5 is outside 0\.\.4"):
        training(rows, return_labels=True)


def test_padding_is_known_from_the_segments_where_a_function_left_the_column_out() -> None:
    rows = packed([1, 2, 3], length=5)
    bare = rows.with_columns({"input_ids": rows.columns["input_ids"]})
    assert training(bare, return_labels=True)["labels"].tolist() == [[2, 3, -100, -100]]
    shorter = rows.with_columns({"input_ids": rows.columns["input_ids"][:, :2]})
    assert training(shorter, return_labels=True)["labels"].tolist() == [[2]]


def test_padding_of_a_fixed_width_is_read_from_the_attention_mask() -> None:
    mask = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]], np.uint8)
    rows = block(3, {"input_ids": np.ones((3, 4), np.int32), "attention_mask": mask})
    assert training(rows, return_padding_mask=True)["padding_mask"].sum(axis=1).tolist() == [2, 4, 0]


def test_padding_to_the_longest_of_the_batch() -> None:
    """B019 of the specification: the width is a property of the batch alone."""
    columns = {
        "input_ids": Ragged.from_rows([np.array([1, 2, 3], np.int32), np.array([4], np.int32)]),
        "attention_mask": Ragged.from_rows([np.ones(3, np.uint8), np.ones(1, np.uint8)]),
        "_pad_token_id": np.array([9, 9]),
    }
    out = training(block(2, columns), return_labels=True, extra_fields=("attention_mask",), return_padding_mask=True)
    assert out["input_ids"].tolist() == [[1, 2], [4, 9]]
    assert out["labels"].tolist() == [[2, 3], [-100, -100]]
    assert out["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert out["padding_mask"].tolist() == [[False, False], [False, True]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=10), st.sampled_from(["wrap", "first_fit"]))
def test_labels_are_the_next_token_of_the_same_document_or_ignored(lengths: list[int], algorithm: str) -> None:
    """With boundaries masked, every counted label is the successor of its input inside one document."""
    ends = np.cumsum([0, *lengths])
    documents = [list(range(10 * i + 1000, 10 * i + 1000 + n)) for i, n in enumerate(lengths)]
    bins = {"num_bins": 2} if algorithm == "first_fit" else {}
    rows = packed(*documents, length=12, algorithm=algorithm, **bins)
    out = training(rows, return_labels=True, mask_document_boundaries=True, return_num_valid_tokens=True)
    counted = out["labels"] != -100
    assert (out["labels"][counted] == out["input_ids"][counted] + 1).all()
    assert out["num_valid_tokens"] == counted.sum()
    segments = len(rows.origin.ids)
    assert counted.sum() == ends[-1] - segments  # every token is a label but the first of each segment


# ---------------------------------------------------------------------------------------------------
# Keys, and errors
# ---------------------------------------------------------------------------------------------------


def test_rename_and_exclude() -> None:
    out = training(example(), return_labels=True, rename_fields={"input_ids": "labels", "labels": "input_ids"})
    assert out["labels"][0].tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    out = training(example(), rename_fields={"positions": "position_ids"}, exclude_fields=("texts", "ids", "labels"))
    assert list(out) == ["input_ids", "position_ids"]
    with pytest.raises(ConfigError, match="two keys would be called 'texts'"):
        training(example(), rename_fields={"ids": "texts"})
    with pytest.raises(
        ConfigError, match="rename_fields names 'labels'; the keys are ids, texts, input_ids, positions"
    ):
        training(example(), rename_fields={"labels": "x"})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"return_label": True}, UnknownOptionError, "unknown option of to_training 'return_label'; did you mean 'return_labels'"),
        ({"return_loss_mask": True}, ConfigError, "return_loss_mask=True speaks of labels"),
        ({"return_num_valid_tokens": True}, ConfigError, "pass return_labels=True as well"),
        ({"eos_mask_loss": True, "eos_token_id": 1}, ConfigError, "pass return_labels=True as well"),
        ({"mask_document_boundaries": True}, ConfigError, "pass return_labels=True as well"),
        ({"eos_mask_loss": True, "return_labels": True}, ConfigError, "needs eos_token_id"),
        ({"exclude_fields": "texts"}, TypeError, "found one string"),
        ({"exclude_fields": ("input_idz",)}, ConfigError, "exclude_fields names 'input_idz'; the keys are ids, texts, input_ids"),
        ({"position_mode": "reset"}, ConfigError, "unknown position_mode 'reset'"),
        ({"extra_fields": ("loss_mask",), "return_labels": True}, ConfigError, "take it out of extra_fields"),
        ({"extra_fields": ("input_ids",)}, ConfigError, "'input_ids' would replace a key"),
        ({"extra_fields": ("absent",)}, DataError, "field 'absent' is missing"),
        ({"extra_fields": ("score",)}, DataError, "'score' is an array of shape"),
        ({"extra_fields": ("text",)}, DataError, "'text' is text"),
        ({"extra_fields": ("half",)}, DataError, "'half' has 2 values a row for 4 tokens"),
        ({"tokens_field": "codes"}, DataError, r"no token field \(looked for codes\); the records have half, input_ids"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_an_error(options: dict[str, Any], error: type[Exception], words: str) -> None:
    columns = {
        "input_ids": np.ones((2, 4), np.int32),
        "half": np.ones((2, 2)),
        "score": np.ones(2),
        "text": Text.from_bytes([b"a", b"b"]),
    }
    with pytest.raises(error, match=words):
        training(block(2, columns), **options)


def test_an_end_id_without_effect_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="no effect without eos_mask_loss"):
        training(example(), eos_token_id=3)


def test_rows_of_unequal_length_are_an_error() -> None:
    rows = block(2, {"input_ids": Ragged.from_rows([np.arange(3), np.arange(2)])})
    with pytest.raises(ValueError, match="unequal lengths, 2 and 3"):
        training(rows)


def records(*payloads: Any) -> SampleBatch:
    return SampleBatch([SampleRecord(SampleMeta((0, 0, i), 0, 0, i), p) for i, p in enumerate(payloads)])


def test_payloads_of_python_objects() -> None:
    batch = records(
        {"input_ids": [1, 2], "text": "a", "loss_mask": [0, 1]}, {"input_ids": [3, 4], "text": "b", "loss_mask": [1, 1]}
    )
    out = batch.to_training(dtype=None)
    assert out["input_ids"] == [[1, 2], [3, 4]]
    assert out["texts"] == ["a", "b"]
    assert out["loss_mask"] == [[0, 1], [1, 1]]
    arrays = records(np.array([1, 2]), np.array([3, 4])).to_training(dtype=None)
    assert (arrays["input_ids"], arrays["texts"]) == ([[1, 2], [3, 4]], ["", ""])


def test_payloads_that_cannot_be_read() -> None:
    with pytest.raises(PayloadTypeError, match="row 0 of the batch is a str"):
        records("text").to_training()
    with pytest.raises(TypeError):
        records({"input_ids": [1]}, np.array([1])).to_training()
    with pytest.raises(DataError, match="no token field"):
        records({"text": "abc"}).to_training()
    with pytest.raises(ValueError, match="field 'loss_mask' is missing"):
        records({"input_ids": [1], "loss_mask": [1]}, {"input_ids": [1]}).to_training()
    with pytest.raises(ValueError, match="of shape"):
        records({"input_ids": [[1, 2]]}).to_training()


def test_an_empty_batch() -> None:
    out = SampleBatch(()).to_training(
        return_labels=True, return_cu_seqlens=True, flatten=True, return_num_valid_tokens=True, extra_fields=("w",),
        return_padding_mask=True, return_loss_mask=True, return_document_ids=True, rename_fields={"absent": "x"},
    )  # fmt: skip
    assert out == {
        "ids": [], "texts": [], "input_ids": [], "labels": [], "loss_mask": [], "padding_mask": [], "document_ids": [],
        "num_valid_tokens": 0, "cu_seqlens": [0], "max_seqlen": 0, "w": [],
    }  # fmt: skip

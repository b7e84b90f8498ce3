"""tokenize: the operator on blocks. What goes in, what comes out, and what grouping must not change."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.core.block import Block, Origin, Ragged, Text, concat_blocks, to_list
from headrace.core.op import BadRows
from headrace.core.tokens import PIECE_BITS
from headrace.errors import ConfigError
from headrace.ops.tokenize import Tokenize

SMALL = Path(__file__).parents[2] / "golden" / "tokenizers" / "small"
BOS, EOS, PAD = 0, 1, 2
REFERENCE = Tokenizer.from_file(str(SMALL / "tokenizer.json"))
REFERENCE.encode_special_tokens = True
TEXTS = [
    "hello world",
    "",
    "def f(x):\n    return x\n",
    "caf\u00e9 \u4e2d\u6587",
    "one two three four five six seven",
    "a",
]


def ids_of(text: str) -> list[int]:
    return REFERENCE.encode(text, add_special_tokens=False).ids


def origin(n: int, first: int = 0) -> Origin:
    ids = np.zeros((n, 7), np.int64)
    ids[:, 2] = np.arange(first, first + n)
    return Origin(ids)


def text_block(texts: list[str]) -> Block:
    return Block(0, origin(len(texts)), {"text": Text.from_bytes([t.encode() for t in texts])})


def make(**options: Any) -> Tokenize:
    return Tokenize(tokenizer_id=SMALL, field="text", **{"encoder": "reference", **options})


def run(op: Tokenize, block: Block) -> tuple[Block, BadRows]:
    bad = BadRows()
    return op.worker()(block, bad), bad


def ids(block: Block, name: str = "input_ids") -> list[list[int]]:
    assert block.columns is not None
    return [np.asarray(row).tolist() for row in to_list(block.columns[name])]


# ---------------------------------------------------------------------------------------------------
# What comes out
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["column", "list", "rows", "nested"])
def test_every_form_of_payload_gives_the_same_ids(form: str):
    match form:
        case "column":
            block, field = text_block(TEXTS), "text"
        case "list":
            block, field = Block(0, origin(len(TEXTS)), {"text": list(TEXTS)}), "text"
        case "rows":
            block, field = Block(0, origin(len(TEXTS)), None, [{"text": t, "n": 1} for t in TEXTS]), "text"
        case _:
            block, field = Block(0, origin(len(TEXTS)), {"doc": [{"body": t} for t in TEXTS]}), "doc.body"
    out, bad = run(Tokenize(tokenizer_id=SMALL, field=field, encoder="reference"), block)
    assert not bad.rows
    assert ids(out) == [[BOS, *ids_of(t), EOS] for t in TEXTS]
    assert out.columns is not None
    column = out.columns["input_ids"]
    assert isinstance(column, Ragged)
    assert column.values.dtype == np.int32
    assert ids(out, "attention_mask") == [[1] * (len(ids_of(t)) + 2) for t in TEXTS]
    assert set(out.columns) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    ("mode", "before", "after"),
    [("bos_eos", [0], [1]), ("bos", [0], []), ("eos", [], [1]), ("none", [], []), ("tokenizer_default", [0], [1])],
)
def test_special_token_modes(mode: str, before: list[int], after: list[int]):
    out, _ = run(make(special_tokens=mode, add_attention_mask=False), text_block(TEXTS))
    assert ids(out) == [[*before, *ids_of(t), *after] for t in TEXTS]
    assert list(out.columns or {}) == ["input_ids"]


def test_overrides_take_the_place_of_the_tokenizers_ids():
    out, _ = run(make(bos_token_id=77, eos_token_id=88), text_block(["x"]))
    assert ids(out) == [[77, *ids_of("x"), 88]]


def test_truncation_leaves_room_for_special_tokens_and_counts_what_it_drops():
    out, _ = run(make(truncation=True, max_length=5), text_block(TEXTS))
    assert ids(out) == [[BOS, *ids_of(t)[:3], EOS] for t in TEXTS]
    lost = sum(max(len(ids_of(t)) - 3, 0) for t in TEXTS)
    assert sum(d.tokens for d in out.drops) == lost > 0
    assert {d.reason for d in out.drops} == {"truncated"}


def test_splitting_keeps_every_token_and_numbers_the_pieces():
    out, _ = run(make(split_long_samples=True, max_length=4), text_block(TEXTS))
    whole = [[BOS, *ids_of(t), EOS] for t in TEXTS]
    want = [row[i : i + 4] for row in whole for i in range(0, max(len(row), 1), 4)]
    assert ids(out) == want
    assert [(int(r), int(p)) for r, p in out.origin.ids[:, [2, 6]]] == [
        (row, piece) for row, whole_row in enumerate(whole) for piece in range(-(-len(whole_row) // 4))
    ]
    assert not out.drops


def test_empty_text_under_splitting_is_one_empty_piece():
    out, bad = run(make(split_long_samples=True, max_length=4, special_tokens="none"), text_block(["", "a", ""]))
    assert ids(out) == [[], ids_of("a"), []]
    assert not bad.rows


def test_pieces_of_pieces_have_names_of_their_own():
    block = text_block(["one two three four", "one two three four"])
    block.origin.ids[:, 2] = 0
    block.origin.ids[:, 6] = [0, 1]
    out, _ = run(make(split_long_samples=True, max_length=4), block)
    pieces = out.origin.ids[:, 6].tolist()
    assert len(set(pieces)) == len(pieces)
    assert pieces[0] == 0
    assert 1 << PIECE_BITS in pieces


def test_padding_to_a_fixed_width_masks_by_length_not_by_id():
    op = make(padding="max_length", truncation=True, max_length=8, special_tokens="eos", eos_token_id=PAD)
    out, _ = run(op, text_block(["a", ""]))
    assert out.columns is not None
    values, mask = out.columns["input_ids"], out.columns["attention_mask"]
    assert isinstance(values, np.ndarray)
    assert isinstance(mask, np.ndarray)
    assert values.shape == mask.shape == (2, 8)
    assert values.dtype == np.int32
    row = [*ids_of("a"), PAD]
    assert values.tolist() == [row + [PAD] * (8 - len(row)), [PAD] * 8]
    assert mask.tolist() == [[1] * len(row) + [0] * (8 - len(row)), [1] + [0] * 7]


def test_a_row_too_long_for_a_fixed_width_is_reported_not_cut():
    out, bad = run(make(padding="max_length", max_length=5), text_block(["a", "one two three four five", "a"]))
    assert bad.rows == [1]
    assert "truncation=True" in str(bad.errors[0])
    assert len(out) == 2
    assert out.origin.ids[:, 2].tolist() == [0, 2]


def test_longest_padding_is_left_to_the_batch():
    padded, _ = run(make(padding="longest"), text_block(TEXTS))
    plain, _ = run(make(), text_block(TEXTS))
    assert ids(padded) == ids(plain)


def test_upstream_payload_is_kept_and_repeated_for_pieces():
    block = Block(0, origin(2), {"text": ["one two three four", "b"], "url": ["u", "v"], "input_ids": [1, 2]})
    out, _ = run(make(preserve_upstream_payload=True, split_long_samples=True, max_length=5), block)
    assert out.columns is not None
    assert out.columns["url"] == ["u"] * (len(out) - 1) + ["v"]
    assert ids(out)[0] == [BOS, *ids_of("one two three four")][:5]


# ---------------------------------------------------------------------------------------------------
# Laws
# ---------------------------------------------------------------------------------------------------

WAYS: list[dict[str, Any]] = [
    {},
    {"truncation": True, "max_length": 6},
    {"split_long_samples": True, "max_length": 5},
    {"padding": "max_length", "max_length": 7, "truncation": True},
    {"padding": "longest"},
    {"special_tokens": "none", "preserve_upstream_payload": True},
]
WORKERS = [make(**way).worker() for way in WAYS]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.text(max_size=40), st.none(), st.integers()), min_size=1, max_size=12), st.data())
def test_cutting_the_stream_elsewhere_changes_nothing(values: list[Any], data: st.DataObject):
    worker = data.draw(st.sampled_from(WORKERS))
    block = Block(0, origin(len(values)), {"text": values})
    cuts = sorted(data.draw(st.sets(st.integers(1, len(values)), max_size=3)) | {0, len(values)})
    whole_bad = BadRows()
    whole = worker(block, whole_bad)
    parts, bad = [], []
    for a, b in zip(cuts[:-1], cuts[1:], strict=True):
        part_bad = BadRows()
        parts.append(worker(block.slice(a, b), part_bad))
        bad += [a + row for row in part_bad.rows]
    joined = concat_blocks(parts)
    assert ids(joined) == ids(whole)
    assert joined.origin.ids.tolist() == whole.origin.ids.tolist()
    assert sorted(bad) == sorted(whole_bad.rows)
    assert sum(d.tokens for d in joined.drops) == sum(d.tokens for d in whole.drops)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(max_size=60), min_size=1, max_size=8), st.integers(3, 9))
def test_tokens_in_are_tokens_out_and_counted_drops(texts: list[str], width: int):
    texts = [t.encode("utf-8", "ignore").decode() for t in texts]
    total = sum(len(ids_of(t)) for t in texts)
    split, _ = run(make(split_long_samples=True, max_length=width, special_tokens="none"), text_block(texts))
    assert [i for row in ids(split) for i in row] == [i for t in texts for i in ids_of(t)]
    cut, _ = run(make(truncation=True, max_length=width, special_tokens="none"), text_block(texts))
    assert sum(map(len, ids(cut))) + sum(d.tokens for d in cut.drops) == total


def test_an_empty_block_gives_an_empty_block():
    for worker in WORKERS:
        out = worker(text_block([]), BadRows())
        assert len(out) == 0
        assert "input_ids" in (out.columns or {})


def test_a_sliced_block_gives_the_ids_of_its_rows():
    out, _ = run(make(), text_block(TEXTS).slice(2, 5))
    assert ids(out) == [[BOS, *ids_of(t), EOS] for t in TEXTS[2:5]]


def test_prepared_operator_travels_and_agrees():
    ready = make(encoder="auto").prepare(text_block(TEXTS))
    there = pickle.loads(pickle.dumps(ready))
    assert there.describe() == ready.describe()
    assert ids(run(there, text_block(TEXTS))[0]) == ids(run(ready, text_block(TEXTS))[0])


# ---------------------------------------------------------------------------------------------------
# Bad rows
# ---------------------------------------------------------------------------------------------------


def test_bad_rows_are_reported_with_the_fields_that_exist():
    rows = [{"text": "ok"}, {}, {"text": None}, {"text": 5}, "just a string", [1, 2], {"body": "x"}, {"text": "ok"}]
    out, bad = run(make(), Block(0, origin(len(rows)), None, rows))
    assert bad.rows == [1, 2, 3, 4, 5, 6]
    assert out.origin.ids[:, 2].tolist() == [0, 7]
    messages = [str(e) for e in bad.errors]
    for message, part in zip(messages, ["no fields", "null", "int (5)", "a str", "a list", "body"], strict=True):
        assert part in message, message
    assert all("'text'" in m for m in messages)


def test_missing_field_can_mean_empty_but_a_number_never_does():
    rows = [{}, {"text": None}, {"text": 5}, "just a string"]
    out, bad = run(make(missing_field="empty"), Block(0, origin(4), None, rows))
    assert ids(out) == [[BOS, EOS], [BOS, EOS]]
    assert bad.rows == [2, 3]


def test_lone_surrogates_and_broken_utf8_are_reported_and_cost_no_neighbour():
    out, bad = run(make(), Block(0, origin(3), {"text": ["a", "b\ud800c", "d"]}))
    assert bad.rows == [1]
    assert "U+D800" in str(bad.errors[0])
    assert ids(out) == [[BOS, *ids_of("a"), EOS], [BOS, *ids_of("d"), EOS]]
    out, bad = run(make(), Block(0, origin(2), {"text": Text.from_bytes([b"a\xff", b"d"])}))
    assert bad.rows == [0]
    assert "0xff" in str(bad.errors[0])
    assert ids(out) == [[BOS, *ids_of("d"), EOS]]


def test_bytes_count_as_utf8_text():
    out, bad = run(make(), Block(0, origin(2), {"text": ["caf\u00e9".encode(), "x"]}))
    assert not bad.rows
    assert ids(out)[0] == [BOS, *ids_of("caf\u00e9"), EOS]


def test_a_wrong_field_name_fails_before_the_run():
    with pytest.raises(ConfigError, match=r"none of 6 sampled records has it.*the record has: text"):
        Tokenize(tokenizer_id=SMALL, field="txet").prepare(text_block(TEXTS))


# ---------------------------------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"special_tokens": "both"}, "special_tokens"),
        ({"missing_field": "skip"}, "missing_field"),
        ({"padding": "shortest"}, "padding"),
        ({"truncation": "left"}, "truncation"),
        ({"return_tensors": "jax"}, "return_tensors"),
        ({"encoder": "quick"}, "encoder"),
        ({"split_long_samples": True, "truncation": True, "max_length": 8}, "one of them"),
        ({"split_long_samples": True}, "max_length"),
        ({"padding": "max_length"}, "max_length"),
        ({"truncation": True}, "max_length"),
        ({"truncation": True, "max_length": 2}, "no room"),
        ({"truncation": True, "max_length": 0, "special_tokens": "none"}, "positive"),
        ({"bos_token_id": 1, "special_tokens": "none"}, "no effect"),
        ({"eos_token_id": 1, "special_tokens": "tokenizer_default"}, "no effect"),
        ({"eos_token_id": -1}, "not a token id"),
        ({"bos_token_id": 2**31}, "not a token id: a number from 0 to 2147483647"),
        ({"use_fast": False}, "use_fast"),
        ({"field": ""}, "field"),
        ({"tokenizer": len}, "exactly one"),
    ],
)
def test_wrong_settings_fail_where_they_are_made(options: dict[str, Any], part: str):
    with pytest.raises(ValueError, match=part):
        Tokenize(**{"tokenizer_id": SMALL, "field": "text", **options})


@pytest.mark.parametrize(
    "ids", [[5, 2**40 + 97], np.array([2**32 + 1], np.uint64), [-(2**31) - 1]], ids=["int", "uint64", "low"]
)
def test_ids_that_are_no_int32_are_refused(ids: Any):
    with pytest.raises(ConfigError, match=r"returned the id .* for a text; ids are int32"):
        run(Tokenize(tokenizer=lambda text: ids, field="text", special_tokens="none"), text_block(["a"]))


def test_one_kind_of_padding_has_one_description():
    def described(padding: Any, **settings: Any) -> Any:
        return make(padding=padding, **settings).describe()

    assert described(False) == described("do_not_pad") != described(True)
    assert described(True) == described("longest") != described("longest", eos_token_id=7)


def test_a_length_that_nothing_uses_is_said():
    with pytest.warns(UserWarning, match="does nothing"):
        make(max_length=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(max_length=10, truncation=True)


def test_default_specials_also_need_room():
    with pytest.raises(ConfigError, match="no room"):
        make(special_tokens="tokenizer_default", truncation=True, max_length=2).prepare()


def test_making_the_operator_loads_nothing():
    op = Tokenize(tokenizer_id="/no/such/folder", field="text")
    assert "not settled" in op.summary()
    with pytest.raises(ConfigError, match="no such file or folder"):
        op.prepare()


def test_needs_what_it_reads_and_what_it_keeps():
    op = Tokenize(tokenizer_id=SMALL, field="doc.body")
    assert op.needs(frozenset({"url"})) == {"doc", "doc.body"}
    kept = Tokenize(tokenizer_id=SMALL, field="text", preserve_upstream_payload=True)
    assert kept.needs(frozenset({"url", "input_ids"})) == {"url", "text"}
    assert kept.needs(None) is None


def test_description_holds_data_and_no_settings():
    assert make(encoder="fast").describe() == make(encoder="reference", return_tensors="pt").describe()
    base = make().describe()
    for change in (
        {"special_tokens": "eos"},
        {"eos_token_id": 9},
        {"truncation": True, "max_length": 9},
        {"allow_special": True},
        {"missing_field": "empty"},
    ):
        assert make(**change).describe() != base, change

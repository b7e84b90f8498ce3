"""Make the small tokenizer of the tests and its golden ids (run once; the results are committed).

    python tests/golden/tokenizers/make.py

A byte-level BPE of 700 tokens, trained on the documentation strings of Python's standard library, with a begin, an end, a
padding and a chat token, a non-special added token, and a post-processor that puts begin and end ids around a text.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
SPECIALS = ["<|bos|>", "<|eos|>", "<|pad|>", "<|user|>"]


def train(texts: list[str], size: int = 700) -> Tokenizer:
    """The tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>",
        pair="$A $B",
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in SPECIALS[:2]],
    )
    return tokenizer


if __name__ == "__main__":
    import argparse
    import asyncio
    import decimal
    import tokenize
    import typing

    from headrace.ops.tokenizer.hard import hard_strings

    modules = (argparse, asyncio, decimal, tokenize, typing, json)
    tokenizer = train([Path(m.__file__ or "").read_text(encoding="utf-8") for m in modules])
    folder = HERE / "small"
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, "pad_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer.encode_special_tokens = True
    texts = hard_strings([t.content for t in tokenizer.get_added_tokens_decoder().values()])
    golden = [[text, tokenizer.encode(text, add_special_tokens=False).ids] for text in texts if len(text) < 600]
    lines = ",\n".join(json.dumps(pair) for pair in golden)
    (folder / "golden.json").write_text(
        f'{{"made_with": "tokenizers {tokenizers.__version__}", "cases": [\n{lines}\n]}}\n'
    )

"""Tokenizers: one seam, a reference behind it, and a fast path that has to prove itself.

    seam.py            Tokenizer, Encoder, SpecialIds: what the rest of headrace knows
    files.py           tokenizer.json and its neighbours, from a folder, a file or a hub id
    load.py            whatever the user passed becomes a Tokenizer
    json_tokenizer.py  a tokenizer.json as a Tokenizer: identity by content, special ids
    foreign.py         a user's own object or function as a Tokenizer
    reference.py       encoding with `tokenizers`, the library that defines what is right (its only import)
    fast_fastokens.py  encoding with `fastokens`, 20 to 40 times faster (its only import)
    fast_gigatoken.py  encoding with `gigatoken`, as fast, for tokenizers that the other refuses (its only import)
    hard.py            strings on which tokenizers are known to differ
    gate.py            which of them a run may use, decided on the user's own text
    guard.py           the fast path while it runs: bounded memory, fallback
    texts.py           the texts of a block's field, and the rows that have none
    rows.py            special ids, truncation, splitting and padding on flat ids and offsets

Fast and reference give equal ids or the reference is used; no caller can tell from the data which one ran.
"""

from headrace.ops.tokenizer.gate import EncoderChoice, choose_encoder
from headrace.ops.tokenizer.load import load_tokenizer
from headrace.ops.tokenizer.seam import Encoder, SpecialIds, Tokenizer

__all__ = ["Encoder", "EncoderChoice", "SpecialIds", "Tokenizer", "choose_encoder", "load_tokenizer"]

"""Which encoder a run may use, decided before it starts, on the user's own text.

Both encoders encode a sample of the corpus and a set of hard strings. Any difference, error or missing library, and the
reference is used; the reason is kept for explain(). The outcome is computed once, in the parent, and travels to the workers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.core.block import Ragged
from headrace.errors import ConfigError, UnknownOptionError
from headrace.ops.tokenizer.guard import GuardedEncoder
from headrace.ops.tokenizer.hard import hard_strings
from headrace.ops.tokenizer.json_tokenizer import JsonTokenizer
from headrace.ops.tokenizer.seam import Encoder, Tokenizer

Preference = Literal["auto", "reference", "fast"]
SAMPLE_BYTES = 1 << 20
"""The sample stops at so many characters: the reference needs 0.2 s for a million."""


@dataclass(frozen=True)
class EncoderChoice:
    """The outcome of the gate: `name` of the library, and the `reason` in words. Pickles."""

    tokenizer: Tokenizer
    fast: bool
    name: str
    reason: str

    def build(self) -> Encoder:
        """An encoder for one thread."""
        if self.fast and isinstance(self.tokenizer, JsonTokenizer):
            return GuardedEncoder(lambda: _make_fast(self.tokenizer), self.tokenizer.reference)
        return getattr(self.tokenizer, "reference", None) or _Named(self.tokenizer)


@dataclass(frozen=True)
class _Named:
    """A Tokenizer as an Encoder."""

    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        return self.tokenizer.name

    def encode(self, texts: Sequence[str]) -> Ragged:
        return self.tokenizer.encode(texts)


def choose_encoder(tokenizer: Tokenizer, sample: Sequence[str] = (), prefer: Preference = "auto") -> EncoderChoice:
    """The fast encoder if it encodes `sample` and the hard strings to the reference's ids, else the reference.

    `prefer="fast"` makes a refusal a ConfigError; `prefer="reference"` asks nothing. `sample`: about 256 texts of the
    corpus; without any, "auto" stays with the reference.
    """
    if prefer not in ("auto", "reference", "fast"):
        raise UnknownOptionError("encoder", prefer, ("auto", "reference", "fast"))
    if not isinstance(tokenizer, JsonTokenizer):
        return _refused(tokenizer, prefer, tokenizer.name, "a tokenizer object encodes by itself")
    reference = tokenizer.reference.name
    if prefer == "reference":
        return EncoderChoice(tokenizer, False, reference, "asked for")
    if prefer == "auto" and not sample:
        return EncoderChoice(tokenizer, False, reference, "no sample of the corpus to compare encoders on")
    difference = _difference(tokenizer, _capped(sample))
    if isinstance(difference, str):
        return _refused(tokenizer, prefer, reference, difference)
    name, texts = difference
    return EncoderChoice(tokenizer, True, name, f"equal to {reference} on {texts} texts")


def _refused(tokenizer: Tokenizer, prefer: Preference, name: str, why: str) -> EncoderChoice:
    if prefer == "fast":
        raise ConfigError(f"encoder='fast' cannot be used with tokenizer {tokenizer.name}: {why}; use encoder='auto'")
    return EncoderChoice(tokenizer, False, name, why)


def _difference(tokenizer: JsonTokenizer, sample: list[str]) -> str | tuple[str, int]:
    """Why the fast encoder may not be used, or its name and the number of texts on which it agreed."""
    if importlib.util.find_spec("gigatoken") is None:
        return "gigatoken is not installed (pip install gigatoken: 20 to 90 times faster)"
    texts = [*hard_strings(t["content"] for t in tokenizer.added_tokens), *sample]
    try:
        encoder = _make_fast(tokenizer)
        got = encoder.encode(texts)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a Rust panic is a BaseException; any failure means: not this library
        return f"gigatoken cannot use this tokenizer ({type(error).__name__}: {str(error)[:160]})"
    for row, text in enumerate(texts):
        want = tokenizer.reference.encode_one(text)
        if got[row].tolist() != want:
            where = "a hard string" if row < len(texts) - len(sample) else "a text of this corpus"
            return f"{encoder.name} differs from {tokenizer.reference.name} on {where}: {text[:60]!r}"
    return encoder.name, len(texts)


def _capped(sample: Sequence[str]) -> list[str]:
    """Leading texts of the sample up to SAMPLE_BYTES characters, at least one."""
    taken: list[str] = []
    total = 0
    for text in sample:
        taken.append(text)
        total += len(text)
        if total >= SAMPLE_BYTES:
            break
    return taken


def _make_fast(tokenizer: Tokenizer) -> Encoder:
    from headrace.ops.tokenizer.fast import GigatokenEncoder

    assert isinstance(tokenizer, JsonTokenizer)
    return GigatokenEncoder(tokenizer)

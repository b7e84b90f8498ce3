"""Which encoder a run may use, decided before it starts, on the user's own text.

A fast encoder and the reference encode a sample of the corpus and a set of hard strings. Any difference, error or missing
library, and the next fast encoder is tried, and the reference used if none is left; the reason is kept for explain(). The
outcome is computed once, in the parent, and travels to the workers. It is a function of the texts, the tokenizer and the
versions of the libraries, so it can be noted for the next start, which then need not load the reference at all.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import xxhash

from headrace.core.block import Ragged
from headrace.errors import ConfigError, UnknownOptionError
from headrace.ops.tokenizer.guard import GuardedEncoder
from headrace.ops.tokenizer.hard import hard_strings
from headrace.ops.tokenizer.json_tokenizer import JsonTokenizer
from headrace.ops.tokenizer.seam import Encoder, Tokenizer

Preference = Literal["auto", "reference", "fast"]
SAMPLE_CHARACTERS = 1000
"""The gate reads the head of each sample text: many documents say more than much of one, and 256 heads take 0.1 s."""


LOADING = threading.Lock()


class Notebook(Protocol):
    """Keeps what was found out for the next start."""

    def get(self, key: str) -> bytes | None:
        """What was noted."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Note it."""
        ...


class Verdict(msgspec.Struct):
    """What the gate found: `library` is the fast library that passed, or None."""

    name: str
    reason: str
    library: str | None = None


class FastLibrary(NamedTuple):
    """A fast library: the class here that drives it, whether threads may share one, and when it must be made anew."""

    driver: str
    shared: bool
    renew: int | None


FAST: dict[str, FastLibrary] = {
    "fastokens": FastLibrary("fast_fastokens.FastokensEncoder", shared=True, renew=None),
    "gigatoken": FastLibrary("fast_gigatoken.GigatokenEncoder", shared=False, renew=1 << 30),
}
"""By import name, in the order in which they are tried (docs/decisions/0002). gigatoken locks while it encodes, and its cache
of words only grows: 0.6 MB for each MB of words never seen before, 0.2 MB on real text."""


@dataclass(frozen=True)
class EncoderChoice:
    """The outcome of the gate: `name` of the library, and the `reason` in words. Pickles."""

    tokenizer: Tokenizer
    name: str
    reason: str
    library: str | None = None
    """Import name of the fast library, or None for the reference."""
    spare: list[Encoder] = field(default_factory=list, repr=False, compare=False)
    """Encoders at hand in this process: the one that the gate made, or the one that threads share."""

    @property
    def fast(self) -> bool:
        """True if a fast library passed."""
        return self.library is not None

    def build(self) -> Encoder:
        """An encoder for one thread."""
        if self.library is not None and isinstance(self.tokenizer, JsonTokenizer):
            tokenizer = self.tokenizer
            return GuardedEncoder(self._take, self.discard, lambda: tokenizer.reference, FAST[self.library].renew)
        return getattr(self.tokenizer, "reference", self.tokenizer)

    def _take(self) -> Encoder:
        assert self.library is not None
        shared = FAST[self.library].shared
        with LOADING:
            if self.spare:
                return self.spare[-1] if shared else self.spare.pop()
            encoder = _make_fast(self.library, self.tokenizer)
            if shared:
                self.spare.append(encoder)
        return encoder

    def discard(self, encoder: Encoder | None) -> None:
        """Give an encoder that failed to nobody else."""
        with LOADING:
            if encoder in self.spare:
                self.spare.remove(encoder)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "spare": []}


def choose_encoder(
    tokenizer: Tokenizer,
    sample: Sequence[str] = (),
    prefer: Preference = "auto",
    libraries: Sequence[str] = tuple(FAST),
    notes: Notebook | None = None,
) -> EncoderChoice:
    """The first fast encoder that encodes `sample` and the hard strings to the reference's ids, else the reference.

    `prefer="fast"` makes a refusal a ConfigError; `prefer="reference"` asks nothing. `sample`: about 256 texts of the
    corpus; without any, "auto" stays with the reference. `libraries`: which fast ones to try, in order. `notes`: where the
    outcome on these very texts may be known from an earlier start.
    """
    if prefer not in ("auto", "reference", "fast"):
        raise UnknownOptionError("encoder", prefer, ("auto", "reference", "fast"))
    if not isinstance(tokenizer, JsonTokenizer):
        return _refused(tokenizer, prefer, tokenizer.name, "a tokenizer object encodes by itself")
    if prefer == "reference":
        return EncoderChoice(tokenizer, tokenizer.reference.name, "asked for")
    if prefer == "auto" and not sample:
        return EncoderChoice(tokenizer, tokenizer.reference.name, "no sample of the corpus to compare encoders on")
    installed = [library for library in libraries if importlib.util.find_spec(library) is not None]
    if not installed:
        why = f"none of {', '.join(libraries)} is installed (20 to 50 times faster)"
        return _refused(tokenizer, prefer, tokenizer.reference.name, why)
    hard = hard_strings((t["content"] for t in tokenizer.added_tokens), tokenizer.normalizes)
    texts = [*hard, *(text[:SAMPLE_CHARACTERS] for text in sample)]
    key = _key(tokenizer, installed, texts)
    found, encoder = _noted(notes, key), None
    if found is None:
        found, encoder = _first_equal(tokenizer, installed, texts, len(hard))
        if notes is not None:
            notes.put(key, msgspec.json.encode(found))
    if found.library is None:
        return _refused(tokenizer, prefer, found.name, found.reason)
    return EncoderChoice(tokenizer, found.name, found.reason, found.library, [] if encoder is None else [encoder])


def _key(tokenizer: JsonTokenizer, libraries: Sequence[str], texts: Sequence[str]) -> str:
    """A name for all that the outcome depends on."""
    digest = xxhash.xxh3_128(tokenizer.json)
    versions = [f"{library} {version(library)}" for library in (*libraries, "tokenizers")]
    digest.update(msgspec.json.encode([tokenizer.allow_special, versions, platform.machine(), *texts]))
    return digest.hexdigest()


def _noted(notes: Notebook | None, key: str) -> Verdict | None:
    data = None if notes is None else notes.get(key)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=Verdict)
    except msgspec.DecodeError:  # half a file, or of another release: find out anew
        return None


def _refused(tokenizer: Tokenizer, prefer: Preference, name: str, why: str) -> EncoderChoice:
    if prefer == "fast":
        raise ConfigError(f"encoder='fast' cannot be used with tokenizer {tokenizer.name}: {why}; use encoder='auto'")
    return EncoderChoice(tokenizer, name, why)


def _first_equal(
    tokenizer: JsonTokenizer, libraries: list[str], texts: list[str], hard: int
) -> tuple[Verdict, Encoder | None]:
    """What the gate finds on `texts`, of which the first `hard` are hard strings, and the encoder that passed."""
    # loading the one and encoding with the other take equally long: 0.3 s for GPT-2
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(_try, libraries[0], tokenizer, texts)
        wants = [tokenizer.reference.encode_one(text) for text in texts]
    reasons: list[str] = []
    for library in libraries:
        outcome = first.result() if library == libraries[0] else _try(library, tokenizer, texts)
        if not isinstance(outcome, str):
            encoder, got = outcome
            text = next((t for row, t in enumerate(texts) if got[row].tolist() != wants[row]), None)
            if text is None:
                equal = f"equal ids on {len(texts) - hard} texts of this corpus and {hard} hard strings"
                return Verdict(encoder.name, "; ".join([equal, *reasons]), library), encoder
            outcome = f"{encoder.name} gives other ids for {text[:60]!r}"
        reasons.append(outcome)
    return Verdict(tokenizer.reference.name, "; ".join(reasons)), None


def _try(library: str, tokenizer: JsonTokenizer, texts: list[str]) -> tuple[Encoder, Ragged] | str:
    """The encoder and its ids, or why it cannot be used."""
    try:
        encoder = _make_fast(library, tokenizer)
        return encoder, encoder.encode(texts)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a Rust panic is a BaseException; any failure means: not this library
        return f"{library} cannot use this tokenizer ({type(error).__name__}: {str(error)[:120].splitlines()[0]})"


def _make_fast(library: str, tokenizer: Tokenizer) -> Encoder:
    module, _, name = FAST[library].driver.partition(".")
    return getattr(importlib.import_module(f"headrace.ops.tokenizer.{module}"), name)(tokenizer)

"""The tokenizer seam: flat int32 ids and offsets out, one call for many texts.

A list of Python ints costs more than the encoding that made it (one object a token), so ids stay in one array from the
encoder to the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from headrace.core.block import Ragged


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids with a role. None where the tokenizer names no such token."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None


class Encoder(Protocol):
    """Text to ids. One per thread; need not be safe to share."""

    @property
    def name(self) -> str:
        """Library and version."""
        ...

    def encode(self, texts: Sequence[str]) -> Ragged:
        """Ids of each text, int32, without special tokens. Texts hold no lone surrogates."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """What headrace asks of a tokenizer. Safe to share between threads; pickles to worker processes."""

    @property
    def name(self) -> str:
        """Shown by explain() and in errors."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identity by content: equal if and only if every text gets equal ids."""
        ...

    @property
    def special_ids(self) -> SpecialIds:
        """Ids of the begin, end, padding and unknown tokens."""
        ...

    def encode(self, texts: Sequence[str]) -> Ragged:
        """Ids of each text, int32, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included, so that a person sees what the model sees."""
        ...


def default_affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer's own post-processor puts before and after a text."""
    affixes: Any = getattr(tokenizer, "default_affixes", None)
    return affixes() if affixes is not None else ([], [])

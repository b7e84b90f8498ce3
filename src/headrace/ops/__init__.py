"""Operators, one a file. Users build them with methods of `Pipeline`; what those take is public here.

Names are imported when they are first used: a worker that only reads files pays for none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headrace.lazy import lazy

if TYPE_CHECKING:
    from headrace.ops.chat.tokenize import LossScope, SpanSource
    from headrace.ops.pack.domains import DomainGroups
    from headrace.ops.pack.flat import PackingAlgorithm

MissingFieldMode = Literal["error", "empty"]
"""`tokenize(missing_field=)`."""
SpecialTokensMode = Literal["bos_eos", "bos", "eos", "none", "tokenizer_default"]
"""`tokenize(special_tokens=)`."""

__all__ = ["DomainGroups", "LossScope", "MissingFieldMode", "PackingAlgorithm", "SpanSource", "SpecialTokensMode"]

_HOMES = {
    "DomainGroups": "headrace.ops.pack.domains",
    "LossScope": "headrace.ops.chat.tokenize",
    "PackingAlgorithm": "headrace.ops.pack.flat",
    "SpanSource": "headrace.ops.chat.tokenize",
}

__getattr__, __dir__ = lazy(__name__, _HOMES)

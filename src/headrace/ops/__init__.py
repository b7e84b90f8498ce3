"""Operators, one a file. Users build them with methods of `Pipeline`; what those take is public here.

Names are imported when they are first used: a worker that only reads files pays for none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headrace.ops' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value

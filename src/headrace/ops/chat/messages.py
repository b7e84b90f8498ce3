"""The messages of a record, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.block import MISSING
from headrace.errors import RecordError


def read_messages(value: Any, field: str) -> list[Mapping[str, Any]]:
    """A list of messages, each a mapping with a role. RecordError says what it is instead."""
    if value is MISSING or value is None:
        raise RecordError(f"field {field!r} is missing; it should hold a list of messages")
    if not isinstance(value, (list, tuple)) or not all(isinstance(m, Mapping) and "role" in m for m in value):
        raise RecordError(
            f"field {field!r} should hold messages, such as {{'role': ..., 'content': ...}}; found {value!r:.80}"
        )
    return list(value)

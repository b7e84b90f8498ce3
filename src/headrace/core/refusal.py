"""A record that an operator refused, as it is told to whoever logs it."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np


class Refusal(NamedTuple):
    """Why a record was refused, and (for quarantine) what it held, as JSON."""

    cause: str
    payload: bytes = b""

    @classmethod
    def of(cls, error: Exception, payload: Any = None, *, keep: bool) -> Refusal:
        """The refusal of a record for an error; its payload is kept for quarantine only."""
        return cls(f"{type(error).__name__}: {error}", _json(payload) if keep else b"")


def _json(payload: Any) -> bytes:
    try:
        return msgspec.json.encode(payload, enc_hook=_readable)
    except (TypeError, ValueError):
        return msgspec.json.encode(repr(payload))


def _readable(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else repr(value)

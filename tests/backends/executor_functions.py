"""What several files of tests run in executors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HANG = 60.0  # seconds; generous, since the machine may be busy


def identity(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return fn


def add_one(x: int) -> int:
    return x + 1

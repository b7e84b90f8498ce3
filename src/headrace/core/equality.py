"""Whether two payloads are equal, arrays inside of them included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def same(a: Any, b: Any) -> bool:
    """Deep equality that knows arrays and NaN."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        left, right = np.asarray(a), np.asarray(b)
        return (
            left.shape == right.shape
            and left.dtype == right.dtype
            and bool((left == right).all() or _nan_equal(left, right))
        )
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(np.all(a == b))


def _nan_equal(a: Any, b: Any) -> bool:
    return a.dtype.kind == "f" and np.array_equal(a, b, equal_nan=True)

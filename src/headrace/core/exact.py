"""Which numbers a type holds as they are: ids that are rounded, wrapped around or cut are other ids.

int16 wraps 70000 around to 4464, bfloat16 rounds 1001 to 1000, and a cast of 1.5 to an integer cuts it to 1; numpy and torch do
all three without a word.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Exactly(NamedTuple):
    """The whole numbers that a type holds as they are, `low` to `high`; with `fractions` it is a floating-point type."""

    low: int
    high: int
    fractions: bool


def exactly(dtype: np.dtype[Any]) -> Exactly:
    """What a numpy type holds."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return Exactly(int(limits.min), int(limits.max), False)
    if dtype.kind in "fc":
        return up_to(2 << np.finfo(dtype).nmant)
    return Exactly(0, 1, False)


def up_to(whole: int) -> Exactly:
    """A floating-point type, by the greatest number below which it holds every whole one."""
    return Exactly(-whole, whole, True)


def first_changed(values: NDArray[Any], holds: Exactly) -> int | None:
    """Place in the flat `values` of the first that a cast would change; None if there is none. Floats that another
    floating-point type rounds are not looked for: whoever asks for such a type wants that."""
    if values.dtype.kind not in "iuf" or not values.size:
        return None
    if values.dtype.kind == "f":
        if holds.fractions:
            return None
        # the upper limit of 64 bits is no float: it rounds up, to one that does not fit any more
        inside = (values >= holds.low) & (values < float(holds.high) + (holds.high < 1 << 53))
        kept = inside & (values == np.floor(values))
        return None if kept.all() else int(np.argmin(kept))
    if holds.low <= int(values.min()) and int(values.max()) <= holds.high:
        return None
    return int(np.argmax((values < holds.low) | (values > holds.high)))

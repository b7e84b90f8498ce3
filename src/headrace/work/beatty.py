"""Two-way splits of a sequence, in closed form.

Of the first `n` places, `(p n + h) // q` belong to the part with share `p / q`: its error is at most one half at every `n`,
and the other part's is the same with the opposite sign. Counting and finding take a few integer operations at any
distance (such sequences are known as Beatty or Sturmian).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_SAFE: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Beatty:
    """The part with share `p / q`; `0 <= h < q` shifts where it begins."""

    p: int
    q: int
    h: int

    @classmethod
    def split(cls, p: int, q: int) -> Beatty:
        """The part whose error is centred on zero."""
        return cls(p, q, q // 2)

    @property
    def rest(self) -> Beatty:
        """The other part."""
        return Beatty(self.q - self.p, self.q, self.q - 1 - self.h)

    def count(self, n: int) -> int:
        """How many of the first `n` places belong to this part."""
        return (self.p * n + self.h) // self.q

    def select(self, item: int) -> int:
        """The place of item number `item` (from zero)."""
        return -(-((item + 1) * self.q - self.h) // self.p) - 1

    def counts(self, start: int, length: int) -> Ints:
        """`count(start + i) - count(start)` for `i` in `[0, length]`, int64 `[length + 1]`."""
        return floor_line((self.p * start + self.h) % self.q, self.p, self.q, length + 1)

    def counts_at(self, start: int, steps: Ints) -> Ints:
        """`count(start + i) - count(start)` for each `i` of `steps` (not negative)."""
        offset = (self.p * start + self.h) % self.q
        largest = int(steps.max(initial=0))
        if self.p * largest + self.q < _SAFE:
            return (offset + self.p * steps) // self.q
        high, low = steps >> 16, steps & 0xFFFF
        whole, part = divmod(self.p << 16, self.q)
        if max(part * (largest >> 16), self.p << 16) + self.q < _SAFE:
            return whole * high + (offset + self.p * low + part * high) // self.q
        return np.array([(offset + self.p * int(i)) // self.q for i in steps], np.int64)


def floor_line(a: int, b: int, c: int, length: int) -> Ints:
    """`floor((a + b i) / c)` for `i` in `[0, length)`, exact for any `a` and `b`, `c <= 2^61`, and results in int64."""
    slope, b = divmod(b, c)
    start, a = divmod(a, c)
    step = max(1, (_SAFE - c) // max(b, 1))
    index = np.arange(length, dtype=np.int64)
    if step >= length:
        return (a + b * index) // c + (index * slope + start)
    out = np.empty(length, np.int64)
    for first in range(0, length, step):
        piece = index[: min(step, length - first)]
        base, rest = divmod(a + b * first, c)
        out[first : first + len(piece)] = (rest + b * piece) // c + base
    return out + (index * slope + start)

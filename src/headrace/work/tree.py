"""Splitting a few components two at a time, with an error below one for each.

A two-way split in closed form is off by at most one half. Splits inside splits pass their error on in proportion: a
component of weight `w` below nodes of weights `W1, W2, ...` (its ancestors, without the root, which is exact) is off by at
most `(1 + w / W1 + w / W2 + ...) / 2`. That is below one if its **load** `w / W1 + w / W2 + ...` is. Up to four
components always have such a tree, up to eight nearly always; more rarely do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

Tree = int | tuple["Tree", "Tree"]

MOST: Final = 8
"""More components than this are not tried: their trees are rare and many to search."""

_HEAVIEST_LOAD: Final = {True: 1 - 1e-3, False: 1 - 1e-13}
_KEPT: Final = 3


def best_tree(weights: Sequence[int], exact_root: bool) -> Tree | None:
    """The tree over `range(len(weights))` with the smallest load, or None if none stays below one.

    `exact_root` says that the root's places are all the places there are; otherwise they are themselves one side of a split.
    With an exact root, a load within a thousandth of one counts as none: `deadlines.py` does better there.
    """
    k = len(weights)
    if k == 1:
        return 0
    if k > MOST:
        return None
    whole, limit = (1 << k) - 1, _HEAVIEST_LOAD[exact_root]
    found: dict[int, list[tuple[tuple[float, ...], Tree]]] = {1 << i: [((0.0,) * k, i)] for i in range(k)}
    for mask in sorted(range(1, whole + 1), key=lambda m: (m.bit_count(), m)):
        if mask.bit_count() > 1:
            exact = exact_root and mask == whole
            found[mask] = _joined(mask, found, _own_loads(mask, weights, exact), limit)
    best = found[whole]
    return best[0][1] if best else None


def _own_loads(mask: int, weights: Sequence[int], exact: bool) -> tuple[float, ...]:
    """What the node over `mask` adds to the load of each component."""
    total = sum(w for i, w in enumerate(weights) if mask >> i & 1)
    return tuple(0.0 if exact or not mask >> i & 1 else w / total for i, w in enumerate(weights))


def _joined(
    mask: int, found: dict[int, list[tuple[tuple[float, ...], Tree]]], own: tuple[float, ...], limit: float
) -> list[tuple[tuple[float, ...], Tree]]:
    """The best few trees whose root splits `mask` in two."""
    lowest = mask & -mask
    out: list[tuple[float, tuple[float, ...], Tree]] = []
    part = (mask - 1) & mask
    while part:
        if part & lowest:
            for left, one in found[part]:
                for right, two in found[mask ^ part]:
                    loads = tuple(a + b + c for a, b, c in zip(left, right, own, strict=True))
                    heaviest = max(loads)
                    if heaviest < limit:
                        out.append((heaviest, loads, (one, two)))
        part = (part - 1) & mask
    out.sort(key=lambda entry: entry[:2])
    return [(loads, tree) for _, loads, tree in out[:_KEPT]]

"""The mixture sequence: which component each sample of the stream comes from.

A pure function of the shares and of the position. Of the first `n` samples, each component's count is less than one away
from share x `n`, for every `n`, any number of components and any shares; every question (`counts`, `order`, `select`) is
answered at any distance without walking there.

* A few components (two to about eight): splits in closed form (`beatty.py`) within splits, where a tree keeps every error
  below one (`tree.py`). Two components are off by at most one half.
* More: earliest deadline first (`deadlines.py`), after components too rare for its blocks were split off as a second group.

A window of the sequence, such as a chunk, is the difference of two prefixes: within one of its shares for two components, and
less than two off for more. No sequence does better for every length of window (and the chunk size does not change the sequence):
of shares 5, 4 and 2 of 11 there are orders of nine samples with every window within one, and none of ten. In a random
mixture about one window in a hundred is more than one off.

Components are numbered in the order of their names, so nothing depends on the order in which datasets are listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.work.beatty import Beatty
from headrace.work.deadlines import DeadlineGroup
from headrace.work.mixture import exact_shares
from headrace.work.tree import Tree, best_tree

_LONGEST_BLOCK: Final = 1 << 14
"""Places that a block of `DeadlineGroup` may need before rare components are split off."""


class Group(Protocol):
    """Members that share a sequence of places; components are indices into the group."""

    def counts(self, m: int) -> list[int]:
        """Samples of each member among the first `m` places."""
        ...

    def order(self, start: int, stop: int) -> NDArray[np.int32]:
        """Member of each place."""
        ...

    def select(self, component: int, item: int) -> int:
        """Place of sample `item` of a member."""
        ...


class Single:
    """One member."""

    def counts(self, m: int) -> list[int]:
        """All of them."""
        return [m]

    def order(self, start: int, stop: int) -> NDArray[np.int32]:
        """Always the same."""
        return np.zeros(stop - start, np.int32)

    def select(self, component: int, item: int) -> int:
        """Where it says."""
        del component
        return item


class Split:
    """Two groups; `part` says which places the first one gets. Its members come first."""

    def __init__(self, part: Beatty, first: Group, second: Group, num_first: int) -> None:
        self._part = part
        self._groups = (first, second)
        self._num_first = num_first

    def counts(self, m: int) -> list[int]:
        """Samples of each member among the first `m` places."""
        inside = self._part.count(m)
        return [*self._groups[0].counts(inside), *self._groups[1].counts(m - inside)]

    def order(self, start: int, stop: int) -> NDArray[np.int32]:
        """Member of each place."""
        edges = self._part.counts(start, stop - start)
        mine = edges[1:] > edges[:-1]
        num_mine, begin = int(edges[-1]), self._part.count(start)
        if isinstance(self._groups[0], Single) and isinstance(self._groups[1], Single):
            return (~mine).astype(np.int32)
        out = np.empty(stop - start, np.int32)
        out[mine] = self._groups[0].order(begin, begin + num_mine)
        rest = start - begin
        out[~mine] = self._groups[1].order(rest, rest + stop - start - num_mine) + np.int32(self._num_first)
        return out

    def select(self, component: int, item: int) -> int:
        """Place of sample `item` of a member."""
        if component < self._num_first:
            return self._part.select(self._groups[0].select(component, item))
        return self._part.rest.select(self._groups[1].select(component - self._num_first, item))


class Interleave:
    """The sequence of a mixture. `names` lists the components with positive weight, in the order of their numbers.

    It is a value: what it remembers only saves work, may be shared between threads, and does not travel when pickled.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        shares, self.denominator = exact_shares(weights)
        self.names = tuple(shares)
        self.numerators = tuple(shares.values())
        self._group, listed = _arrange(self.numerators, self.denominator)
        self._listed = listed
        self._where = {component: at for at, component in enumerate(listed)}
        self._straight = listed == sorted(listed)
        self._number = np.array(listed, np.int32)

    @classmethod
    def of(cls, weights: Mapping[str, float]) -> Interleave:
        """The sequence of these weights, shared with whoever else asked for it lately."""
        return _interleave(tuple(sorted(weights.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return _interleave, (tuple(sorted(self._weights.items())),)

    def counts(self, n: int) -> list[int]:
        """Samples of each component among the first `n`."""
        out = [0] * len(self.names)
        for component, count in zip(self._listed, self._group.counts(n), strict=True):
            out[component] = count
        return out

    def order(self, start: int, stop: int) -> NDArray[np.int32]:
        """Component of each sample in `[start, stop)`, int32."""
        order = self._group.order(start, stop)
        return order if self._straight else self._number[order]

    def select(self, component: int, item: int) -> int:
        """Position of sample number `item` (from zero) of a component."""
        return self._group.select(self._where[component], item)

    def earliest(self, component: int, item: int) -> int:
        """A position that `select` cannot be below."""
        return item * self.denominator // self.numerators[component]

    def latest(self, component: int, number: int) -> int:
        """Samples of the stream in which a component is sure to have had `number` of its own."""
        return -(-number * self.denominator // self.numerators[component])


@lru_cache(maxsize=16)
def _interleave(weights: tuple[tuple[str, float], ...]) -> Interleave:
    return Interleave(dict(weights))


def _arrange(numerators: Sequence[int], q: int) -> tuple[Group, list[int]]:
    """The groups, and the components in the order of their members."""
    everything = list(range(len(numerators)))
    tree = best_tree(numerators, exact_root=True)
    if tree is not None:
        return _planted(tree, numerators, everything)
    seldom = _rare(numerators)
    often = [c for c in everything if c not in seldom]
    if not seldom:
        return DeadlineGroup(numerators, Beatty(q, q, 0)), everything
    part = Beatty.split(sum(numerators[c] for c in often), q)
    (one, first), (two, second) = _shared(numerators, often, part), _shared(numerators, seldom, part.rest)
    return Split(part, one, two, len(first)), [*first, *second]


def _rare(numerators: Sequence[int]) -> list[int]:
    """Components to split off, so that the longer of both groups' blocks is as short as can be; none while blocks are short."""
    by_weight = sorted(range(len(numerators)), key=lambda c: (numerators[c], c))
    total = sum(numerators)
    best, cut, below = total // numerators[by_weight[0]], 0, 0
    if best <= _LONGEST_BLOCK:
        return []
    for number, component in enumerate(by_weight[:-1], 1):
        below += numerators[component]
        longest = max(total // numerators[by_weight[number]], below // numerators[by_weight[0]])
        if longest < best:
            best, cut = longest, number
    return sorted(by_weight[:cut])


def _shared(numerators: Sequence[int], members: list[int], clock: Beatty) -> tuple[Group, list[int]]:
    """A group on the places of `clock`."""
    own = [numerators[c] for c in members]
    tree = best_tree(own, exact_root=False)
    return (DeadlineGroup(own, clock), members) if tree is None else _planted(tree, own, members)


def _planted(tree: Tree, weights: Sequence[int], members: Sequence[int]) -> tuple[Group, list[int]]:
    """Splits within splits, and the components in the order of their leaves."""
    if isinstance(tree, int):
        return Single(), [members[tree]]
    (one, first), (two, second) = (_planted(side, weights, members) for side in tree)
    weight = [sum(weights[leaf] for leaf in _leaves(side)) for side in tree]
    return Split(Beatty.split(weight[0], sum(weight)), one, two, len(first)), [*first, *second]


def _leaves(tree: Tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [leaf for side in tree for leaf in _leaves(side)]

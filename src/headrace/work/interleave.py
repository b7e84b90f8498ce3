"""The mixture sequence: which component each sample of the stream comes from.

A pure function of the shares and of the position. Of the first `n` samples, each component's count is less than one away
from share x `n`, for every `n`, any number of components and any shares; every question (`counts`, `order`, `select`) is
answered at any distance without walking there.

* One component: all places are its own.
* Two: a closed form (`beatty.py`), error at most 1/2.
* Three or four: two pairs; places are split between the pairs, then in each. Error at most (1 + w) / 2, `w` a share in its pair.
* More: earliest deadline first (`deadlines.py`), after components too rare for its blocks were split off as a second group.

Components are numbered in the order of their names, so nothing depends on the order in which datasets are listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.work.beatty import Beatty
from headrace.work.deadlines import DeadlineGroup
from headrace.work.mixture import exact_shares

_RARE: Final = 1 << 14
"""A component of share below 1 / _RARE is rare: with it, blocks would have to be longer than this."""


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
    """The sequence of a mixture. `names` lists the components with positive weight, in the order of their numbers."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        shares, self.denominator = exact_shares(weights)
        self.names = tuple(shares)
        self.numerators = tuple(shares.values())
        members = _arrange(self.numerators, self.denominator)
        self._group, listed = members
        self._listed = listed
        self._where = {component: at for at, component in enumerate(listed)}
        self._straight = listed == sorted(listed)
        self._number = np.array(listed, np.int32)

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


def _arrange(numerators: tuple[int, ...], q: int) -> tuple[Group, list[int]]:
    """The groups, and the components in the order of their members."""
    k = len(numerators)
    if k <= 2:
        return _small(numerators, list(range(k)), q)
    by_weight = sorted(range(k), key=lambda c: (-numerators[c], c))
    if k <= 4:
        first, second = sorted([by_weight[0], *by_weight[3:]]), sorted(by_weight[1:3])
    else:
        second = sorted(c for c in by_weight if numerators[c] * _RARE < q)
        first = sorted(c for c in by_weight if numerators[c] * _RARE >= q)
        if not first or not second:
            listed = first or second
            return DeadlineGroup([numerators[c] for c in listed], Beatty(q, q, 0)), listed
    part = Beatty.split(sum(numerators[c] for c in first), q)
    one, two = _group(numerators, first, part), _group(numerators, second, part.rest)
    return Split(part, one, two, len(first)), [*first, *second]


def _group(numerators: tuple[int, ...], members: list[int], clock: Beatty) -> Group:
    """A group of any size on the places of `clock`."""
    if len(members) <= 2:
        return _small(tuple(numerators[c] for c in members), members, sum(numerators[c] for c in members))[0]
    return DeadlineGroup([numerators[c] for c in members], clock)


def _small(numerators: tuple[int, ...], members: list[int], total: int) -> tuple[Group, list[int]]:
    """One or two members."""
    if len(members) == 1:
        return Single(), members
    return Split(Beatty.split(numerators[0], total), Single(), Single(), 1), members

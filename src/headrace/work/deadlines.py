"""Three or more components in one sequence, never a whole sample ahead or behind.

The quota rule: of the first `n` places a component of share `w` gets `floor(w n)` or `ceil(w n)`. So its sample number
`j` (from zero) may not come before place `floor(j / w)` and must come before place `ceil((j + 1) / w)`: a unit of work with a
release and a deadline. Taking, at each place, the released sample with the earliest deadline (ties by name)
always meets all deadlines (the chairman assignment problem: Tijdeman 1980; Steiner and Yeomans 1993).

Done naively that is a walk over all samples from the first, at a microsecond each. Two things make it direct and fast:

* **Anchors.** The sequence is cut into blocks of a fixed length. At each block boundary, the samples whose window crosses
  it (at most one a component) are divided into those before and those after, looking at no more than one block on either
  side; a division that leaves every deadline within reach always exists. So any block can be computed by itself, at
  any distance, and nothing is remembered.
* **All places at once.** Who sits where is earliest-deadline-first, computed by halving: the half with the earlier deadlines
  takes the places it would take alone, which is one running minimum; the other half takes what is left; both halves go on
  alike. A block of 2^b samples takes b rounds of array operations.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InternalError
from headrace.work.beatty import Beatty, floor_line

Ints = NDArray[np.int64]

_SMALLEST_BLOCK = 4096
_KEPT_BLOCKS = 16


class DeadlineGroup:
    """Components that share the places which `clock` gives them.

    `numerators[c] / clock.q` is the share of component `c` in the places of the whole sequence. All positions are places
    of the group: place `m` of the group is place `clock.select(m)` of the whole.
    """

    def __init__(self, numerators: Sequence[int], clock: Beatty) -> None:
        self._p = list(numerators)
        self._q = clock.q
        self._clock = clock
        longest = -(-self._q // min(self._p)) + 2
        self.block = max(_SMALLEST_BLOCK, 1 << (clock.count(longest) + 2).bit_length())
        self._anchors: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._orders: OrderedDict[int, NDArray[np.int32]] = OrderedDict()

    def counts(self, m: int) -> list[int]:
        """Samples of each component among the first `m` places."""
        number, inside = divmod(m, self.block)
        counts = self._anchor(number)
        if not inside:
            return list(counts)
        seen = np.bincount(self._order(number)[:inside], minlength=len(self._p))
        return [a + b for a, b in zip(counts, seen.tolist(), strict=True)]

    def order(self, start: int, stop: int) -> NDArray[np.int32]:
        """Component of each place, int32 `[stop - start]`."""
        pieces = [
            self._order(number)[max(start - number * self.block, 0) : stop - number * self.block]
            for number in range(start // self.block, -(-stop // self.block))
        ]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

    def select(self, component: int, item: int) -> int:
        """The place of sample number `item` of a component."""
        number = self._release(component, item) // self.block
        while self._anchor(number + 1)[component] <= item:
            number += 1
        places = np.flatnonzero(self._order(number) == component)
        return number * self.block + int(places[item - self._anchor(number)[component]])

    # Windows ---------------------------------------------------------------------------------------

    def _release(self, component: int, item: int) -> int:
        """First place that sample `item` may take."""
        return self._clock.count(item * self._q // self._p[component])

    def _deadline(self, component: int, item: int) -> int:
        """The place that sample `item` must come before."""
        return self._clock.count(-(-(item + 1) * self._q // self._p[component]))

    def _done(self, m: int) -> list[int]:
        """Samples of each component whose deadline is at or before place `m`."""
        time = self._clock.select(m)
        return [p * time // self._q for p in self._p]

    def _begun(self, m: int) -> list[int]:
        """Samples of each component whose release is before place `m`."""
        time = self._clock.select(m - 1) + 1 if m else 0
        return [-(-p * time // self._q) for p in self._p]

    def _windows(self, component: int, first: int, number: int, base: int) -> tuple[Ints, Ints]:
        """Releases and deadlines of samples `first .. first + number`, relative to place `base`, int64 `[number]`."""
        p, q = self._p[component], self._q
        time = self._clock.select(base) if base else 0
        edges = floor_line(first * q - time * p, q, p, number + 1)
        ends = floor_line(first * q - time * p + p - 1, q, p, number + 1)
        if self._clock.p == q:
            return edges[:-1], ends[1:]
        shift = self._clock.count(time) - base
        early = edges[:-1].clip(min=0)
        return self._clock.counts_at(time, early) + shift, self._clock.counts_at(time, ends[1:].clip(min=0)) + shift

    # Anchors ---------------------------------------------------------------------------------------

    def _anchor(self, number: int) -> tuple[int, ...]:
        """Samples of each component before block `number`."""
        if number == 0:
            return (0,) * len(self._p)
        found = self._anchors.get(number)
        if found is None:
            found = self._anchors[number] = self._divide(number * self.block)
            if len(self._anchors) > 4 * _KEPT_BLOCKS:
                self._anchors.popitem(last=False)
        return found

    def _divide(self, m: int) -> tuple[int, ...]:
        """Which of the samples whose window crosses place `m` come before it: earliest deadlines, as far as places allow."""
        done, begun = self._done(m), self._begun(m)
        wanted = m - sum(done)
        crossing = [c for c, (a, b) in enumerate(zip(done, begun, strict=True)) if b > a]
        if wanted == len(crossing):
            return tuple(begun)
        if wanted:
            free = self._free_before(m, done)
            for component in sorted(crossing, key=lambda c: (self._deadline(c, done[c]), c)):
                release = self._release(component, done[component]) - (m - self.block)
                at = int(np.searchsorted(free, release))
                if at < len(free):
                    free = np.delete(free, at)
                    done[component] += 1
                    wanted -= 1
                    if not wanted:
                        break
        if wanted:
            raise InternalError(f"no division of the mixture at place {m} (shares {self._p} of {self._q})")
        return tuple(done)

    def _free_before(self, m: int, done: Sequence[int]) -> Ints:
        """Places in the block before `m` that the samples with both ends of their window inside it leave free, ascending."""
        start = m - self.block
        releases = [
            self._windows(c, first, last - first, start)[0]
            for c, (first, last) in enumerate(zip(self._begun(start), done, strict=True))
            if last > first
        ]
        arrivals = (
            np.bincount(np.concatenate(releases), minlength=self.block) if releases else np.zeros(self.block, np.int64)
        )
        return np.flatnonzero(~_busy(arrivals))

    # Blocks ----------------------------------------------------------------------------------------

    def _order(self, number: int) -> NDArray[np.int32]:
        """Component of each place of a block."""
        found = self._orders.get(number)
        if found is None:
            found = self._orders[number] = self._schedule(number)
            if len(self._orders) > _KEPT_BLOCKS:
                self._orders.popitem(last=False)
        return found

    def _schedule(self, number: int) -> NDArray[np.int32]:
        """Earliest deadline first, between the two anchors of the block."""
        base, length = number * self.block, self.block
        before, after = self._anchor(number), self._anchor(number + 1)
        sizes = [b - a for a, b in zip(before, after, strict=True)]
        windows = [self._windows(c, before[c], size, base) for c, size in enumerate(sizes)]
        owners = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        releases = np.concatenate([r for r, _ in windows]).clip(min=0)
        deadlines = np.concatenate([d for _, d in windows])
        rank = _by_deadline(deadlines, length)
        order = np.empty(length, np.int32)
        order[earliest_deadline_first(releases[rank])] = owners[rank]
        return order


def _by_deadline(deadlines: Ints, length: int) -> Ints:
    """Order by deadline; those past the block's end come last; ties as listed."""
    clipped = deadlines.clip(max=length + 1)
    small = clipped.astype(np.uint16) if length < 1 << 15 else clipped
    return np.argsort(small, kind="stable")


def _busy(arrivals: Ints) -> NDArray[np.bool_]:
    """Places taken when each arrival takes the first free one from its own on: where the surplus reaches no new low."""
    surplus = np.cumsum(arrivals - 1)
    low = np.minimum(np.minimum.accumulate(surplus), 0)
    busy = np.empty(len(arrivals), np.bool_)
    busy[0] = low[0] == 0
    np.equal(low[1:], low[:-1], out=busy[1:])
    return busy


def earliest_deadline_first(releases: Ints) -> Ints:
    """Place of each of `n` samples (a power of two), listed by deadline, when `n` places are all taken.

    `releases` int64 `[n]`. Each round halves all segments: within a segment of samples and of as many places, the first
    half of the samples takes the places it would take alone, and the places are renumbered, those first.
    """
    n = len(releases)
    index: Ints = np.arange(n)
    release: Ints = releases
    places: Ints = index
    length = n
    while length > 1:
        half = length >> 1
        pairs = release.reshape(-1, 2, half)
        busy = _busy(np.bincount(pairs[:, 0].reshape(-1), minlength=n))
        taken = np.cumsum(busy) - busy
        segment = index & -length
        local = taken - (segment >> 1)
        moved = np.where(busy, segment + local, index + half - local)
        renumbered = np.empty(n, np.int64)
        renumbered[moved] = places
        places = renumbered
        local = taken[release] - (segment >> 1)
        upper = (index & half) == 0
        release = np.where(upper, segment + local, release + half - local)
        length = half
    return places

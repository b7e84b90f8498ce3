"""Three or more components in one sequence, never a whole sample ahead or behind.

The quota rule: of the first `n` places a component of share `w` has between `w n - (1 - g)` and `w n + (1 - g)`, for a margin
`g`. So its sample number `j` (from zero) has a first place that it may take and a place that it must come before: a
unit of work with a release and a deadline. Taking, at each place, the released sample with the earliest deadline (ties
by name) meets all deadlines, with a margin of `1 / (2 k - 2)` for `k` components (the chairman assignment problem:
Tijdeman 1980; Steiner and Yeomans 1993). Errors are multiples of `1 / q`, so that margin is rounded up to one of them.

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

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InternalError
from headrace.work.beatty import Beatty, floor_line

Ints = NDArray[np.int64]
Order = NDArray[np.int32]

_T = TypeVar("_T")

_SMALLEST_BLOCK: Final = 4096
_KEPT_BLOCKS: Final = 64
_WORD: Final = 64
_ALL: Final = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True, slots=True)
class _Windows:
    """Windows of each component's samples from number `first[c]` on, as places counted from `base`."""

    base: int
    first: list[int]
    releases: list[Ints]
    deadlines: list[Ints]


class DeadlineGroup:
    """Components that share the places which `clock` gives them.

    `numerators[c] / clock.q` is the share of component `c` in the places of the whole sequence. All positions are places
    of the group: place `m` of the group is place `clock.select(m)` of the whole. With all places its own, a group keeps a
    margin; a group that shares the sequence with another has none to spare, and stays just below one.

    Blocks and anchors are kept for a while. Threads may share a group: at worst both compute the same block.
    """

    def __init__(self, numerators: Sequence[int], clock: Beatty) -> None:
        self._p = list(numerators)
        self._q = clock.q
        self._clock = clock
        self._margin = -(-self._q // (2 * len(self._p) - 2)) if clock.p == clock.q else 1
        longest = -(-self._q // min(self._p)) + 2
        self.block = max(_SMALLEST_BLOCK, 1 << (clock.count(longest) + 2).bit_length())
        self._anchors: dict[int, tuple[int, ...]] = {0: (0,) * len(self._p)}
        self._orders: dict[int, Order] = {}

    def counts(self, m: int) -> list[int]:
        """Samples of each component among the first `m` places."""
        number, inside = divmod(m, self.block)
        counts = self._anchor(number)
        if not inside:
            return list(counts)
        seen = np.bincount(self._blocks(number, number + 1)[0][:inside], minlength=len(self._p))
        return [a + b for a, b in zip(counts, seen.tolist(), strict=True)]

    def order(self, start: int, stop: int) -> Order:
        """Component of each place, int32 `[stop - start]`."""
        first = start // self.block
        blocks = self._blocks(first, -(-stop // self.block))
        whole = np.concatenate(blocks) if len(blocks) > 1 else blocks[0] if blocks else np.empty(0, np.int32)
        return whole[start - first * self.block : stop - first * self.block]

    def select(self, component: int, item: int) -> int:
        """The place of sample number `item` of a component."""
        number = self._release(component, item) // self.block
        while self._anchor(number + 1)[component] <= item:
            number += 1
        places = np.flatnonzero(self._blocks(number, number + 1)[0] == component)
        return number * self.block + int(places[item - self._anchor(number)[component]])

    # Windows ---------------------------------------------------------------------------------------

    def _release(self, component: int, item: int) -> int:
        """First place that sample `item` may take."""
        return self._clock.count((item * self._q + self._margin - 1) // self._p[component])

    def _deadline(self, component: int, item: int) -> int:
        """The place that sample `item` must come before."""
        p = self._p[component]
        return self._clock.count(((item + 1) * self._q + p - self._margin) // p)

    def _done(self, m: int) -> list[int]:
        """Samples of each component whose deadline is at or before place `m`."""
        time = self._clock.select(m)
        return [(p * time + self._margin - 1) // self._q for p in self._p]

    def _begun(self, m: int) -> list[int]:
        """Samples of each component whose release is before place `m`."""
        time = self._clock.select(m - 1) + 1 if m else 0
        return [max(0, (p * time - self._margin) // self._q + 1) for p in self._p]

    def _windows(self, start: int, stop: int) -> _Windows:
        """Windows of all samples that may come between two places."""
        first, last = self._done(start), self._begun(stop)
        time = self._clock.select(start) if start else 0
        releases: list[Ints] = []
        deadlines: list[Ints] = []
        for p, begin, end in zip(self._p, first, last, strict=True):
            q, offset = self._q, begin * self._q - time * p
            release = floor_line(offset + self._margin - 1, q, p, end - begin).clip(min=0)
            deadline = floor_line(offset + q + p - self._margin, q, p, end - begin)
            if self._clock.p != q:
                release, deadline = self._clock.counts_at(time, release), self._clock.counts_at(time, deadline)
            releases.append(release)
            deadlines.append(deadline)
        return _Windows(start, first, releases, deadlines)

    # Anchors ---------------------------------------------------------------------------------------

    def _anchor(self, number: int) -> tuple[int, ...]:
        """Samples of each component before block `number`."""
        found = self._anchors.get(number)
        if found is None:
            found = self._divide(number, self._windows((number - 1) * self.block, number * self.block))
        return found

    def _divide(self, number: int, windows: _Windows) -> tuple[int, ...]:
        """Which of the samples whose window crosses the start of a block come before it.

        Earliest deadlines first, as far as there are places for them between their release and the boundary.
        """
        if number in self._anchors:
            return self._anchors[number]
        m = number * self.block
        done, begun = self._done(m), self._begun(m)
        wanted = m - sum(done)
        crossing = [c for c, (a, b) in enumerate(zip(done, begun, strict=True)) if b > a]
        if 0 < wanted < len(crossing):
            free = self._free_before(m, done, windows)
            for component in sorted(crossing, key=lambda c: (self._deadline(c, done[c]), c)):
                at = bisect_left(free, self._release(component, done[component]) - m + self.block)
                if at < len(free):
                    del free[at]
                    done[component] += 1
                    wanted -= 1
                    if not wanted:
                        break
        elif wanted == len(crossing):
            done, wanted = begun, 0
        if wanted:
            raise InternalError(f"no division of the mixture at place {m} (shares {self._p} of {self._q})")
        _keep(self._anchors, {number: tuple(done)}, 4 * _KEPT_BLOCKS)
        return tuple(done)

    def _free_before(self, m: int, done: Sequence[int], windows: _Windows) -> list[int]:
        """Places of the block before `m` that the samples with all of their window inside it leave free, ascending."""
        start = m - self.block
        releases = [
            windows.releases[c][max(a - windows.first[c], 0) : max(b - windows.first[c], 0)]
            for c, (a, b) in enumerate(zip(self._begun(start), done, strict=True))
        ]
        arrivals = np.bincount(np.concatenate(releases) - (start - windows.base), minlength=self.block)
        return np.flatnonzero(~_busy(arrivals)).tolist()

    # Blocks ----------------------------------------------------------------------------------------

    def _blocks(self, first: int, last: int) -> list[Order]:
        """Component of each place, for each block of `[first, last)`."""
        found = {number: self._orders.get(number) for number in range(first, last)}
        missing = [number for number, order in found.items() if order is None]
        if missing:
            begin, end = missing[0], missing[-1] + 1
            order = self._schedule(begin, end).reshape(end - begin, self.block)
            new = dict(zip(range(begin, end), order, strict=True))
            found.update(new)
            _keep(self._orders, new, _KEPT_BLOCKS)
        return [order for order in found.values() if order is not None]

    def _schedule(self, first: int, last: int) -> Order:
        """Earliest deadline first, within each of the blocks `[first, last)`, between their anchors."""
        windows = self._windows(max(first - 1, 0) * self.block, last * self.block)
        anchors = [self._divide(number, windows) for number in range(first, last + 1)]
        shift = first * self.block - windows.base
        owners = np.arange(len(self._p), dtype=np.int32).repeat(
            [b - a for a, b in zip(anchors[0], anchors[-1], strict=True)]
        )
        spans = [
            slice(a - begin, b - begin) for begin, a, b in zip(windows.first, anchors[0], anchors[-1], strict=True)
        ]
        per_block = np.diff(np.array(anchors), axis=0).T.reshape(-1)
        starts = np.tile(np.arange(last - first) * self.block, len(self._p)).repeat(per_block)
        releases = np.concatenate([r[span] for r, span in zip(windows.releases, spans, strict=True)]) - shift
        deadlines = np.concatenate([d[span] for d, span in zip(windows.deadlines, spans, strict=True)]) - shift
        np.minimum(deadlines, starts + self.block, out=deadlines)  # sorts by block, then by deadline
        np.maximum(releases, starts, out=releases)
        small = deadlines.astype(np.uint16) if len(deadlines) < 1 << 16 else deadlines
        rank = np.argsort(small, kind="stable")
        order = np.empty(len(rank), np.int32)
        order[earliest_deadline_first(releases[rank], self.block)] = owners[rank]
        return order


def _keep(cache: dict[int, _T], new: dict[int, _T], limit: int) -> None:
    """Add to a cache, and forget the oldest entries beyond its limit."""
    cache.update(new)
    for number in list(cache)[: max(0, len(cache) - limit)]:
        if number:
            cache.pop(number, None)


def _busy(arrivals: Ints) -> NDArray[np.bool_]:
    """Places taken when each arrival takes the first free one from its own on: where the surplus reaches no new low."""
    surplus = np.cumsum(arrivals - 1)
    low = np.minimum(np.minimum.accumulate(surplus), 0)
    busy = np.empty(len(arrivals), np.bool_)
    busy[0] = low[0] == 0
    np.equal(low[1:], low[:-1], out=busy[1:])
    return busy


def earliest_deadline_first(releases: Ints, length: int) -> Ints:
    """Place of each sample in blocks of `length` (a power of two), all of whose places are taken.

    `releases` int64 `[n]` lists the samples of one block after the other, each block by deadline; a release is a place
    in `[0, n)` of the same block. Each round halves all segments: the first half of a segment's samples takes the places it
    would take alone, and the places are renumbered, those first. Segments of 64 are finished by `_finish`.
    """
    n = len(releases)
    index: Ints = np.arange(n)
    release, places = releases, index
    while length > _WORD:
        half = length >> 1
        pairs = release.reshape(-1, 2, half)
        busy = _busy(np.bincount(pairs[:, 0].reshape(-1), minlength=n))
        segment = np.arange(0, n, length)[:, None]
        taken = np.cumsum(busy, dtype=np.int64)
        np.subtract(taken, busy, out=taken)
        renumbered = np.empty(n, np.int64)
        local = (taken.reshape(-1, length) - (segment >> 1)).reshape(-1)
        renumbered[np.where(busy, (index & -length) + local, index + half - local)] = places
        places = renumbered
        ahead = local.take(release).reshape(-1, 2, half)
        release = np.concatenate([ahead[:, :1] + segment[:, None], pairs[:, 1:] + half - ahead[:, 1:]], axis=1).reshape(
            -1
        )
        length = half
    return places.take(_finish(release.reshape(-1, length)))


def _finish(releases: Ints) -> Ints:
    """Places of segments of at most 64 samples, `[segments, length]`: one sample of every segment at a time, places as bits."""
    segments, length = releases.shape
    first = np.arange(0, segments * length, length)[:, None]
    allowed = np.left_shift(_ALL, (releases - first).astype(np.uint64)).T.copy()
    taken = np.empty_like(allowed)
    free = np.full(segments, _ALL)
    for sample in range(length):
        mine = taken[sample]
        np.bitwise_and(free, allowed[sample], out=mine)
        np.bitwise_and(mine, -mine, out=mine)
        np.bitwise_xor(free, mine, out=free)
    return (np.frexp(taken.T.astype(np.float64))[1] - 1 + first).reshape(-1)

"""Where finite data ends when several groups must end together. Pure: what members know, and what follows from it.

Lanes end at different batches, and a group computes only its own. Every batch has a *place* in the order of all groups' batches
(`Topology.place`). A step is `size` places; every group delivers a part of it. What a member (a rank) knows of its own lanes is a
`Standing`, and standings add up: whoever knows those of all members knows whether a step can be filled, and where the data end.

    "drop"   a step is delivered if each of its places holds a batch; the stream ends before the first that cannot be
    "pad"    a step is delivered if any place in it or after it holds a batch; empty places are filled with masked batches
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.core.lanes import Topology, Turn


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of some lanes.

    confirmed: their places below this one are looked at. gap: the first of their places without a batch, if one was met.
    reach: just past the last batch seen (or delivered, before the run was restored). ended: no batch is left in any of them.
    """

    confirmed: int
    gap: int | None = None
    reach: int = 0
    ended: bool = False

    @property
    def filled(self) -> int:
        """Every place below this one holds a batch."""
        return self.confirmed if self.gap is None else min(self.confirmed, self.gap)

    def can_fill(self, end: int) -> bool | None:
        """Whether every place below `end` holds a batch; None while that is not known."""
        if self.filled >= end:
            return True
        return False if self.gap is not None and self.gap < end else None

    def goes_on(self, begin: int) -> bool | None:
        """Whether any place from `begin` on holds a batch; None while that is not known."""
        if self.reach > begin:
            return True
        return False if self.ended else None


def together(standings: Iterable[Standing]) -> Standing:
    """What several members know of all their lanes.

    >>> together([Standing(8, reach=8), Standing(9, gap=5, reach=4)])
    Standing(confirmed=5, gap=5, reach=8, ended=False)

    One whose data end late says nothing of one that has not got there:

    >>> together([Standing(6, reach=6), Standing(9, gap=9, reach=8, ended=True)]).can_fill(8) is None
    True
    """
    all_ = list(standings)
    gaps = [standing.gap for standing in all_ if standing.gap is not None]
    return Standing(
        min(standing.filled for standing in all_),
        min(gaps, default=None),
        max(standing.reach for standing in all_),
        all(standing.ended for standing in all_),
    )


def standing_of(lengths: Mapping[int, int], topology: Topology) -> Standing:
    """All there is to know, from the number of batches in every lane."""
    gap = min(topology.place(Turn(lane, length, False)) for lane, length in lengths.items())
    last = [topology.place(Turn(lane, length - 1, False)) for lane, length in lengths.items() if length]
    return Standing(gap, gap, max(last, default=-1) + 1, True)


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of `size` places, counted from `anchor`."""

    size: int
    anchor: int = 0

    def begin(self, place: int) -> int:
        """First place of the step that holds a place."""
        return self.anchor + (place - self.anchor) // self.size * self.size

    def end(self, place: int) -> int:
        """First place of the step after it."""
        return self.begin(place) + self.size


def batches_in(samples: int, size: int, drop_last: bool, flushed_every: int) -> int:
    """Batches that `samples` rows of one lane give when a flush comes after every `flushed_every` of them (0: never).

    >>> batches_in(10, 4, True, 0), batches_in(10, 4, False, 0), batches_in(10, 4, False, 5)
    (2, 3, 4)
    """
    if drop_last:
        return samples // size
    if not flushed_every:
        return -(-samples // size)
    whole, rest = divmod(samples, flushed_every)
    return whole * -(-flushed_every // size) + -(-rest // size)

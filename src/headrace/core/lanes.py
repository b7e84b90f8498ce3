"""Which batch of which lane goes where.

The curriculum is dealt into `lanes` independent streams of batches. Global batch `j` is batch `j // lanes` of lane
`j % lanes`. With `groups` data-parallel groups, group `r` delivers the `j` with `j % groups == r` ("interleaved"); so the
batches of a global step do not depend on how many groups there are. A group whose number does not divide the lanes
computes `lanes / gcd(lanes, groups)` of them and delivers its part. "contiguous" gives each group a block of lanes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from headrace.errors import ConfigError


class Turn(NamedTuple):
    """One batch in global order: its lane, its number in that lane, and whether this group delivers it."""

    lane: int
    number: int
    mine: bool


@dataclass(frozen=True, slots=True)
class Topology:
    """The lanes of a run and this group's place in it."""

    lanes: int = 1
    groups: int = 1
    group: int = 0
    mapping: str = "interleaved"
    node: tuple[int, ...] = ()
    """Groups that share this engine; empty means just `group`."""
    ahead: tuple[tuple[int, int], ...] = ()
    """Lanes that are further than the position that the run continues from, with the number of their next batch."""

    def __post_init__(self) -> None:
        """A contiguous block needs at least one lane per group."""
        if self.mapping == "contiguous" and self.lanes % self.groups:
            raise ConfigError(
                f"mapping_strategy='contiguous' with canonical_replicas={self.lanes} and dp_degree={self.groups}: the groups "
                "must divide the lanes; use 'interleaved', which takes any number"
            )

    @property
    def rank_groups(self) -> int:
        """Groups of ranks; `groups` unless each splits its batches over loader workers."""
        return self.groups

    @property
    def here(self) -> tuple[int, ...]:
        """Groups that are delivered to from here."""
        return self.node or (self.group,)

    @property
    def computed(self) -> tuple[int, ...]:
        """Lanes that are computed here."""
        return tuple(sorted({lane for group in self.here for lane in self._lanes_of(group)}))

    def _lanes_of(self, group: int) -> range:
        if self.mapping == "contiguous":
            block = self.lanes // self.groups
            return range(group * block, (group + 1) * block)
        common = math.gcd(self.lanes, self.groups)
        return range(group % common, self.lanes, common)

    @property
    def overhead(self) -> float:
        """Batches computed for each batch delivered: 1.0 where the groups divide the lanes."""
        return len(self.computed) * self.groups / self.lanes / len(self.here)

    def turns(self, position: int) -> Iterator[Turn]:
        """Batches of the computed lanes in global order, from global batch `position` on, but for those of lanes further on."""
        ahead = dict(self.ahead)
        turns = self._all_turns(position)
        return (turn for turn in turns if turn.number >= ahead.get(turn.lane, 0)) if ahead else turns

    def _all_turns(self, position: int) -> Iterator[Turn]:
        if self.mapping == "contiguous":
            yield from self._contiguous_turns(position)
        lanes, here = frozenset(self.computed), frozenset(self.here)
        j = position
        while True:
            lane = j % self.lanes
            if lane in lanes:
                yield Turn(lane, j // self.lanes, j % self.groups in here)
            j += 1

    def _contiguous_turns(self, position: int) -> Iterator[Turn]:
        block, done = self.lanes // self.groups, position // self.groups
        while True:
            for group in self.here:
                yield Turn(group * block + done % block, done // block, True)
            done += 1

    def owner(self, turn: Turn) -> int:
        """The group that a batch is delivered to."""
        if self.mapping == "contiguous":
            return turn.lane // (self.lanes // self.groups)
        return self.number(turn) % self.groups

    def number(self, turn: Turn) -> int:
        """Where a batch stands in global order."""
        return turn.number * self.lanes + turn.lane

    def after(self, position: int, turn: Turn) -> int:
        """The run's position once a group that stood at `position` has delivered a batch, and its peers theirs.

        A step takes one place of each group. (Turns of lanes that have ended may have been passed over.)
        """
        if self.mapping == "contiguous":
            return (self.place(turn) // self.groups + 1) * self.groups + position % self.groups
        return position + ((self.number(turn) - position) // self.groups + 1) * self.groups

    def passed(self, position: int, turn: Turn) -> int:
        """Places on the way to a batch that the lanes of its group had nothing for."""
        return 0 if self.groups == 1 else self.after(position, turn) - position - self.groups

    def place(self, turn: Turn) -> int:
        """Where a batch stands in the order of delivery: step `s` of one batch a group is places `s * groups` and on."""
        if self.mapping == "contiguous":
            block = self.lanes // self.groups
            return (turn.number * block + turn.lane % block) * self.groups + turn.lane // block
        return self.number(turn)

    def next_place(self, place: int) -> int:
        """The first place after this one that a lane computed here may fill."""
        following = place + 1
        if self.mapping == "contiguous":
            return following + min((group - following) % self.groups for group in self.here)
        lanes = frozenset(self.computed)
        while following % self.lanes not in lanes:
            following += 1
        return following

    def taken(self, position: int, lane: int) -> int:
        """Batches of `lane` among the first `position` of the run, or those it begins behind."""
        return max(self._taken(position, lane), dict(self.ahead).get(lane, 0))

    def _taken(self, position: int, lane: int) -> int:
        if self.mapping == "contiguous":
            block = self.lanes // self.groups
            return _ceil_div(position // self.groups - lane % block, block)
        return _ceil_div(position - lane, self.lanes)


def _ceil_div(a: int, b: int) -> int:
    return max(0, -(-a // b))

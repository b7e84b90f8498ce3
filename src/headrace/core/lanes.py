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

    def __post_init__(self) -> None:
        """A contiguous block needs at least one lane per group."""
        if self.mapping == "contiguous" and self.lanes % self.groups:
            raise ConfigError(
                f"mapping_strategy='contiguous' with canonical_replicas={self.lanes} and dp_degree={self.groups}: the groups "
                "must divide the lanes; use 'interleaved', which takes any number"
            )

    @property
    def computed(self) -> tuple[int, ...]:
        """Lanes that this group computes."""
        if self.mapping == "contiguous":
            block = self.lanes // self.groups
            return tuple(range(self.group * block, (self.group + 1) * block))
        common = math.gcd(self.lanes, self.groups)
        return tuple(range(self.group % common, self.lanes, common))

    @property
    def overhead(self) -> float:
        """Batches computed for each batch delivered: 1.0 where the groups divide the lanes."""
        return len(self.computed) * self.groups / self.lanes

    def turns(self, position: int) -> Iterator[Turn]:
        """Batches of the computed lanes in global order, from global batch `position` on."""
        if self.mapping == "contiguous":
            yield from self._contiguous_turns(position)
        lanes = frozenset(self.computed)
        j = position
        while True:
            lane = j % self.lanes
            if lane in lanes:
                yield Turn(lane, j // self.lanes, j % self.groups == self.group)
            j += 1

    def _contiguous_turns(self, position: int) -> Iterator[Turn]:
        lanes, done = self.computed, position // self.groups
        while True:
            yield Turn(lanes[done % len(lanes)], done // len(lanes), True)
            done += 1

    def taken(self, position: int, lane: int) -> int:
        """Batches of `lane` among the first `position` of the run."""
        if self.mapping == "contiguous":
            block = self.lanes // self.groups
            return _ceil_div(position // self.groups - lane % block, block)
        return _ceil_div(position - lane, self.lanes)


def _ceil_div(a: int, b: int) -> int:
    return max(0, -(-a // b))

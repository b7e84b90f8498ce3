"""How many activations a schedule holds, and how many bytes.

This follows from the order of each row alone, not from times. `release` says when the activations of a microbatch go: at
the weight gradient ("W", what an engine does that keeps the graph), or already at the input gradient ("I", what the
papers count, and what deferred weight gradients come close to). A full backward is both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.parallel.action import Action, Kind
from headrace.parallel.costs import StageCosts
from headrace.parallel.schedule import Schedule

Release = Literal["W", "I"]


@dataclass(frozen=True)
class InFlight:
    """Peak numbers of microbatches held: by stage, and by rank counted in stages and in whole ranks' worth."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    units: tuple[float, ...]


def changes(action: Action, release: Release = "W") -> Iterator[tuple[int, int]]:
    """The stages at which an action takes (+1) or gives back (-1) the activations of one microbatch."""
    gone = {Kind.B, Kind.W if release == "W" else Kind.I}
    for leaf in action.leaves():
        if leaf.kind is Kind.F:
            yield leaf.stage, 1
        elif leaf.kind in gone:
            yield leaf.stage, -1


def peak_in_flight(schedule: Schedule, release: Release = "W") -> InFlight:
    """The most microbatches in flight on each stage and rank."""
    held, peak = [0] * schedule.num_stages, [0] * schedule.num_stages
    rank_peaks: list[int] = []
    for row in schedule.rows:
        total = most = 0
        for action in row:
            for stage, change in changes(action, release):
                held[stage] += change
                total += change
                if change > 0:
                    peak[stage] = max(peak[stage], held[stage])
                    most = max(most, total)
        rank_peaks.append(most)
    per_rank = [max(1, len(schedule.stages_of(rank))) for rank in range(schedule.num_ranks)]
    units = tuple(p / n for p, n in zip(rank_peaks, per_rank, strict=True))
    return InFlight(tuple(peak), tuple(rank_peaks), units)


def fixed_bytes(schedule: Schedule, costs: StageCosts, rank: int) -> int:
    """Bytes that a rank does not get back within a step: its stages' state, and every message that it has sent.

    torch's runtime waits for sends at the end of the step, and what is sent is held until then: M activations for each link to
    a later rank, M gradients for each link to an earlier one. Received tensors are held from their receive to their use.
    """
    total = 0
    place = schedule.stage_to_rank
    for stage in schedule.stages_of(rank):
        total += costs.state[stage]
        for link, peer in ((stage - 1, stage - 1), (stage, stage + 1)):
            if 0 <= peer < schedule.num_stages and place[peer] != rank:
                total += schedule.num_microbatches * costs.boundary[link]
    return total


def peak_bytes(schedule: Schedule, costs: StageCosts, release: Release = "W") -> tuple[int, ...]:
    """The most bytes that each rank holds at once."""
    peaks: list[int] = []
    for rank, row in enumerate(schedule.rows):
        held = most = 0
        for action in row:
            for stage, change in changes(action, release):
                held += change * costs.activation[stage]
                most = max(most, held)
        peaks.append(most + fixed_bytes(schedule, costs, rank))
    return tuple(peaks)

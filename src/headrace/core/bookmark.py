"""Where a pipeline stands while nothing iterates it: what a checkpoint says then, and where the next iteration begins.

A position means something only together with the recipe that it was reached with. So both are kept as one checkpoint, which is
compared with the pipeline whenever it is used; whatever is changed in between, it is neither lost nor taken for another's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.core.checkpoint import LaneState, Snapshot, delivered, differences, position_of, require_lanes
from headrace.core.lanes import Topology
from headrace.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Bookmark:
    """Set by `restore()`, and by a run that has delivered something. A run that fails before that leaves it as it was."""

    state: dict[str, Any] = field(default_factory=dict)
    """A checkpoint. Empty: nothing was restored or delivered."""
    waits: bool = False
    """Whether the next iteration continues from it; otherwise a run has ended there, and the next one begins anew."""
    lanes: int | None = None
    """Lanes of the restored state: later runs have as many, unless an option says how many."""

    def moved(self, state: dict[str, Any]) -> Bookmark:
        """After a run that got as far as `state`."""
        return Bookmark(state, lanes=self.lanes)

    def anew(self) -> Bookmark:
        """Before any run."""
        return Bookmark(lanes=self.lanes)

    def to_copy(self) -> Bookmark:
        """For a copy of the pipeline: it starts where this one would, and knows nothing of runs."""
        return self if self.waits else self.anew()

    def starts_at(self, lanes: Iterable[int]) -> int:
        """Global position of the next iteration's first batch, for a rank with these lanes."""
        return position_of(self.state, lanes) if self.waits else 0

    def of(self, recipe: dict[str, Any], lanes: int) -> dict[str, Any]:
        """The state that a run has left, which must be one of this recipe."""
        total = self.state["canonical_replicas"]
        changed = [f"canonical_replicas: {total} -> {lanes}"] if total != lanes else []
        changed += differences(self.state["recipe"], recipe)
        if changed:
            raise CheckpointError(
                "the pipeline was changed after its last run, and the position of that run is none of the pipeline as it is now:"
                "\n  - " + "\n  - ".join(changed) + "\nTake the checkpoint before the change; iterating begins anew"
            )
        return self.state


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins on a rank."""

    at: Snapshot
    topology: Topology
    apart: bool = False
    """Whether ranks begin at different positions, since groups had ended apart."""

    @classmethod
    def behind(cls, state: Mapping[str, Any], topology: Topology) -> Start:
        """From a checkpoint of all ranks, or of one."""
        lanes = require_lanes(state, topology.computed)
        position = position_of(state, lanes)
        further = {lane: held.reached for lane, held in lanes.items() if held.reached > position}
        ahead = tuple((lane, topology.taken(reached, lane)) for lane, reached in further.items())
        start: dict[int, LaneState] = {
            lane: replace(held, reached=further.get(lane, 0)) for lane, held in lanes.items()
        }
        apart = any("reached" in held for held in state["lanes"].values())
        at = Snapshot(position, start, position - delivered(state))
        return cls(at, replace(topology, ahead=ahead) if ahead else topology, apart)

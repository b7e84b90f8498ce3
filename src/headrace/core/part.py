"""A group whose batches are shared out over several loader workers.

Worker `part` of `parts` delivers the group's batches `part`, `part + parts`, ..., so a loader that asks its workers in turn
receives the group's own order. That makes each worker a finer group, `group + groups * part` of `groups * parts`; only positions
stay those of the whole group, so that the checkpoint of the worker asked last is the group's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.checkpoint import CAUGHT_UP
from headrace.core.lanes import Topology, Turn
from headrace.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class PartTopology(Topology):
    """The place of one worker. `whole` is the number of groups before they were split."""

    whole: int = 1

    @property
    def rank_groups(self) -> int:
        """Groups of ranks."""
        return self.whole

    def after(self, position: int, turn: Turn) -> int:
        """The whole group's position once it has delivered this batch, and its peers theirs."""
        return self.number(turn) + self.whole - (self.group - position) % self.whole

    def passed(self, position: int, turn: Turn) -> int:
        """Unknown: a worker sees only its part of the group's batches."""
        return 0


def split(topology: Topology, part: int, parts: int) -> PartTopology:
    """The place of the worker that delivers batches `part`, `part + parts`, ... of a group."""
    if topology.mapping == "contiguous":
        raise ConfigError(
            "mapping_strategy='contiguous' cannot be split over loader workers: use 'interleaved', or num_workers=0"
        )
    return PartTopology(
        lanes=topology.lanes,
        groups=topology.groups * parts,
        group=topology.group + topology.groups * part,
        whole=topology.groups,
    )


@dataclass(frozen=True, slots=True)
class PartState:
    """What one worker says: which part it delivers, where its loader began (a position), and its checkpoint."""

    part: int
    parts: int
    start: int
    state: Mapping[str, Any]

    @property
    def position(self) -> int:
        """The group's position after this worker's last batch."""
        return int(self.state["position"])


def first_batch(position: int, topology: Topology) -> int:
    """Number, among all batches of a group, of the first that it delivers from a position on."""
    return -((topology.group - position) // topology.groups)


def join(states: Sequence[PartState], whole: Topology) -> dict[str, Any]:
    """The checkpoint of a group from those of all its workers, each taken after the last batch that the loader passed on.

    A lane that only one worker computes stands where that worker left it. One that several compute is taken from the worker
    asked last, and counts what others have delivered since.
    """
    first = states[0]
    parts = sorted(state.part for state in states)
    if parts != list(range(first.parts)) or any(state.parts != first.parts for state in states):
        raise CheckpointError(f"these are the states of parts {parts} of {first.parts}; every worker's is needed")
    latest = max(states, key=lambda state: state.position)
    lanes: dict[str, Any] = {}
    shared = whole.lanes % (whole.groups * first.parts) != 0
    if shared and not _in_step(states, latest.position, whole):
        raise CheckpointError(
            "a lane has ended and the workers no longer take turns, so their states cannot be joined: resume with "
            f"{first.parts} workers"
        )
    for state in sorted(states, key=lambda state: state.position):
        for lane, held in state.state["lanes"].items():
            since = whole.taken(latest.position, int(lane)) - whole.taken(state.position, int(lane)) if shared else 0
            lanes[lane] = {**held, "taken": held["taken"] + since, CAUGHT_UP: True} if since else held
    return {**latest.state, "lanes": dict(sorted(lanes.items(), key=lambda item: int(item[0])))}


def _in_step(states: Sequence[PartState], position: int, whole: Topology) -> bool:
    """Whether each worker's last batch is the newest of its part before `position`."""
    done = first_batch(position, whole)
    for state in states:
        begun = first_batch(state.start, whole)
        newest = done - 1 - (done - 1 - state.part) % state.parts
        if state.position != state.start + max(0, newest + 1 - begun) * whole.groups:
            return False
    return True

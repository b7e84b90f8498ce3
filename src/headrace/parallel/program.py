"""A schedule in the form that the simulator runs: integers in flat lists, made once and used for many costs.

Every forward (stage, microbatch) has the id `stage * M + microbatch`; its backward has the same plus `S * M`. An operation needs
at most one result that it has not made itself: a forward that of the stage before, a backward that of the stage after
(on the last stage, its own forward), a weight gradient its own input gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headrace.parallel.action import Action, Kind
from headrace.parallel.schedule import Schedule

NOTHING = -1


class Operation(NamedTuple):
    """What one leaf needs and makes, as ids; `link` is the boundary its result crosses, or NOTHING."""

    need: int
    makes: int
    link: int
    kind: Kind
    stage: int


@dataclass(frozen=True)
class Program:
    """The operations of each rank in order; an overlapped pair is a tuple of two."""

    schedule: Schedule
    rows: tuple[tuple[tuple[Operation, ...], ...], ...]
    actions: tuple[tuple[Action, ...], ...]

    @staticmethod
    def of(schedule: Schedule) -> Program:
        """Translate the computing actions of a schedule; communication follows from them."""
        size = schedule.num_stages * schedule.num_microbatches
        place = schedule.stage_to_rank
        last = schedule.num_stages - 1
        m = schedule.num_microbatches
        crosses = [a != b for a, b in zip(place, place[1:], strict=False)]

        def translate(action: Action) -> Operation:
            stage, kind, mb = action.stage, action.kind, action.microbatch or 0
            own = stage * m + mb
            if kind is Kind.F:
                need = own - m if stage else NOTHING
                return Operation(need, own, stage if stage < last and crosses[stage] else NOTHING, kind, stage)
            if kind is Kind.W:
                return Operation(own + size, NOTHING, NOTHING, kind, stage)
            need = own + m + size if stage < last else own
            return Operation(need, own + size, stage - 1 if stage and crosses[stage - 1] else NOTHING, kind, stage)

        actions = schedule.rows if not schedule.is_lowered else schedule.compute_only().rows
        rows = tuple(
            tuple([tuple(map(translate, a.parts)) if a.parts else (translate(a),) for a in row]) for row in actions
        )
        return Program(schedule, rows, actions)

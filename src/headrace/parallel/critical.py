"""The critical path of a simulation: shorten any action on it and the step gets shorter; others have slack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.parallel.program import Program
from headrace.parallel.timeline import Span

if TYPE_CHECKING:
    from headrace.parallel.simulate import Simulation


def critical_path(simulation: Simulation) -> tuple[Span, ...]:
    """Walk back from the last end: an action waited for the one before it on its rank, or for its input."""
    program = Program.of(simulation.schedule)
    maker = {
        op.makes: (rank, position)
        for rank, row in enumerate(program.rows)
        for position, operations in enumerate(row)
        for op in operations
        if op.makes >= 0
    }
    starts, ends = simulation.starts, simulation.ends
    rank = max(range(len(ends)), key=lambda r: ends[r][-1] if ends[r] else 0)
    position = len(ends[rank]) - 1
    path: list[Span] = []
    while position >= 0:
        start = starts[rank][position]
        path.append(Span(rank, simulation.actions[rank][position], start, ends[rank][position]))
        if position and ends[rank][position - 1] == start:
            position -= 1
            continue
        makers = [maker[op.need] for op in program.rows[rank][position] if op.need >= 0]
        if not makers:
            break
        rank, position = max(makers, key=lambda at: ends[at[0]][at[1]])
    return tuple(reversed(path))

"""What every picture starts from: a titled timeline with the memory that it holds over time."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.parallel.costs import StageCosts
from headrace.parallel.memory import Release, changes, fixed_bytes
from headrace.parallel.schedule import Schedule
from headrace.parallel.simulate import Simulation
from headrace.parallel.timeline import Timeline

Drawable = Simulation | Timeline
Series = list[tuple[float, float]]  # (seconds, amount from then on)

COLOURS = {
    "F": "#4e79a7",
    "B": "#59a14f",
    "I": "#76b7b2",
    "W": "#e1a23f",
    "OVERLAP_F_B": "#7d6ba8",
    "other": "#bab0ac",
}
# Dark letters on the light colours.
LETTERS = {"I": "#123", "W": "#321"}
FAINT = 0.66  # how strongly every second stage of a rank is painted
WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "OVERLAP_F_B": "forward + backward",
    "other": "communication",
}


@dataclass(frozen=True)
class Panel:
    """One timeline to draw. `memory[r]` is in bytes if costs are known, else in microbatches in flight."""

    title: str
    timeline: Timeline
    memory: tuple[Series, ...]
    unit: str

    @property
    def summary(self) -> str:
        """Step time and both bubbles in words."""
        t = self.timeline
        return f"step {seconds(t.makespan)}, bubble {t.bubble:.1%}, span bubble {t.span_bubble:.1%}"


def panels(drawables: Drawable | list[Drawable]) -> list[Panel]:
    """Make panels of what is to be drawn together, in this order."""
    items = drawables if isinstance(drawables, list) else [drawables]
    result: list[Panel] = []
    for item in items:
        if isinstance(item, Simulation):
            memory = memory_series(item.timeline, "W", item.costs, item.schedule)
            unit = "bytes" if any(item.costs.activation) else "microbatches"
            result.append(Panel(f"{item.schedule.name} ({item.timeline.kind})", item.timeline, memory, unit))
        else:
            result.append(Panel(item.kind, item, memory_series(item), "microbatches"))
    return result


def memory_series(
    timeline: Timeline, release: Release = "W", costs: StageCosts | None = None, schedule: Schedule | None = None
) -> tuple[Series, ...]:
    """What each rank holds over time: a forward takes when it starts, a backward gives back when it ends."""
    steps: list[list[tuple[float, float]]] = [[] for _ in range(timeline.num_ranks)]
    counted = costs is not None and any(costs.activation)
    for span in timeline.compute:
        for stage, change in changes(span.action, release):
            amount = change * costs.activation[stage] if costs is not None and counted else change
            steps[span.rank].append((span.start if change > 0 else span.end, amount))
    result: list[Series] = []
    for rank, row in enumerate(steps):
        held: float = (
            fixed_bytes(schedule, costs, rank) if costs is not None and schedule is not None and counted else 0
        )
        series: Series = [(0.0, held)]
        for at, amount in sorted(row):
            held += amount
            if series[-1][0] == at:
                series[-1] = (at, held)
            else:
                series.append((at, held))
        result.append(series)
    return tuple(result)


def is_faint(timeline: Timeline) -> list[set[int]]:
    """For each rank, every second of its stages: painted lighter, so that the stages of one rank can be told apart."""
    stages: list[set[int]] = [set() for _ in range(timeline.num_ranks)]
    for span in timeline.compute:
        stages[span.rank].update(leaf.stage for leaf in span.action.leaves())
    return [set(sorted(mine)[1::2]) for mine in stages]


def kind_of(kind: str) -> str:
    """The key of a kind in the colours and words."""
    return kind if kind in COLOURS else "other"


def seconds(value: float) -> str:
    """Seconds for a person; times of 1000 and more stand as they are, for they are units and not seconds.

    >>> seconds(0.0215), seconds(33)
    ('21.5 ms', '33 s')
    """
    amount = float(value)
    factor, unit = (1, "s") if amount >= 1 or amount == 0 else (1e3, "ms") if amount >= 1e-3 else (1e6, "us")
    return f"{amount * factor:.4g} {unit}"

"""Pipeline times data parallel: every stage has a replica in each data-parallel group, and gradients are summed over them.

The bubble fraction does not change: each replica runs the same schedule on M = global batch / (replicas x microbatch size)
microbatches. What is new is the reduction. Stage s may reduce once its last backward is done, while other stages still
compute; of a reduction that takes t, only max(0, t - (T - finish_s)) is exposed. The last stages finish first, so theirs is
hidden; the first stage finishes last, at T, and hides nothing. A schedule that splits the backward finishes all ranks late
and hides less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.parallel.action import Kind
from headrace.parallel.simulate import Simulation


@dataclass(frozen=True)
class Reduction:
    """The reduction of one stage's gradients, the same on all replicas; times in seconds of the step."""

    stage: int
    rank: int
    start: float
    end: float
    exposed: float

    @property
    def hidden(self) -> float:
        """Seconds of it that pass while some rank still computes."""
        return self.end - self.start - self.exposed


@dataclass(frozen=True)
class Grid:
    """A step over pipeline ranks x data-parallel replicas. `seconds` is the step with its reductions."""

    simulation: Simulation
    data_parallel: int
    reductions: tuple[Reduction, ...]

    @property
    def seconds(self) -> float:
        """When computation and reductions are all done."""
        return max([self.simulation.makespan, *(r.end for r in self.reductions)])

    @property
    def exposed(self) -> float:
        """Seconds that the reductions add to the step."""
        return self.seconds - self.simulation.makespan

    def explain(self) -> str:
        """Where each reduction runs and how much of it is hidden."""
        ranks = self.simulation.schedule.num_ranks
        lines = [f"{ranks} pipeline ranks x {self.data_parallel} replicas = {ranks * self.data_parallel} processes"]
        for r in self.reductions:
            total = r.end - r.start
            share = r.hidden / total if total else 1.0
            lines.append(
                f"stage {r.stage} (rank {r.rank}): last backward ends at {r.start:.4g}, reduces {total:.4g} s, {share:.0%} hidden"
            )
        lines.append(
            f"the step takes {self.seconds:.4g} s; its reductions take up to "
            f"{max((r.end - r.start for r in self.reductions), default=0):.4g} s and lengthen it by {self.exposed:.4g} s"
        )
        return "\n".join(lines)


def replicate(simulation: Simulation, data_parallel: int, reduce_seconds: float | Sequence[float]) -> Grid:
    """Add the reduction of every stage to a simulated step; those of one rank run one after the other.

    `reduce_seconds` is the time of one stage's reduction over the replicas: for a ring, 2 (D-1)/D x bytes / bandwidth.
    """
    schedule = simulation.schedule
    times = (
        [float(reduce_seconds)] * schedule.num_stages
        if isinstance(reduce_seconds, int | float)
        else list(reduce_seconds)
    )
    if data_parallel < 1:
        raise ConfigError(f"data_parallel is {data_parallel}; it counts replicas, one or more")
    if len(times) != schedule.num_stages or min(times) < 0:
        raise ConfigError(f"reduce_seconds takes {schedule.num_stages} times of zero or more, one a stage; got {times}")
    reductions: list[Reduction] = []
    for rank, row in enumerate(simulation.actions):
        finish: dict[int, float] = {}
        for action, end in zip(row, simulation.ends[rank], strict=True):
            for leaf in action.leaves():
                if leaf.kind in (Kind.B, Kind.W):
                    finish[leaf.stage] = end
        free = 0.0
        for stage, end in sorted(finish.items(), key=lambda item: item[1]):
            start = max(free, end)
            free = start + (times[stage] if data_parallel > 1 else 0.0)
            exposed = max(0.0, free - max(simulation.makespan, start))
            reductions.append(Reduction(stage, rank, start, free, exposed))
    return Grid(simulation, data_parallel, tuple(sorted(reductions, key=lambda r: r.stage)))

"""Run a schedule on stages whose costs are known: when every action starts and ends, and what that means.

Ranks run their rows in order; an action starts when its rank is free and its input has arrived. Messages between two ranks
queue in each direction and take `bytes / bandwidth + latency`; sending costs the rank no time (it is asynchronous, as in
torch's runtime). Times may be integers or fractions, and then every result is exact.

64 stages x 1024 microbatches (131072 actions) take well under a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from headrace.errors import ScheduleError
from headrace.parallel.action import Action, Kind
from headrace.parallel.bound import lower_bound
from headrace.parallel.costs import StageCosts
from headrace.parallel.memory import Release, peak_bytes, peak_in_flight
from headrace.parallel.program import NOTHING, Operation, Program
from headrace.parallel.schedule import Schedule
from headrace.parallel.timeline import Span, Timeline


@dataclass(frozen=True)
class Simulation:
    """What a schedule does at given costs. Times are seconds; `starts[r][i]` and `ends[r][i]` are those of `actions[r][i]`."""

    schedule: Schedule
    costs: StageCosts
    actions: tuple[tuple[Action, ...], ...]
    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]

    @cached_property
    def makespan(self) -> float:
        """Seconds until the last rank is done."""
        return max((row[-1] for row in self.ends if row), default=0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def bubble(self) -> float:
        """Idle share of all ranks over the makespan."""
        return 1 - sum(self.busy) / (self.makespan * self.schedule.num_ranks) if self.makespan else 0

    @property
    def span(self) -> float:
        """The longest stretch from first to last action of a rank: the period of a steady run of steps."""
        return max((e[-1] - s[0] for s, e in zip(self.starts, self.ends, strict=True) if s), default=0)

    @property
    def span_bubble(self) -> float:
        """Idle share of all ranks over the span."""
        return 1 - sum(self.busy) / (self.span * self.schedule.num_ranks) if self.span else 0

    @cached_property
    def lower_bound(self) -> float:
        """A time that no order of these actions within this memory can beat."""
        return lower_bound(self.schedule, self.costs)

    @property
    def gap(self) -> float:
        """How much slower than the lower bound: 0.05 is five per cent."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else 0

    def peak_activations(self, release: Release = "W") -> tuple[int, ...]:
        """Most microbatches whose activations each stage holds at once."""
        return peak_in_flight(self.schedule, release).stages

    def peak_bytes(self, release: Release = "W") -> tuple[int, ...]:
        """Most bytes that each rank holds at once: state, activations and boundary buffers."""
        return peak_bytes(self.schedule, self.costs, release)

    @cached_property
    def timeline(self) -> Timeline:
        """The same as spans, to draw or to lay beside a measured run."""
        spans = [
            Span(rank, action, start, end)
            for rank, row in enumerate(self.actions)
            for action, start, end in zip(row, self.starts[rank], self.ends[rank], strict=True)
        ]
        return Timeline(tuple(spans), self.schedule.num_ranks, "predicted")

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of actions, each waiting for the one before, that decides the makespan; first to last."""
        from headrace.parallel.critical import critical_path

        return critical_path(self)


def simulate(schedule: Schedule | Program, costs: StageCosts) -> Simulation:
    """Simulate a schedule; a `Program` saves the translation when one schedule meets many costs.

    >>> from headrace.parallel.builders import build
    >>> simulate(build("1f1b", 4, 8), StageCosts.uniform(4)).makespan
    33
    """
    program = schedule if isinstance(schedule, Program) else Program.of(schedule)
    stages = program.schedule.num_stages
    if costs.num_stages != stages:
        raise ScheduleError(
            f"schedule {program.schedule.name!r} has {stages} stages, the costs describe {costs.num_stages}; give one "
            "cost a stage (stages = ranks x chunks)"
        )
    return _Run(program, costs).result()


class _Run:
    """The state of one simulation."""

    def __init__(self, program: Program, costs: StageCosts) -> None:
        schedule = program.schedule
        self.program = program
        self.costs = costs
        ids = 2 * schedule.num_stages * schedule.num_microbatches
        self.arrival: list[float] = [-1] * ids
        self.waiting = [NOTHING] * ids
        self.position = [0] * schedule.num_ranks
        self.starts: tuple[list[float], ...] = tuple([] for _ in program.rows)
        self.ends: tuple[list[float], ...] = tuple([] for _ in program.rows)
        self.wire = [costs.wire(link) for link in range(schedule.num_stages - 1)]
        self.link_free: dict[tuple[int, int], float] = {}
        self.seconds = {
            Kind.F: costs.forward,
            Kind.I: costs.backward_input,
            Kind.W: costs.backward_weight,
            Kind.B: costs.backward,
        }

    def result(self) -> Simulation:
        """Run every rank as far as it can go, again and again, until all are done or none can move."""
        runnable = list(range(len(self.program.rows)))
        while runnable:
            runnable.extend(self.advance(runnable.pop()))
        for rank, row in enumerate(self.program.rows):
            if self.position[rank] < len(row):
                action = self.program.actions[rank][self.position[rank]]
                raise ScheduleError(
                    f"schedule {self.program.schedule.name!r} cannot run: rank {rank} waits at action "
                    f"{self.position[rank]} ({action}) for a result that is never made; prove() says which and why"
                )
        return Simulation(self.program.schedule, self.costs, self.program.actions, self.starts, self.ends)

    def advance(self, rank: int) -> list[int]:
        """Run one rank until it must wait; give the ranks that this set free."""
        row, starts, ends = self.program.rows[rank], self.starts[rank], self.ends[rank]
        arrival, waiting, seconds, latency = self.arrival, self.waiting, self.seconds, self.costs.latency
        clock = ends[-1] if ends else 0
        freed: list[int] = []
        for position in range(self.position[rank], len(row)):
            operations = row[position]
            start = clock
            for need, _, _, kind, _ in operations:
                if need < 0:
                    continue
                at = arrival[need]
                if at < 0:
                    waiting[need] = rank
                    self.position[rank] = position
                    return freed
                if at > start and kind is not Kind.W:
                    start = at
            if len(operations) == 1:
                clock = start + seconds[operations[0].kind][operations[0].stage]
            else:
                clock = start + self.pair_seconds(operations)
            starts.append(start)
            ends.append(clock)
            for _, makes, link, kind, _ in operations:
                if makes < 0:
                    continue
                if link < 0:
                    arrival[makes] = clock
                elif self.wire[link]:
                    arrival[makes] = self.queue(kind, link, clock) + latency[link]
                else:
                    arrival[makes] = clock + latency[link]
                if waiting[makes] >= 0:
                    freed.append(waiting[makes])
                    waiting[makes] = NOTHING
        self.position[rank] = len(row)
        return freed

    def pair_seconds(self, operations: tuple[Operation, ...]) -> float:
        """Seconds of an overlapped pair."""
        first, second = (self.seconds[op.kind][op.stage] for op in operations)
        return first + second - self.costs.overlap * min(first, second)

    def queue(self, kind: Kind, link: int, ready: float) -> float:
        """When a message that is ready has left the wire; messages between two ranks queue in each direction."""
        place = self.program.schedule.stage_to_rank
        ends = (place[link], place[link + 1]) if kind is Kind.F else (place[link + 1], place[link])
        done = max(ready, self.link_free.get(ends, 0)) + self.wire[link]
        self.link_free[ends] = done
        return done

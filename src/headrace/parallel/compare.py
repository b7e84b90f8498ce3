"""Where the time of a real step went: predicted beside measured, and the lost time split by cause.

The split asks four times how long the step would have taken, each time with one more fault of the real world put back:

1. all stages equally fast, free communication: what is lost is the fill and drain bubble of the schedule
2. every stage as fast as its median: the rest is imbalance
3. messages as slow as the links: the rest is exposed communication
4. as it was: the rest is jitter (times that vary, waits that the model does not know, clocks that disagree)

So the four add up to the lost time exactly. Times are seconds; lost time is per rank, on average.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from headrace.errors import ConfigError
from headrace.parallel.action import Action, Kind
from headrace.parallel.costs import StageCosts
from headrace.parallel.lower import need_of
from headrace.parallel.schedule import Schedule
from headrace.parallel.simulate import Simulation, simulate
from headrace.parallel.timeline import Span, Timeline


@dataclass(frozen=True)
class Comparison:
    """A measured step beside its prediction. Seconds; `busy` and the four losses are per rank, on average."""

    predicted: float
    measured: float
    busy: float
    fill_drain: float
    imbalance: float
    communication: float
    jitter: float
    stages: tuple[StageLine, ...]

    @property
    def error(self) -> float:
        """How much longer than predicted the step took: 0.05 is five per cent."""
        return self.measured / self.predicted - 1 if self.predicted else 0.0

    @property
    def lost(self) -> float:
        """Seconds of the step in which a rank did not compute, on average."""
        return self.fill_drain + self.imbalance + self.communication + self.jitter

    def explain(self) -> str:
        """The comparison as a table."""
        lines = [
            f"step {self.measured:.4g} s measured, {self.predicted:.4g} s predicted ({self.error:+.1%})",
            f"{'computing':<22} {self.busy:>10.4g} s {self._share(self.busy)}",
        ]
        for word, value in (
            ("fill and drain bubble", self.fill_drain),
            ("imbalance of stages", self.imbalance),
            ("exposed communication", self.communication),
            ("jitter", self.jitter),
        ):
            # What is left of rounding is nothing.
            seconds = value if abs(value) > 1e-9 * self.measured else 0.0
            lines.append(f"{word:<22} {seconds:>10.4g} s {self._share(seconds)}")
        lines.append(f"{'stage':>5} {'kind':<4} {'predicted':>10} {'median':>10} {'slowest':>10}")
        return "\n".join(lines + [str(line) for line in self.stages])

    def _share(self, value: float) -> str:
        return f"{value / self.measured:>7.1%}" if self.measured else f"{'-':>7}"


@dataclass(frozen=True)
class StageLine:
    """One kind of work of one stage: predicted seconds, and the median and slowest measured."""

    stage: int
    kind: str
    predicted: float
    median: float
    slowest: float

    def __str__(self) -> str:
        """A line of the table."""
        return f"{self.stage:>5} {self.kind:<4} {self.predicted:>10.4g} {self.median:>10.4g} {self.slowest:>10.4g}"


def compare(predicted: Simulation, measured: Timeline) -> Comparison:
    """Lay a measured timeline beside the simulation that foretold it; both must run the same actions."""
    schedule = _schedule_of(measured, predicted.schedule)
    times = _durations(measured)
    medians = {key: median(values) for key, values in times.items()}
    real = _costs(medians, schedule.num_stages)
    links = _latencies(measured, schedule)
    level = _levelled(real)
    busy = sum(simulate(schedule, real).busy) / schedule.num_ranks
    equal = float(simulate(schedule, level).makespan)
    uneven = float(simulate(schedule, real).makespan)
    linked = float(simulate(schedule, replace(real, latency=links)).makespan)
    return Comparison(
        float(predicted.makespan),
        float(measured.makespan),
        float(busy),
        equal - float(busy),
        uneven - equal,
        linked - uneven,
        float(measured.makespan) - linked,
        tuple(_lines(predicted.costs, times)),
    )


def _schedule_of(measured: Timeline, expected: Schedule) -> Schedule:
    """The schedule that was run, by its recorded order; an action too many or too few is an error that names it."""
    rows = [[s.action for s in measured.of_rank(r) if s.action.is_compute] for r in range(measured.num_ranks)]
    if len(rows) != expected.num_ranks:
        raise ConfigError(
            f"the measured timeline has {len(rows)} ranks, the prediction {expected.num_ranks}; gather the spans of all ranks"
        )
    for rank, (have, want) in enumerate(zip(rows, expected.compute_only().rows, strict=True)):
        odd = sorted(set(want) ^ set(have), key=str)
        if odd:
            where = "was not recorded" if odd[0] in want else "was not planned"
            raise ConfigError(
                f"rank {rank}: {odd[0]} {where} ({len(have)} recorded, {len(want)} planned); compare a step with the plan it ran"
            )
    return replace(expected, rows=tuple(tuple(row) for row in rows))


def _durations(measured: Timeline) -> dict[tuple[int, Kind], list[float]]:
    """Seconds of every leaf, by stage and kind.

    The halves of an overlapped pair cannot be seen apart: it is shared as the same work takes alone, or one to two.
    """
    times: dict[tuple[int, Kind], list[float]] = {}
    for span in measured.compute:
        if not span.action.parts:
            times.setdefault((span.action.stage, span.action.kind), []).append(float(span.duration))
    alone = {key: median(values) for key, values in times.items()}
    for span in measured.compute:
        if span.action.parts:
            first, second = span.action.parts
            forward, backward = alone.get((first.stage, first.kind)), alone.get((second.stage, second.kind))
            share = forward / (forward + backward) if forward and backward else 1 / 3
            times.setdefault((first.stage, first.kind), []).append(float(span.duration) * share)
            times.setdefault((second.stage, second.kind), []).append(float(span.duration) * (1 - share))
    return times


def _costs(medians: dict[tuple[int, Kind], float], num_stages: int) -> StageCosts:
    """Costs from medians; where only full backwards were run, they are halved (only the sum matters then)."""
    halves = [medians.get((s, Kind.B), 0.0) / 2 for s in range(num_stages)]
    return StageCosts(
        tuple(medians.get((s, Kind.F), 0.0) for s in range(num_stages)),
        tuple(medians.get((s, Kind.I), halves[s]) for s in range(num_stages)),
        tuple(medians.get((s, Kind.W), halves[s]) for s in range(num_stages)),
    )


def _levelled(costs: StageCosts) -> StageCosts:
    """The same total work, shared equally by all stages."""

    def level(values: tuple[float, ...]) -> tuple[float, ...]:
        return (sum(values) / len(values),) * len(values)

    return replace(
        costs,
        forward=level(costs.forward),
        backward_input=level(costs.backward_input),
        backward_weight=level(costs.backward_weight),
    )


def _latencies(measured: Timeline, schedule: Schedule) -> tuple[float, ...]:
    """One-way seconds of each link: the median wait of a computation that had nothing else to wait for.

    Such a computation starts when its message arrives, so the time since the sender was done is the link's. Where none waited,
    communication was hidden, and the link counts as free.
    """
    made: dict[tuple[int, str, int | None], Span] = {}
    for span in measured.compute:
        for leaf in span.action.leaves():
            if leaf.kind is not Kind.W:
                made[leaf.stage, "F" if leaf.kind is Kind.F else "B", leaf.microbatch] = span
    waits: dict[int, list[float]] = {}
    for rank in range(measured.num_ranks):
        free = 0.0
        for span in (s for s in measured.of_rank(rank) if s.action.is_compute):
            for link, maker in _makers(schedule, span.action, made):
                if maker.rank != rank and maker.end >= free and span.start > free:
                    waits.setdefault(link, []).append(max(0.0, float(span.start - maker.end)))
            free = float(span.end)
    return tuple(median(waits[link]) if link in waits else 0.0 for link in range(schedule.num_stages - 1))


def _makers(
    schedule: Schedule, action: Action, made: dict[tuple[int, str, int | None], Span]
) -> Iterable[tuple[int, Span]]:
    """The links over which an action's inputs come, with the spans that made them."""
    for leaf in action.leaves():
        need = need_of(schedule, leaf)
        if need is not None and need in made and need[0] != leaf.stage:
            yield min(need[0], leaf.stage), made[need]


def _lines(costs: StageCosts, times: dict[tuple[int, Kind], list[float]]) -> Iterable[StageLine]:
    """Predicted and measured seconds of each stage and kind."""
    planned = {
        Kind.F: costs.forward,
        Kind.I: costs.backward_input,
        Kind.W: costs.backward_weight,
        Kind.B: costs.backward,
    }
    for stage, kind in sorted(times, key=lambda key: (key[0], "FBIW".index(key[1].value))):
        values = times[stage, kind]
        yield StageLine(stage, kind.value, float(planned[kind][stage]), median(values), max(values))

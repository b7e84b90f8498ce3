"""Cut layers into stages: by measured time, not by number of layers or parameters.

`partition` is exact: of all contiguous cuts that fit in memory, one whose slowest stage is fastest. `balance` starts there and
moves single layers across cuts as long as the simulated step gets shorter, because the slowest stage is not the whole story: a
stage at the end of the pipe may take a little more for free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from headrace.errors import ConfigError
from headrace.parallel.costs import StageCosts
from headrace.parallel.layers import Hardware, LayerCost, cut, even_split, parameter_bytes, stage_costs, ties_across
from headrace.parallel.memory import peak_bytes, peak_in_flight
from headrace.parallel.program import Program
from headrace.parallel.schedule import Schedule
from headrace.parallel.simulate import simulate


def partition(
    layers: Sequence[LayerCost],
    num_stages: int,
    *,
    memory: float | Sequence[float] = math.inf,
    held: Sequence[int] | None = None,
    state_factor: float = 4.0,
) -> tuple[int, ...]:
    """Layers per stage with the least slowest stage, by dynamic programming.

    `memory` is the cap of each stage in bytes (one number, or one a stage). `held[s]` microbatches are in flight on stage s, so it
    needs `state_factor x parameters + held[s] x activation`; without `held`, one.

    >>> partition([LayerCost.of("emb", 2, 4), *[LayerCost.of("block", 1, 2)] * 4, LayerCost.of("head", 3, 6)], 3)
    (2, 3, 1)
    """
    if not 1 <= num_stages <= len(layers):
        raise ConfigError(f"{len(layers)} layers cannot fill {num_stages} stages; each stage holds at least one layer")
    caps = [float(memory)] * num_stages if isinstance(memory, int | float) else [float(cap) for cap in memory]
    flight = list(held) if held is not None else [1] * num_stages
    if len(caps) != num_stages or len(flight) != num_stages:
        raise ConfigError(
            f"memory and held take one value for each of {num_stages} stages; got {len(caps)}, {len(flight)}"
        )
    best: list[float] = [0.0] + [math.inf] * len(layers)
    choice: list[list[int]] = []
    for stage in range(num_stages):
        best, back = _extend(layers, best, caps[stage], (flight[stage], state_factor))
        choice.append(back)
    if best[-1] == math.inf:
        raise ConfigError(_no_fit(layers, caps, flight, state_factor))
    counts: list[int] = []
    end = len(layers)
    for back in reversed(choice):
        counts.append(end - back[end])
        end = back[end]
    return tuple(reversed(counts))


def _extend(
    layers: Sequence[LayerCost], best: list[float], cap: float, load: tuple[int, float]
) -> tuple[list[float], list[int]]:
    """Add one stage: for each prefix of the layers, the best slowest stage, and where that last stage begins.

    Going back from the end the new stage only grows, so the search stops once it alone is too slow or too big.
    """
    result = [math.inf] * len(best)
    back = [0] * len(best)
    for end in range(1, len(best)):
        if layers[end - 1].glued and end < len(layers):
            continue
        seconds = 0.0
        activation = 0
        for begin in range(end - 1, -1, -1):
            seconds += layers[begin].seconds
            activation += layers[begin].activation
            if seconds >= result[end]:
                break
            if cap < math.inf and parameter_bytes(layers[begin:end]) * load[1] + activation * load[0] > cap:
                break
            slowest = max(best[begin], seconds)
            if slowest < result[end]:
                result[end], back[end] = slowest, begin
    return result, back


def _no_fit(layers: Sequence[LayerCost], caps: list[float], flight: list[int], factor: float) -> str:
    """Why no cut fits: a layer too big by itself, or all of them together."""
    for layer in layers:
        need = layer.parameters * factor + min(flight) * layer.activation
        if need > max(caps):
            return (
                f"layer {layer.name!r} alone needs {need:.0f} bytes, the largest stage may hold {max(caps):.0f}; "
                "shard it, checkpoint its activations, or raise the cap"
            )
    return (
        f"no cut of {len(layers)} layers into {len(caps)} stages fits in {min(caps):.0f} bytes a stage; use more stages, "
        "a schedule that holds fewer microbatches, activation checkpointing, or a higher cap (glued layers narrow the choice)"
    )


Score = tuple[float, float]  # bytes over the cap, seconds: fitting comes first


@dataclass(frozen=True)
class Balance:
    """A cut and what it gains; times in seconds for one step of `schedule`."""

    counts: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    costs: StageCosts
    makespan: float
    even_counts: tuple[int, ...]
    even_makespan: float
    ties: dict[str, tuple[int, ...]]
    stage_to_rank: tuple[int, ...]

    @property
    def gain(self) -> float:
        """The share of the even split's time that this cut saves."""
        return 1 - self.makespan / self.even_makespan if self.even_makespan else 0.0

    def explain(self) -> str:
        """The cut in words."""
        lines = [f"{'stage':>5} {'layers':>6} {'seconds':>9}  contents"]
        for stage, names in enumerate(self.names):
            seconds = self.costs.forward[stage] + self.costs.backward[stage]
            shown = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            lines.append(f"{stage:>5} {len(names):>6} {seconds:>9.4g}  {shown}")
        lines.append(
            f"step {self.makespan:.4g} s; even split {list(self.even_counts)} {self.even_makespan:.4g} s: {self.gain:.1%} saved"
        )
        for name, stages in self.ties.items():
            where = f"tied {name!r} is on stages {', '.join(map(str, stages))}"
            ranks = sorted({self.stage_to_rank[stage] for stage in stages})
            if len(ranks) == 1:
                lines.append(f"{where}, all on rank {ranks[0]}: held once")
            else:
                lines.append(f"{where}: its gradients are summed over ranks {', '.join(map(str, ranks))}")
        return "\n".join(lines)


def balance(
    layers: Sequence[LayerCost],
    schedule: Schedule,
    *,
    hardware: Hardware | None = None,
    memory: float = math.inf,
    even: Sequence[int] | None = None,
) -> Balance:
    """The best cut found for a schedule: the exact minimax cut, then single layers moved while the simulated step shrinks.

    `memory` is the cap of a rank in bytes. `even` is the cut to compare with; by default equal numbers of layers.
    """
    hardware = hardware or Hardware()
    program = Program.of(schedule)
    sample = Program.of(_sample(schedule))
    even_counts = tuple(even) if even is not None else even_split(len(layers), schedule.num_stages)

    def score(counts: Sequence[int], on: Program = sample) -> Score:
        costs = stage_costs(layers, counts, hardware, schedule.stage_to_rank)
        over = max(0.0, max(peak_bytes(schedule, costs)) - memory) if memory < math.inf else 0.0
        return over, simulate(on, costs).makespan

    first = _first_cut(layers, schedule, hardware, memory)
    moved, _ = _descend(layers, first, score)
    (over, best), counts = min((score(c, program), c) for c in {first, moved})
    if over:
        peaks = peak_bytes(schedule, stage_costs(layers, counts, hardware, schedule.stage_to_rank))
        rank = peaks.index(max(peaks))
        raise ConfigError(
            f"schedule {schedule.name!r}: rank {rank} needs {max(peaks)} bytes, its cap is {memory:.0f}; take a schedule that "
            "holds fewer microbatches, checkpoint activations, or use more ranks"
        )
    return Balance(
        counts,
        tuple(tuple(layer.name for layer in stage) for stage in cut(layers, counts)),
        stage_costs(layers, counts, hardware, schedule.stage_to_rank),
        best,
        even_counts,
        simulate(program, stage_costs(layers, even_counts, hardware)).makespan,
        ties_across(layers, counts),
        schedule.stage_to_rank,
    )


def _sample(schedule: Schedule) -> Schedule:
    """Enough of a long schedule to judge cuts by: fill, drain, and three times the depth between them."""
    enough = 4 * schedule.num_ranks
    long = schedule.num_microbatches > enough and schedule.num_stages * schedule.num_microbatches > 1000
    return schedule.take(enough) if long else schedule


def _first_cut(layers: Sequence[LayerCost], schedule: Schedule, hardware: Hardware, memory: float) -> tuple[int, ...]:
    """The exact cut to start from; where a rank holds one stage, one that fits."""
    if memory < math.inf and schedule.num_stages == schedule.num_ranks:
        held = peak_in_flight(schedule).stages
        return partition(layers, schedule.num_stages, memory=memory, held=held, state_factor=hardware.state_factor)
    return partition(layers, schedule.num_stages)


def _descend(
    layers: Sequence[LayerCost], counts: tuple[int, ...], score: Callable[[Sequence[int]], Score]
) -> tuple[tuple[int, ...], Score]:
    """Move one layer from a stage to another (all cuts between shift by one) while that helps; the best neighbour each time."""
    best = score(counts)
    while True:
        tried = {moved: score(moved) for moved in _neighbours(layers, counts)}
        if not tried:
            return counts, best
        nearest = min(tried, key=lambda c: tried[c])
        if tried[nearest] >= best:
            return counts, best
        counts, best = nearest, tried[nearest]


def _neighbours(layers: Sequence[LayerCost], counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Cuts where one stage has one layer less and another, near it, one more."""
    reach = len(counts) if len(counts) <= 8 else 2
    for giver in range(len(counts)):
        if counts[giver] < 2:
            continue
        for taker in range(max(0, giver - reach), min(len(counts), giver + reach + 1)):
            if taker != giver:
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                ends = accumulate(moved)
                if not any(layers[end - 1].glued for end in ends if end < len(layers)):
                    yield tuple(moved)

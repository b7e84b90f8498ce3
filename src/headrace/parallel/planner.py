"""Which schedule, and which cut: every candidate with its time, bubble, bytes and gap, and why it was not taken.

The choice is the fastest that fits. Memory is counted as torch's runtime spends it: activations until the weight gradient,
all that is sent in the step, parameters with gradients and optimizer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from headrace.errors import ConfigError
from headrace.parallel.builders.registry import build, recipe, schedules
from headrace.parallel.check import Proof, prove
from headrace.parallel.compare import Comparison, compare
from headrace.parallel.formulas import check_counts
from headrace.parallel.layers import Hardware, LayerCost, even_split, recompute_peak, stage_costs, with_checkpointing
from headrace.parallel.memory import peak_bytes
from headrace.parallel.partition import balance
from headrace.parallel.schedule import Schedule
from headrace.parallel.simulate import Simulation, simulate
from headrace.parallel.timeline import Timeline


@dataclass(frozen=True)
class Candidate:
    """One schedule with its cut. Seconds for one step; `peak_bytes` by rank; `rejected` says why not, or is empty."""

    schedule: str
    chunks: int
    checkpointing: bool
    counts: tuple[int, ...] = ()
    seconds: float = math.inf
    bubble: float = 0.0
    span_bubble: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    gap: float = 0.0
    gain: float = 0.0
    rejected: str = ""

    @property
    def label(self) -> str:
        """Name, stages a rank if more than one, and whether activations are recomputed."""
        chunks = f" v={self.chunks}" if self.chunks > 1 else ""
        return f"{self.schedule}{chunks}{' + recompute' if self.checkpointing else ''}"


@dataclass(frozen=True)
class Plan:
    """All candidates, fastest that fits first; what to run, and what to expect of it."""

    candidates: tuple[Candidate, ...]
    layers: tuple[LayerCost, ...]
    num_ranks: int
    num_microbatches: int
    memory: float
    hardware: Hardware

    @property
    def choice(self) -> Candidate:
        """The fastest that fits; an error that says what would help if none does."""
        best = self.candidates[0]
        if best.rejected and not math.isfinite(best.seconds):
            raise ConfigError(f"no schedule is possible: {best.rejected}")
        if best.peak_bytes and max(best.peak_bytes) > self.memory:
            least = min((c for c in self.candidates if c.peak_bytes), key=lambda c: max(c.peak_bytes))
            raise ConfigError(
                f"no schedule fits in {size(self.memory)} a rank; the least is {least.label} with {size(max(least.peak_bytes))}. "
                "Use more ranks, smaller microbatches, checkpointing, or more memory"
            )
        return best

    @property
    def pareto(self) -> tuple[Candidate, ...]:
        """The candidates worth having at some memory: none is both faster and smaller. Fastest first, fitting or not."""
        best: list[Candidate] = []
        for c in sorted((c for c in self.candidates if c.peak_bytes), key=lambda c: (c.seconds, max(c.peak_bytes))):
            if not best or max(c.peak_bytes) < max(best[-1].peak_bytes):
                best.append(c)
        return tuple(best)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of the choice."""
        free = recipe(self.choice.schedule).free_chunks
        chunks = self.choice.chunks if free else None
        return build(self.choice.schedule, self.num_ranks, self.num_microbatches, chunks=chunks)

    @cached_property
    def simulation(self) -> Simulation:
        """The predicted step of the choice: its timeline is what a measured one is compared with."""
        layers = with_checkpointing(self.layers) if self.choice.checkpointing else self.layers
        return simulate(
            self.schedule, stage_costs(layers, self.choice.counts, self.hardware, self.schedule.stage_to_rank)
        )

    @property
    def num_layers_per_stage(self) -> tuple[int, ...]:
        """The cut of the choice."""
        return self.choice.counts

    @property
    def recompute(self) -> bool:
        """Whether the choice recomputes activations: `split_model` is to be told, or the memory planned for will not do."""
        return self.choice.checkpointing

    def prove(self) -> Proof:
        """The static proof of the choice."""
        return prove(self.schedule)

    def compare(self, measured: Timeline) -> Comparison:
        """Where the time of a measured step went, beside what was planned."""
        return compare(self.simulation, measured)

    def save_html(self, path: str | Path) -> None:
        """Write the predicted step as a page to look at."""
        from headrace.parallel.draw import to_html

        Path(path).write_text(to_html(self.simulation), encoding="utf-8")

    def explain(self) -> str:
        """The table of candidates and the choice."""
        head = f"{'schedule':<32} {'step s':>10} {'bubble':>7} {'span':>7} {'peak/rank':>10} {'to bound':>8}  verdict"
        lines = [
            f"{len(self.layers)} layers on {self.num_ranks} ranks, {self.num_microbatches} microbatches, "
            f"memory {size(self.memory)} a rank",
            head,
        ]
        for c in self.candidates:
            if math.isfinite(c.seconds):
                gap = max(0.0, c.gap)
                numbers = f"{c.seconds:>10.4g} {c.bubble:>7.1%} {c.span_bubble:>7.1%} {size(max(c.peak_bytes)):>10} {gap:>8.1%}"
            else:
                numbers = f"{'-':>10} {'-':>7} {'-':>7} {'-':>10} {'-':>8}"
            lines.append(f"{c.label:<32} {numbers}  {c.rejected or 'chosen'}")
        if not self.candidates[0].rejected:
            best = self.choice
            lines.append(f"layers per stage {list(best.counts)}: {best.gain:.1%} faster than the even split")
        return "\n".join(lines)


def plan_layers(
    layers: Sequence[LayerCost],
    num_ranks: int,
    num_microbatches: int,
    *,
    memory: float = math.inf,
    hardware: Hardware | None = None,
    names: Sequence[str] | None = None,
    checkpointing: Sequence[bool] = (False, True),
) -> Plan:
    """Plan a step from costs by layer.

    `memory` is the cap of a rank in bytes; `names` the schedules to try (all by default); `checkpointing` whether to try without
    and with recomputing activations. Deterministic: equal inputs give equal plans.
    """
    check_counts(num_ranks, num_microbatches)
    if not layers:
        raise ConfigError("no layers to plan for; give the cost of each layer, in order")
    hardware = hardware or Hardware()
    found = [
        _candidate(name, chunks, recompute, (layers, num_ranks, num_microbatches, memory, hardware))
        for name in (names or schedules())
        for chunks in ((2, 3) if recipe(name).free_chunks else (recipe(name).chunks,))
        for recompute in checkpointing
    ]
    ranked = sorted(found, key=lambda c: (c.rejected != "", c.seconds, max(c.peak_bytes, default=0), c.label))
    judged = [ranked[0]]
    for c in ranked[1:]:
        if c.rejected or ranked[0].rejected:
            judged.append(c)
        elif c.seconds == ranked[0].seconds:
            judged.append(
                replace(c, rejected="as fast, but holds more" if c.peak_bytes != ranked[0].peak_bytes else "equal")
            )
        else:
            judged.append(replace(c, rejected=f"{c.seconds / ranked[0].seconds - 1:.1%} slower"))
    return Plan(tuple(judged), tuple(layers), num_ranks, num_microbatches, memory, hardware)


def _candidate(
    name: str,
    chunks: int,
    recompute: bool,
    problem: tuple[Sequence[LayerCost], int, int, float, Hardware],
) -> Candidate:
    """Balance, simulate and judge one schedule."""
    layers, num_ranks, num_microbatches, memory, hardware = problem
    blank = Candidate(name, chunks, recompute)
    if num_ranks * chunks > len(layers):
        return replace(blank, rejected=f"needs {num_ranks * chunks} stages, there are {len(layers)} layers")
    schedule = build(name, num_ranks, num_microbatches, chunks=chunks if recipe(name).free_chunks else None)
    costed = with_checkpointing(layers) if recompute else layers
    extra = recompute_peak(layers) if recompute else 0
    try:
        cut = balance(costed, schedule, hardware=hardware, memory=memory - extra)
    except ConfigError:
        # No cut fits: show what the even one would take, so that the reader sees by how much.
        counts, gain = even_split(len(layers), schedule.num_stages), 0.0
    else:
        counts, gain = cut.counts, cut.gain
    costs = stage_costs(costed, counts, hardware, schedule.stage_to_rank)
    run = simulate(schedule, costs)
    peaks = tuple(peak + extra for peak in peak_bytes(schedule, costs))
    worst = peaks.index(max(peaks))
    rejected = f"rank {worst} needs {size(max(peaks))}, cap {size(memory)}" if max(peaks) > memory else ""
    return replace(
        blank,
        counts=counts,
        seconds=float(run.makespan),
        bubble=float(run.bubble),
        span_bubble=float(run.span_bubble),
        peak_bytes=peaks,
        gap=float(run.gap),
        gain=gain,
        rejected=rejected,
    )


def size(num_bytes: float) -> str:
    """Bytes for a person.

    >>> size(6.5 * 2**30), size(float("inf"))
    ('6.5 GiB', 'unlimited')
    """
    if num_bytes == math.inf:
        return "unlimited"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def parse_size(text: str) -> float:
    """Bytes from what a person writes: a number with B, KiB, MiB, GiB, KB, MB or GB, or "unlimited".

    >>> parse_size("6GiB") == 6 * 2**30, parse_size("500 MB")
    (True, 500000000.0)
    """
    if text.strip().lower() == "unlimited":
        return math.inf
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(i?)B?\s*", text)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not number > 0:
        raise ConfigError(f"{text!r} is not a size; write a number and a unit, such as 6GiB or 500MB")
    return number * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")

"""Does a training configuration fit together, and if not, what would?

A global step of `global_batch_size` rows is `global_batch_size / microbatch_size` batches. Every data-parallel group delivers
the same number of them, and which batches a step holds never depends on how many groups there are. So the one hard rule is
that the groups divide the batches of a step; lanes (`canonical_replicas`) only decide what that costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from headrace.core.lanes import Topology
from headrace.errors import ConfigError

NEAREST: Final = 4
"""Values offered in place of one that does not fit."""


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """What `check_training_config` found.

    problems: what cannot work, each with the nearest values that do. Empty where everything fits.
    costs: what works but costs more than it must.
    batches_per_step, accumulation_steps: batches of a global step, and those of one group; 0 where they are no whole number.
    overhead: batches computed for each batch delivered, 1.0 at best.
    resumable_on: numbers of groups that can resume this run with the same steps.
    """

    global_batch_size: int
    microbatch_size: int
    dp_degree: int
    canonical_replicas: int
    problems: tuple[str, ...]
    costs: tuple[str, ...]
    batches_per_step: int
    accumulation_steps: int
    overhead: float
    resumable_on: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether it can run."""
        return not self.problems

    def require(self) -> TrainingConfig:
        """This configuration, or ConfigError with every problem."""
        if self.problems:
            raise ConfigError("this training configuration does not fit:\n  - " + "\n  - ".join(self.problems))
        return self

    def __str__(self) -> str:
        head = (
            f"{self.global_batch_size} rows a step = {self.dp_degree} groups x {self.accumulation_steps} batches x "
            f"{self.microbatch_size} rows, {self.canonical_replicas} lanes"
            if self.ok
            else f"{self.global_batch_size} rows a step, {self.microbatch_size} a batch, {self.dp_degree} groups: does not fit"
        )
        elastic = f"can resume on {', '.join(map(str, self.resumable_on))} groups" if self.resumable_on else ""
        return "\n  ".join(line for line in (head, *self.problems, *self.costs, elastic) if line)


def check_training_config(
    global_batch_size: int,
    microbatch_size: int,
    dp_degree: int = 1,
    canonical_replicas: int | None = None,
    *,
    world_size: int | None = None,
    mapping_strategy: str = "interleaved",
) -> TrainingConfig:
    """Check rows a step, rows a batch, data-parallel groups and lanes against each other; nothing is started.

    `global_batch_size` counts rows over all groups and accumulation steps; `canonical_replicas` None means `dp_degree`, as in
    `Pipeline.options`; `world_size` is checked if given. ConfigError only for numbers below one.

    >>> print(check_training_config(512, 4, dp_degree=8, canonical_replicas=32))
    512 rows a step = 8 groups x 16 batches x 4 rows, 32 lanes
      can resume on 1, 2, 4, 8, 16, 32, 64, 128 groups
    >>> for line in check_training_config(500, 4, dp_degree=8).problems: print(line)
    global_batch_size=500 / microbatch_size=4 = 125 batches a step, which 8 groups cannot share evenly: take global_batch_size \
480 or 512, or dp_degree 1, 5, 25 or 125
    """
    lanes = dp_degree if canonical_replicas is None else canonical_replicas
    _require_counts(
        global_batch_size=global_batch_size,
        microbatch_size=microbatch_size,
        dp_degree=dp_degree,
        canonical_replicas=lanes,
        world_size=1 if world_size is None else world_size,
    )
    problems = [*_step_problems(global_batch_size, microbatch_size, dp_degree), *_world_problems(world_size, dp_degree)]
    contiguous = mapping_strategy == "contiguous"
    whole = global_batch_size % microbatch_size == 0
    batches = global_batch_size // microbatch_size if whole else 0
    if contiguous:
        problems += _contiguous_problems(batches, dp_degree, lanes)
    overhead = 1.0 if contiguous else Topology(lanes, dp_degree).overhead
    return TrainingConfig(
        global_batch_size,
        microbatch_size,
        dp_degree,
        lanes,
        tuple(problems),
        tuple(_costs(overhead, dp_degree, lanes)),
        batches,
        batches // dp_degree if batches % dp_degree == 0 else 0,
        overhead,
        tuple(d for d in divisors(batches) if not contiguous or lanes % d == 0),
    )


def _require_counts(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"{name}={value!r}: give a whole number of at least 1")


def _step_problems(rows: int, size: int, groups: int) -> list[str]:
    each = size * groups
    if rows % each == 0:
        return []
    steps = nearest(rows, (rows // each * each, (rows // each + 1) * each))
    offers = [f"global_batch_size {_names(steps)}"]
    if rows % groups == 0:
        offers.append(f"microbatch_size {_names(nearest(size, divisors(rows // groups)))}")
    if rows % size == 0:
        offers.append(f"dp_degree {_names(nearest(groups, divisors(rows // size)))}")
        what = f"= {rows // size} batches a step, which {groups} groups cannot share evenly"
    else:
        what = f"= {rows / size:.2f} batches a step, not a whole number"
    return [f"global_batch_size={rows} / microbatch_size={size} {what}: take {', or '.join(offers)}"]


def _world_problems(world: int | None, groups: int) -> list[str]:
    if world is None or world % groups == 0:
        return []
    return [
        f"world_size={world} ranks cannot form dp_degree={groups} groups of equal size: "
        f"take dp_degree {_names(nearest(groups, divisors(world)))}"
    ]


def _contiguous_problems(batches: int, groups: int, lanes: int) -> list[str]:
    problems = []
    if lanes % groups:
        problems.append(
            f"mapping_strategy='contiguous' needs groups that divide the lanes, found dp_degree={groups} and "
            f"canonical_replicas={lanes}: take dp_degree {_names(nearest(groups, divisors(lanes)))}, or 'interleaved'"
        )
    if batches and batches % lanes:
        problems.append(
            f"mapping_strategy='contiguous' keeps steps only where they are whole rounds of the {lanes} lanes; {batches} "
            f"batches a step are not: take canonical_replicas {_names(nearest(lanes, divisors(batches)))}, or 'interleaved'"
        )
    return problems


def _costs(overhead: float, groups: int, lanes: int) -> list[str]:
    if overhead == 1:
        return []
    more = nearest(lanes, (max(1, lanes // groups) * groups, -(-lanes // groups) * groups))
    return [
        f"{groups} groups do not divide {lanes} lanes: each group computes {overhead:.1f} times what it delivers. A new run "
        f"would take canonical_replicas {_names(more)}; a running one keeps its lanes, and is at its best on "
        f"{_names(nearest(groups, divisors(lanes)))} groups"
    ]


def divisors(n: int) -> list[int]:
    """Every divisor of `n`, ascending; none for 0."""
    low = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)}) if n else []


def nearest(value: int, choices: Iterable[int]) -> list[int]:
    """The `NEAREST` positive numbers closest to `value`, ascending."""
    usable = sorted({c for c in choices if c > 0}, key=lambda c: (abs(c - value), c))
    return sorted(usable[:NEAREST])


def _names(values: Iterable[int]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last

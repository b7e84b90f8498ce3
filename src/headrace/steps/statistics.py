"""What a step pipeline counted, and what it says about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from headrace.run.executor import Part, WorkerStatistics
from headrace.run.failure import Failure
from headrace.steps.chain import StepReport

_KEPT_ERRORS = 10


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """One step: items in and out, and seconds an item (measured on a sample) and in all (extrapolated)."""

    name: str
    received: int
    produced: int
    seconds_per_item: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of a pipeline since it was built.

    `received == finished + in_flight` always, and what was skipped is part of what is finished. Inputs that no worker had
    begun when their iteration was left early count as never received.
    """

    received: int  # inputs taken from sources
    finished: int  # inputs done, with any number of outputs (a `Failed` is an output)
    delivered: int  # outputs handed to the consumer
    skipped: int  # inputs given up by on_error="skip"
    in_flight: int  # inputs with workers, or done and waiting for an earlier one
    queue_depth: tuple[int, ...]  # batches outstanding in each stage
    batch_size: tuple[int, ...]  # items that travel together, in each stage
    errors: tuple[str, ...]  # the first few, as text
    steps: tuple[StepStatistics, ...]
    workers: WorkerStatistics
    elapsed: float
    bottleneck: str


@dataclass(slots=True)
class _Count:
    name: str
    received: int = 0
    produced: int = 0
    timed: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Ledger:
    """The counts themselves."""

    names: list[list[str]]  # of the steps of each stage
    delivered: int = 0
    skipped: int = 0
    finished: int = 0
    received: int = 0
    active: float = 0.0  # seconds during which some flow ran
    last_sizes: tuple[int, ...] = ()
    errors: list[str] = field(default_factory=list)
    started: float = field(default_factory=monotonic)
    counts: list[list[_Count]] = field(init=False)

    def __post_init__(self) -> None:
        """One count a step."""
        self.counts = [[_Count(name) for name in stage] for stage in self.names]

    def account(self, group: int, part: Part) -> None:
        """A part of stage `group`'s work is done."""
        report = part.report
        if group == 0:
            self.finished += part.count
        if not isinstance(report, StepReport):
            return
        through = len(part.values) - report.failed if report.plain else 0
        for n, count in enumerate(self.counts[group]):
            count.received += report.received[n] + through
            count.produced += report.produced[n] + through
            count.timed += report.timed[n]
            count.seconds += report.seconds[n]
        self.skipped += report.skipped
        if report.errors and len(self.errors) < _KEPT_ERRORS:
            self.errors.extend(report.errors[: _KEPT_ERRORS - len(self.errors)])

    def lost(self, failure: Failure, *, returned: bool) -> None:
        """An item failed in a way that only the parent saw."""
        if not returned:
            self.skipped += 1
            if len(self.errors) < _KEPT_ERRORS:
                self.errors.append(f"{failure.where}: {failure.error!r}, item {failure.item}")

    def steps(self) -> tuple[StepStatistics, ...]:
        """The counts of every step."""
        return tuple(
            StepStatistics(
                count.name,
                count.received,
                count.produced,
                count.seconds / count.timed if count.timed else 0.0,
                count.seconds * count.received / count.timed if count.timed else 0.0,
            )
            for stage in self.counts
            for count in stage
        )


def bottleneck(steps: tuple[StepStatistics, ...], busy: float, available: float) -> str:
    """Where the time goes: the workers' slowest step, or outside them (source, transport or consumer)."""
    if not steps or available <= 0:
        return "nothing ran yet"
    share = busy / available
    slowest = max(steps, key=lambda step: step.seconds)
    if share > 0.6:
        return f"step {slowest.name} ({slowest.seconds_per_item * 1e6:.1f} us an item; workers busy {share:.0%})"
    return f"the source, the transport or the consumer (workers busy {share:.0%})"

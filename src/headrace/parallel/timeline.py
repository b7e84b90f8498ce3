"""What ran when: the shape that the simulator predicts and a real run records, so that one can be laid over the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headrace.parallel.action import Action


class Span(NamedTuple):
    """One action of one rank, from `start` to `end` in seconds since the step began."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of one step on every rank; `kind` says "predicted" or "measured".

    Two bubbles are in use and differ for schedules shaped like a parallelogram: `bubble` counts idle time against the
    makespan; `span_bubble` counts, on each rank, from its first to its last action, which is what repeats when
    steps follow each other without a barrier.
    """

    spans: tuple[Span, ...]
    num_ranks: int
    kind: str = "predicted"

    @staticmethod
    def of(spans: Iterable[Span], num_ranks: int, kind: str = "measured") -> Timeline:
        """Sort the spans by rank and start; what a recorder calls at the end of a step."""
        return Timeline(tuple(sorted(spans, key=lambda s: (s.rank, s.start, s.end))), num_ranks, kind)

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """The spans of one rank, in order."""
        return tuple(span for span in self.spans if span.rank == rank)

    @property
    def compute(self) -> tuple[Span, ...]:
        """The spans that compute; a measured timeline may hold communication too."""
        return tuple(span for span in self.spans if span.action.is_compute)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end over all ranks."""
        if not self.spans:
            return 0.0
        return max(s.end for s in self.spans) - min(s.start for s in self.spans)

    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        total = [0.0] * self.num_ranks
        for span in self.compute:
            total[span.rank] += span.duration
        return tuple(total)

    def extent(self) -> tuple[float, ...]:
        """Seconds from the first to the last action of each rank."""
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for span in self.compute:
            first[span.rank] = min(first.get(span.rank, span.start), span.start)
            last[span.rank] = max(last.get(span.rank, span.end), span.end)
        return tuple(last.get(r, 0.0) - first.get(r, 0.0) for r in range(self.num_ranks))

    @property
    def bubble(self) -> float:
        """Idle share of the ranks' time over the makespan, between 0 and 1."""
        total = self.makespan * self.num_ranks
        return 1.0 - sum(self.busy()) / total if total else 0.0

    @property
    def span_bubble(self) -> float:
        """Idle share of the longest rank extent: the bubble of a steady run of steps."""
        longest = max(self.extent(), default=0.0)
        return 1.0 - sum(self.busy()) / (longest * self.num_ranks) if longest else 0.0

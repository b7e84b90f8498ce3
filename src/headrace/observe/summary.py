"""What a run has done so far, as one frozen report: `pipeline.metrics_snapshot()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class OperatorSummary:
    """One operator: rows in and out, blocks, and seconds its code ran (summed over workers)."""

    name: str
    rows_in: int
    rows_out: int
    blocks: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """One dataset: samples handed out, delivered, and dropped by (operator, reason)."""

    name: str
    handed_out: int
    delivered: int
    dropped: dict[str, int]


@dataclass(frozen=True, slots=True)
class PipelineSummary:
    """A snapshot. Counts are since the iterator was made."""

    operators: tuple[OperatorSummary, ...]
    datasets: tuple[DatasetSummary, ...]
    dropped_tokens: dict[str, int]
    batches: int
    rows: int
    tokens: int
    refused: int
    queue_depth: int
    queue_capacity: int
    loop_waited_s: float
    engine_waited_s: float

    def bottleneck(self) -> str:
        """One sentence on who waits for whom."""
        if not self.operators:
            return "nothing has run yet"
        slowest = max(self.operators, key=lambda op: op.busy_s)
        if self.engine_waited_s > self.loop_waited_s:
            return (
                f"the training loop is slower than the pipeline: {self.engine_waited_s:.1f} s were spent waiting for it, "
                f"{self.loop_waited_s:.1f} s by it"
            )
        return f"the loop waited {self.loop_waited_s:.1f} s; the busiest operator is {slowest.name} with {slowest.busy_s:.1f} s"


def summarize(engine: Any) -> PipelineSummary:
    """A snapshot of an engine's counters."""
    counters, buffer = engine.counters, engine.buffer
    delivered = counters.delivered()
    dropped: dict[int, dict[str, int]] = {}
    for (dataset, operator, reason), n in list(counters.dropped.items()):
        dropped.setdefault(dataset, {})[f"{operator}: {reason}"] = n
    return PipelineSummary(
        operators=tuple(
            OperatorSummary(op.name, op.rows_in, op.rows_out, op.blocks, op.busy_ns / 1e9) for op in counters.operators
        ),
        datasets=tuple(
            DatasetSummary(name, counters.handed_out[i], delivered[i], dropped.get(i, {}))
            for i, name in counters.datasets.items()
        ),
        dropped_tokens={f"{op}: {reason}": n for (op, reason), n in list(counters.dropped_tokens.items())},
        batches=counters.batches,
        rows=counters.rows,
        tokens=counters.tokens,
        refused=counters.refused,
        queue_depth=len(buffer),
        queue_capacity=engine.plan.prefetch,
        loop_waited_s=buffer.empty_ns / 1e9,
        engine_waited_s=buffer.full_ns / 1e9,
    )

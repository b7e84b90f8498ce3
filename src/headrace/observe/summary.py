"""What a run has done so far, as one frozen report: `pipeline.metrics_snapshot()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace.observe.counters import Counters, Deliveries

LEFT_OVER: Final = "uneven: past the last step that every group can fill"


@dataclass(frozen=True, slots=True)
class OperatorSummary:
    """One operator: rows in and out, blocks, and seconds its code ran (summed over workers)."""

    name: str
    rows_in: int
    rows_out: int
    blocks: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """The engine's counts; it may run in another process, so this is what travels."""

    operators: tuple[OperatorSummary, ...] = ()
    names: tuple[tuple[int, str], ...] = ()
    handed_out: tuple[tuple[int, int], ...] = ()
    dropped: tuple[tuple[int, str, int], ...] = ()
    dropped_tokens: tuple[tuple[str, int], ...] = ()
    workers: tuple[tuple[str, int], ...] = ()
    refused: int = 0
    queue_depth: int = 0
    queue_capacity: int = 0
    loop_waited_s: float = 0.0
    engine_waited_s: float = 0.0
    replayed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """One dataset: samples handed out, delivered, and dropped by "operator: reason", in this run.

    At the end of a run, restored or not, `delivered` and `dropped` add up to `handed_out`; before it, the rest is on its way.
    A drop counts once something behind it has left its lane. Where data-parallel groups share lanes or an engine, each counts what
    leaves in its own batches and is dropped on the way to them, and handed out for these; until a sample has left, all count it.
    `replayed`: samples that a restored run read again and did not deliver or drop, since the run before had done so between its
    last cut and its checkpoint. None of the other numbers has them in it. Samples that operators held at that cut are handed out by
    this run as they leave the operators.
    """

    name: str
    handed_out: int
    delivered: int
    dropped: dict[str, int]
    replayed: int = 0


@dataclass(frozen=True, slots=True)
class MTPQueueStats:
    """The buffer of finished batches between the engine's process and the loop."""

    depth: int
    capacity: int


@dataclass(frozen=True, slots=True)
class PipelineSummary:
    """A snapshot. Counts are since the iterator was made: a restored run counts what it delivers and drops itself.

    Rows, blocks and times of operators are those of all work that was done, the repetition after a restore too.
    """

    operators: tuple[OperatorSummary, ...]
    datasets: tuple[DatasetSummary, ...]
    dropped_tokens: dict[str, int]
    workers: dict[str, int]
    batches: int
    rows: int
    tokens: int
    refused: int
    queue_depth: int
    queue_capacity: int
    loop_waited_s: float
    engine_waited_s: float
    padded: int = 0
    left_over: int = 0

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


def summarize_engine(
    counters: Counters, group: int, buffer: Any, capacity: int, workers: Mapping[str, int]
) -> EngineSummary:
    """A snapshot of an engine, with the samples of a data-parallel group."""
    share = counters.share(group)
    return EngineSummary(
        operators=tuple(
            OperatorSummary(op.name, op.rows_in, op.rows_out, op.blocks, op.busy_ns / 1e9) for op in counters.operators
        ),
        names=tuple(counters.datasets.items()),
        handed_out=tuple(counters.handed_out_for(group).items()),
        replayed=tuple(counters.replayed.sums().items()),
        dropped=tuple((dataset, f"{op}: {why}", n) for (dataset, op, why), n in list(share.dropped.items())),
        dropped_tokens=tuple((f"{op}: {why}", n) for (op, why), n in list(share.dropped_tokens.items())),
        workers=tuple(workers.items()),
        refused=share.refused,
        queue_depth=len(buffer),
        queue_capacity=capacity,
        loop_waited_s=buffer.empty_ns / 1e9,
        engine_waited_s=buffer.full_ns / 1e9,
    )


def summarize(engine: EngineSummary, deliveries: Deliveries) -> PipelineSummary:
    """The engine's counts and the loop's together."""
    delivered, handed_out, replayed = deliveries.by_dataset(), dict(engine.handed_out), dict(engine.replayed)
    dropped: dict[int, dict[str, int]] = {}
    for dataset, why, n in engine.dropped:
        dropped.setdefault(dataset, {})[why] = n
    left_over = deliveries.left_over
    for dataset, n in {} if left_over is None else left_over.by_dataset().items():
        dropped.setdefault(dataset, {})[LEFT_OVER] = n
    return PipelineSummary(
        operators=engine.operators,
        datasets=tuple(
            DatasetSummary(name, handed_out.get(i, 0), delivered[i], dropped.get(i, {}), replayed.get(i, 0))
            for i, name in engine.names
        ),
        dropped_tokens=dict(engine.dropped_tokens),
        workers=dict(engine.workers),
        batches=deliveries.batches,
        rows=deliveries.rows,
        tokens=deliveries.tokens,
        refused=engine.refused,
        queue_depth=engine.queue_depth,
        queue_capacity=engine.queue_capacity,
        loop_waited_s=engine.loop_waited_s,
        engine_waited_s=engine.engine_waited_s,
        padded=deliveries.padded,
        left_over=0 if left_over is None else left_over.batches,
    )

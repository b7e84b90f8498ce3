"""What a run says of itself: the types of `pipeline.metrics_snapshot()` and `mtp_queue_stats()`.

Counters are always on, so there is nothing to enable. They cost some 33 ns a record (`python -m benchmarks.machinery`), under one
percent where records are text. `options(progress=True)` shows them while a run goes on.
"""

from headrace.observe.summary import DatasetSummary, MTPQueueStats, OperatorSummary, PipelineSummary

__all__ = ["DatasetSummary", "MTPQueueStats", "OperatorSummary", "PipelineSummary"]

"""Step pipelines: any Python functions over any items, in many processes, nothing lost.

    from headrace.steps import Pipeline

    with Pipeline([parse, augment], num_workers=4) as pipeline:
        for output in pipeline.map(items):
            ...

Names are imported when they are first used: a worker process loads the chain of steps and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.lazy import lazy

if TYPE_CHECKING:
    from headrace.steps.chain import DROP, iterate
    from headrace.steps.emit import emit
    from headrace.steps.failed import Failed
    from headrace.steps.pipeline import Pipeline
    from headrace.steps.readers import FileReader, split_seeks
    from headrace.steps.statistics import Statistics, StepStatistics

__all__ = ["DROP", "Failed", "FileReader", "Pipeline", "Statistics", "StepStatistics", "emit", "iterate", "split_seeks"]

_HOMES = {
    "DROP": "headrace.steps.chain",
    "Failed": "headrace.steps.failed",
    "FileReader": "headrace.steps.readers",
    "Pipeline": "headrace.steps.pipeline",
    "Statistics": "headrace.steps.statistics",
    "StepStatistics": "headrace.steps.statistics",
    "emit": "headrace.steps.emit",
    "iterate": "headrace.steps.chain",
    "split_seeks": "headrace.steps.readers",
}

__getattr__, __dir__ = lazy(__name__, _HOMES)

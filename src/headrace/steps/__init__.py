"""Step pipelines: any Python functions over any items, in many processes, nothing lost.

    from headrace.steps import Pipeline

    with Pipeline([parse, augment], num_workers=4) as pipeline:
        for output in pipeline.map(items):
            ...

Names are imported when they are first used: a worker process loads the chain of steps and nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from headrace.steps.chain import DROP, iterate
    from headrace.steps.emit import emit
    from headrace.steps.failed import Failed
    from headrace.steps.pipeline import Pipeline
    from headrace.steps.readers import FileReader, split_seeks
    from headrace.steps.statistics import Statistics, StepStatistics

__all__ = ["DROP", "Failed", "FileReader", "Pipeline", "Statistics", "StepStatistics", "emit", "iterate", "split_seeks"]

_HOMES = {
    "DROP": "chain",
    "Failed": "failed",
    "FileReader": "readers",
    "Pipeline": "pipeline",
    "Statistics": "statistics",
    "StepStatistics": "statistics",
    "emit": "emit",
    "iterate": "chain",
    "split_seeks": "readers",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headrace.steps' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"headrace.steps.{home}"), name)
    globals()[name] = value
    return value

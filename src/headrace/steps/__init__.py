"""Step pipelines: any Python functions over any items, in many processes, nothing lost.

from headrace.steps import Pipeline

with Pipeline([parse, augment], num_workers=4) as pipeline:
    for output in pipeline.map(items):
        ...
"""

from headrace.steps.chain import DROP, iterate
from headrace.steps.emit import emit
from headrace.steps.failed import Failed
from headrace.steps.pipeline import Pipeline
from headrace.steps.readers import FileReader, split_seeks
from headrace.steps.statistics import Statistics, StepStatistics

__all__ = ["DROP", "Failed", "FileReader", "Pipeline", "Statistics", "StepStatistics", "emit", "iterate", "split_seeks"]

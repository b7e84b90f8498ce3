"""headrace carries data to a model.

    from headrace import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource

* `Pipeline`: a training curriculum becomes batches (this module, `io`, `work`, `ops`, `options`);
* `headrace.steps`: any Python items through functions in worker processes;
* `headrace.parallel`: microbatches through the stages of a model.

Names are imported when they are first used, so that `import headrace` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.lazy import lazy

if TYPE_CHECKING:
    from headrace.core.training_config import TrainingConfig, check_training_config
    from headrace.integrations.zephon import install_as_zephon
    from headrace.io import Dataset, InMemoryShard
    from headrace.options import RuntimeOptions
    from headrace.pipeline import Pipeline
    from headrace.types import SampleBatch, SampleMeta, SampleRecord
    from headrace.work import MixtureSpec, StaticMixtureWorkSource, WorkSource

__version__ = "0.1.0"

__all__ = [
    "Dataset",
    "InMemoryShard",
    "MixtureSpec",
    "Pipeline",
    "RuntimeOptions",
    "SampleBatch",
    "SampleMeta",
    "SampleRecord",
    "StaticMixtureWorkSource",
    "TrainingConfig",
    "WorkSource",
    "__version__",
    "check_training_config",
    "install_as_zephon",
]

_HOMES = {
    "Dataset": "headrace.io",
    "InMemoryShard": "headrace.io",
    "MixtureSpec": "headrace.work",
    "Pipeline": "headrace.pipeline",
    "RuntimeOptions": "headrace.options",
    "SampleBatch": "headrace.types",
    "SampleMeta": "headrace.types",
    "SampleRecord": "headrace.types",
    "StaticMixtureWorkSource": "headrace.work",
    "TrainingConfig": "headrace.core.training_config",
    "WorkSource": "headrace.work",
    "check_training_config": "headrace.core.training_config",
    "install_as_zephon": "headrace.integrations.zephon",
}

__getattr__, __dir__ = lazy(__name__, _HOMES)

"""The curriculum: which sample comes when. Pure: no files, threads or clocks.

mixture         weights, and exact shares of them
beatty          two-way splits in closed form
deadlines       mixtures of many components, by deadlines
interleave      the mixture sequence over both
order           order of rows in one dataset, over passes
repeat          what happens when a dataset is used up
timeline        the global stream as segments of constant mixture
chunk           Samples (columns) and WorkChunk (objects)
source          WorkSource, the contract, and lanes of any source
lane            one lane of a static mixture
static_mixture  StaticMixtureWorkSource
"""

from headrace.work.chunk import ComponentOrder, MixtureReadConfig, MixtureReadMode, SampleId, Samples, WorkChunk
from headrace.work.lane import MixtureLane
from headrace.work.mixture import MixtureSpec
from headrace.work.source import LaneSource, WorkSource
from headrace.work.static_mixture import ComponentStatistics, MixtureStatistics, StaticMixtureWorkSource

__all__ = [
    "ComponentOrder",
    "ComponentStatistics",
    "LaneSource",
    "MixtureLane",
    "MixtureReadConfig",
    "MixtureReadMode",
    "MixtureSpec",
    "MixtureStatistics",
    "SampleId",
    "Samples",
    "StaticMixtureWorkSource",
    "WorkChunk",
    "WorkSource",
]

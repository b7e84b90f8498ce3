"""Adapters to other libraries, each imported when it is first used.

* `PipelineDataset`, `StatefulPipelineDataset`, `load_loader_state`: torch's `DataLoader` and torchdata's `StatefulDataLoader`;
* `options_from_mesh`: a rank's place from a torch `DeviceMesh`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.lazy import lazy

if TYPE_CHECKING:
    from headrace.integrations.torch_data import PipelineDataset, StatefulPipelineDataset, load_loader_state
    from headrace.integrations.torch_mesh import options_from_mesh

__all__ = ["PipelineDataset", "StatefulPipelineDataset", "load_loader_state", "options_from_mesh"]

_HOMES = {
    "PipelineDataset": "headrace.integrations.torch_data",
    "StatefulPipelineDataset": "headrace.integrations.torch_data",
    "load_loader_state": "headrace.integrations.torch_data",
    "options_from_mesh": "headrace.integrations.torch_mesh",
}

__getattr__, __dir__ = lazy(__name__, _HOMES)

"""Adapters to other libraries, each imported when it is first used.

* `PipelineDataset`, `StatefulPipelineDataset`, `load_loader_state`: torch's `DataLoader` and torchdata's `StatefulDataLoader`;
* `options_from_mesh`: a rank's place from a torch `DeviceMesh`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headrace.integrations' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)

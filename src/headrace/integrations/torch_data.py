"""A pipeline as a torch `IterableDataset`, for loaders that insist on one.

    loader = DataLoader(pipeline.to_torch_dataset(), batch_size=None, num_workers=0)

The pipeline has already batched and runs its own workers, so the loader should do neither. The only file here that imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.pipeline import Pipeline


class PipelineDataset(IterableDataset[Any]):
    """Yields what the pipeline yields; `state_dict` and `load_state_dict` are its checkpoint and restore."""

    def __init__(self, pipeline: Pipeline, stateful: bool = True) -> None:
        """`stateful=False` leaves out `state_dict` and `load_state_dict`, so that no loader calls them."""
        super().__init__()
        self._pipeline, self._stateful = pipeline, stateful

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ConfigError(
                "a pipeline runs its own workers: use DataLoader(..., batch_size=None, num_workers=0), or iterate "
                "the pipeline itself"
            )
        return iter(self._pipeline)

    def __getattr__(self, name: str) -> Any:
        if name == "state_dict" and self.__dict__.get("_stateful"):
            return self._pipeline.checkpoint
        if name == "load_state_dict" and self.__dict__.get("_stateful"):
            return self._pipeline.restore
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

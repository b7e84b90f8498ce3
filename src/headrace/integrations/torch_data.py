"""A pipeline as a torch `IterableDataset`, for loaders that insist on one.

    loader = DataLoader(pipeline.to_torch_dataset(), batch_size=None, num_workers=0)

The pipeline has already batched and runs its own workers, so `num_workers=0` is the right number. With more, each worker process
runs its own engine over its share of the lanes and the loader receives the same batches in the same order: worker `w` of `W`
delivers every `W`-th batch of the rank, and the loader asks its workers in turn. Give at least `dp_degree * W` lanes
(`canonical_replicas`), a multiple of it at best; with fewer, workers compute lanes together that they then deliver in turn.

State goes through torchdata's `StatefulDataLoader`; `load_loader_state` takes it to a loader with any other number of workers.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import msgspec
import torch
from torch.utils.data import IterableDataset, get_worker_info

from headrace.core.entries import from_entries, is_entries, to_entries
from headrace.core.lanes import Topology
from headrace.core.part import PartState, first_batch, join
from headrace.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from headrace.pipeline import Pipeline

WORKER: Final = "headrace.worker"
MAX_WORKERS: Final = 1024
_RESTORE, _RUNNING = range(2)

_log = logging.getLogger("headrace")


class PipelineDataset(IterableDataset[Any]):
    """Yields what the pipeline yields."""

    def __init__(self, pipeline: Pipeline) -> None:
        """Over `pipeline`, from wherever it stands."""
        super().__init__()
        self._pipeline = pipeline
        self._here: Pipeline | None = None
        """In a loader worker: its part of the pipeline."""
        self._loaded: PartState | None = None
        self._place, self._start = (0, 1), 0
        self._given_by_loader = (-1, False)
        """Number of the restore() that the loader has asked for, and whether an iterator was opened since. A loader that opens
        another one means the next pass, also where it has taken no batch from the first: it does so after a finished pass."""
        # Shared with the loader's workers: per worker the last restore() it has begun from, and whether it has run at all.
        self._board = torch.zeros(2, MAX_WORKERS, dtype=torch.int64).share_memory_()
        pipeline.elsewhere = self._elsewhere

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:
            self._board[_RUNNING] = 0
            self._pipeline.close()
            if self._given_by_loader == (self._pipeline.restores, True):
                self._pipeline.rewind()
            iterator = iter(self._pipeline)
            self._given_by_loader = (self._given_by_loader[0], True)
            return iterator
        if self._here is not None:
            self._here.close()
        loaded = self._loaded is not None
        self._here = self._my_part(info.id, info.num_workers)
        self._board[_RUNNING, info.id] = 1
        iterator = iter(self._here)
        if not loaded:  # only now: a run that could not begin has not used the restored state up
            self._board[_RESTORE, info.id] = self._pipeline.restores
        return iterator

    def _my_part(self, worker: int, workers: int) -> Pipeline:
        """What this loader worker delivers, standing where it should begin."""
        if workers > MAX_WORKERS:
            raise ConfigError(f"num_workers={workers}: at most {MAX_WORKERS}")
        pipeline, loaded, self._loaded = self._pipeline, self._loaded, None
        if loaded is not None:
            self._place, self._start = (loaded.part, loaded.parts), loaded.start
            part = pipeline.part(*self._place)
            part.restore(loaded.state)
        else:
            # A restored state is begun from once; the next pass over the loader starts anew.
            anew = int(self._board[_RESTORE, worker]) >= pipeline.restores
            self._start = 0 if anew else pipeline.starts_at
            self._place = ((worker + first_batch(self._start, pipeline.topology)) % workers, workers)
            part = pipeline.part(*self._place, anew=anew)
        _check_worker(part, workers)
        return part

    @property
    def topology(self) -> Topology:
        """Lanes of the run and this rank's place."""
        return self._pipeline.topology

    def _elsewhere(self) -> str:
        if not self._board[_RUNNING].any():
            return ""
        return (
            "its batches go through the workers of a DataLoader. Save StatefulDataLoader.state_dict() instead, or use "
            "num_workers=0"
        )

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_pipeline"] = cloudpickle.dumps(self._pipeline.part(0, 1))
        state["_here"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pipeline = cloudpickle.loads(state["_pipeline"])


class StatefulPipelineDataset(PipelineDataset):
    """Yields what the pipeline yields; `state_dict` and `load_state_dict` are its checkpoint and restore."""

    def state_dict(self) -> dict[str, Any]:
        """Entries, one per lane; in a loader worker with a word on which part of the rank they belong to."""
        info = get_worker_info()
        if info is None or self._here is None:
            return dict(self._pipeline.state_dict())
        place = msgspec.msgpack.encode([*self._place, self._start])
        return {**self._here.state_dict(), WORKER: place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the next iteration. In the main process also from the whole state of a `StatefulDataLoader`."""
        info = get_worker_info()
        if info is not None:
            self._loaded = _part_state(state_dict)
            if self._loaded.parts != info.num_workers:
                raise CheckpointError(
                    f"a state of {self._loaded.parts} loader workers was loaded into {info.num_workers}: pass it through "
                    "headrace.integrations.load_loader_state(loader, state), which takes any number"
                )
            return
        if WORKER in state_dict:
            raise CheckpointError(
                "this is the state of one loader worker; pass the loader's whole state to "
                "headrace.integrations.load_loader_state(loader, state)"
            )
        self._pipeline.close()
        self._board[_RUNNING] = 0
        self._pipeline.load_state_dict(state_dict)
        self._given_by_loader = (self._pipeline.restores, False)


def load_loader_state(loader: Any, state: Mapping[str, Any]) -> None:
    """Give `loader` the state of a `StatefulDataLoader` that had any number of workers.

        load_loader_state(loader, torch.load(path)["loader"])

    `loader` is a fresh `StatefulDataLoader` or `DataLoader` over `pipeline.to_torch_dataset()`. It continues with exactly the batch
    that comes next. A state saved after the last batch of a pass begins the next pass, as the saved loader would have.
    """
    checkpoint = loader_checkpoint(state, loader.dataset)
    if hasattr(loader, "load_state_dict"):
        loader.load_state_dict({})
    if checkpoint is not None:
        loader.dataset.load_state_dict(to_entries(checkpoint))


def loader_checkpoint(state: Mapping[str, Any], dataset: PipelineDataset) -> dict[str, Any] | None:
    """The rank's checkpoint in the state of a `StatefulDataLoader`; None if its pass was over."""
    if state.get("_iterator_finished"):
        return None
    single = state.get("dataset_state")
    if is_entries(single):
        assert single is not None
        return from_entries(single)
    try:
        workers = [worker["dataset_state"] for worker in state["_snapshot"]["_worker_snapshots"].values()]
        since = state["_steps_since_snapshot"]
    except (KeyError, TypeError):
        raise CheckpointError(
            "this is not the state of a StatefulDataLoader over a headrace pipeline (to_torch_dataset())"
        ) from None
    if since:
        raise CheckpointError(
            f"this state was taken {since} batches after the loader last asked its workers where they are: use "
            "StatefulDataLoader(snapshot_every_n_steps=1), or resume with the same number of workers"
        )
    states = [_part_state(worker) for worker in workers]
    return join(states, replace(dataset.topology, lanes=int(states[0].state["canonical_replicas"])))


def _part_state(entries: Mapping[str, Any]) -> PartState:
    if not is_entries(entries) or WORKER not in entries:
        raise CheckpointError("this is not the state of a loader worker over a headrace pipeline")
    part, parts, start = msgspec.msgpack.decode(entries[WORKER])
    return PartState(part, parts, start, from_entries(entries))


def _check_worker(part: Pipeline, workers: int) -> None:
    """Refuse what cannot run in a loader worker; say what is wasteful."""
    if mp.current_process().daemon and (processes := [s.label for s in part.plan().stages if s.runner == "process"]):
        raise ConfigError(
            f"{', '.join(processes)} should run in processes, which the workers of a DataLoader may not start: use num_workers=0, "
            "or runner='threads'"
        )
    if part.topology.overhead > 1 and get_worker_info().id == 0:  # type: ignore[union-attr]
        _log.warning(
            "each of the %d loader workers of a rank computes %.1f times what it delivers: use num_workers=0, or lanes "
            "(canonical_replicas) that %d divides",
            workers,
            part.topology.overhead,
            part.topology.groups,
        )

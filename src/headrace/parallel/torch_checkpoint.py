"""Checkpoints of a pipeline that any other cut of the same model can load.

Each rank writes its own stages' tensors with `torch.distributed.checkpoint`, under the names that they have in the whole
model (`blocks.7.up.weight`), not in the stage. So 4 stages save, and 2 or 1 load; sharded parameters (FSDP2) are put
together and cut again on the way. Two stages that use one name for different tensors would silently lose one of them:
that is an error here.

`headrace.json` is what makes the folder a checkpoint: it is removed before the first tensor is written and comes, whole,
after the last. So a save that was cut short leaves a folder that nothing loads, never new weights with an old position.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from headrace.errors import CheckpointError, ConfigError
from headrace.parallel.torch_distributed import DistributedPipeline

_EXTRA = "headrace.json"
_METADATA = ".metadata"  # torch's index of the tensors
_LOCAL = re.compile(r"stages\.(\d+)\.(?:module\.)?")
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_checkpoint(
    path: str | Path,
    pipeline: DistributedPipeline,
    optimizer: Optimizer | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write model, optimizer and `extra` (what JSON can hold: step, data position) to a folder; every rank calls it.

    `extra` is taken from the rank of the first stage; the ranks between need not know it. A checkpoint that the folder holds
    is given up first, so keep the last one elsewhere until this returns: a folder for each step.
    """
    with pipeline.guarded(alike=True):
        whole = _Whole(pipeline.modules)
        _check_names(pipeline, whole)
        folder = Path(path)
        writes = _writes_extra(pipeline)
        if writes:
            for name in (_EXTRA, _METADATA):
                (folder / name).unlink(missing_ok=True)
        dist.barrier()  # no rank writes into what still passes for the old checkpoint
        save(_state(whole, optimizer), checkpoint_id=str(folder))
        if writes:
            body = {"extra": extra or {}, "stages": pipeline.schedule.num_stages, "schedule": pipeline.schedule.name}
            unfinished = folder / f"{_EXTRA}.tmp"
            unfinished.write_bytes(msgspec.json.encode(body))
            os.replace(unfinished, folder / _EXTRA)
        dist.barrier()


def load_checkpoint(
    path: str | Path, pipeline: DistributedPipeline, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Read what any cut of this model has written into this one; returns `extra`, on every rank."""
    with pipeline.guarded(alike=True):
        extra = load_extra(path)
        whole = _Whole(pipeline.modules)
        _check_names(pipeline, whole)
        state = _state(whole, optimizer)
        known = FileSystemReader(str(path)).read_metadata().state_dict_metadata
        if missing := sorted(set(state) - set(known)):
            raise CheckpointError(
                f"the checkpoint {path} lacks {missing[0]!r} and {len(missing) - 1} more that this rank's stages need; it has, "
                f"for example, {sorted(known)[0]!r}. Build the same model, with the same names of layers"
            )
        load(state, checkpoint_id=str(path))
        _restore(whole, optimizer, state)
        pipeline.shared.align()
        return extra


def load_into_module(path: str | Path, model: nn.Module) -> None:
    """Read a pipeline's checkpoint into the whole, uncut model, in one process without a process group.

    The model's names must be those that the stages were cut from: an `nn.Sequential` given to `split_model`, say.
    """
    load_extra(path)  # an error if it was never finished
    state = get_model_state_dict(model)
    renamed = {f"model.{name}": value for name, value in state.items()}
    with warnings.catch_warnings():
        # torch warns that it assumes a single process, also where it is told so
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(renamed, checkpoint_id=str(path), no_dist=True)
    set_model_state_dict(model, {name.removeprefix("model."): value for name, value in renamed.items()})


def load_extra(path: str | Path) -> dict[str, Any]:
    """What was saved as `extra`, without loading anything else; an error if the folder holds no finished checkpoint."""
    try:
        return msgspec.json.decode(Path(path, _EXTRA).read_bytes())["extra"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} holds no {_EXTRA}: it is no checkpoint of a pipeline, or its save was cut short; load an earlier one"
        ) from None


class _Whole(nn.Module):
    """A rank's stages as one module, for torch's state-dict functions."""

    def __init__(self, modules: dict[int, nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(index): module for index, module in modules.items()})


def _global(name: str) -> str:
    """`stages.2.module.blocks.7.weight` -> `blocks.7.weight`, also inside the optimizer's flattened names."""
    return _LOCAL.sub("", name, count=1)


def _state(whole: _Whole, optimizer: Optimizer | None) -> dict[str, Any]:
    """Everything that this rank saves, by global name."""
    found = {f"model.{_global(name)}": value for name, value in get_model_state_dict(whole).items()}
    if optimizer is not None:
        flat = get_optimizer_state_dict(whole, optimizer, options=_FLAT)
        found |= {f"optimizer.{_global(name)}": value for name, value in flat.items()}
    return found


def _restore(whole: _Whole, optimizer: Optimizer | None, state: dict[str, Any]) -> None:
    local = {name: state[f"model.{_global(name)}"] for name in get_model_state_dict(whole)}
    set_model_state_dict(whole, local)
    if optimizer is not None:
        names = get_optimizer_state_dict(whole, optimizer, options=_FLAT)
        flat = {name: state[f"optimizer.{_global(name)}"] for name in names}
        set_optimizer_state_dict(whole, optimizer, flat, options=_FLAT)


def _check_names(pipeline: DistributedPipeline, whole: _Whole) -> None:
    """Refuse two stages that call different tensors by one name: one of them would be lost without a word."""
    mine = [_global(name) for name in get_model_state_dict(whole)]
    data = pipeline.group.gather_bytes(msgspec.json.encode(mine))
    everyone = [msgspec.json.decode(names, type=list[str]) for names in data]
    repeated = [name for name, count in Counter(name for names in everyone for name in names).items() if count > 1]
    if repeated:
        raise ConfigError(
            f"two stages call a tensor {repeated[0]!r}; in a checkpoint one would overwrite the other. Cut the model with "
            "split_model(), which keeps the names of the whole model, or give its layers as (name, module) pairs"
        )


def _writes_extra(pipeline: DistributedPipeline) -> bool:
    """Whether this process is the first of those that hold a first stage (one for each data-parallel replica)."""
    lowest = torch.tensor(
        [dist.get_rank() if pipeline.is_first else dist.get_world_size()], device=pipeline.group.device
    )
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return int(lowest.item()) == dist.get_rank()

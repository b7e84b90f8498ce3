"""Checkpoints of a pipeline on one process: any cut loads what another wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pipeline_models import cut, language_model, token_loss
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from headrace.errors import CheckpointError, ConfigError
from headrace.parallel import Schedule, torch_checkpoint
from headrace.parallel.torch_checkpoint import load_checkpoint, load_extra, load_into_module, save_checkpoint
from headrace.parallel.torch_distributed import DistributedPipeline
from headrace.parallel.torch_stage import PipelineStage


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pipeline(model: nn.Sequential, counts: list[int]) -> DistributedPipeline:
    """All stages on the one rank, forward and backward in turn."""
    n = len(counts)
    rows = [f"{s}F{m}" for m in range(2) for s in range(n)] + [f"{s}B{m}" for m in range(2) for s in reversed(range(n))]
    return DistributedPipeline(cut(model, counts), 2, Schedule.from_csv(",".join(rows)), token_loss)


def trained(model: nn.Sequential, counts: list[int]) -> tuple[DistributedPipeline, torch.optim.Optimizer]:
    pipe = pipeline(model, counts)
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
    tokens = torch.randint(0, 17, (4, 5))
    pipe.step(tokens, tokens)
    optimizer.step()
    return pipe, optimizer


def test_other_cut_and_whole_model(tmp_path: Path) -> None:
    model = language_model(2, tied=True)
    saver, optimizer = trained(model, [1, 2, 1])
    save_checkpoint(tmp_path / "c", saver, optimizer, {"step": 1, "data": {"taken": 4}})
    other = language_model(2, tied=True)
    loader = pipeline(other, [2, 2])
    theirs = torch.optim.AdamW(loader.parameters(), 5.0)
    assert load_checkpoint(tmp_path / "c", loader, theirs) == {"step": 1, "data": {"taken": 4}}
    assert load_extra(tmp_path / "c")["step"] == 1
    assert theirs.param_groups[0]["lr"] == 1e-2
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["exp_avg"], theirs.state[b]["exp_avg"])
    whole = language_model(2, tied=True)
    with torch.no_grad():
        for p in whole.parameters():
            p.zero_()
    load_into_module(tmp_path / "c", whole)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))


def test_refusals(tmp_path: Path) -> None:
    model = language_model(1, tied=False)
    with pytest.raises(CheckpointError, match=r"holds no headrace.json"):
        load_checkpoint(tmp_path, pipeline(model, [1, 2]))
    save_checkpoint(tmp_path / "c", pipeline(model, [1, 2]))
    with pytest.raises(CheckpointError, match=r"lacks 'model.2.down.weight'"):
        load_checkpoint(tmp_path / "c", pipeline(language_model(2, tied=False), [2, 2]))
    same = [PipelineStage(nn.Sequential(nn.Linear(2, 2))) for _ in range(2)]
    clash = DistributedPipeline(same, 1, Schedule.from_csv("0F0,1F0,1B0,0B0"), token_loss)
    with pytest.raises(ConfigError, match=r"two stages call a tensor '0.weight'"):
        save_checkpoint(tmp_path / "d", clash)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("tensors_written", [False, True])
def test_a_save_that_was_cut_short_over_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors_written: bool
) -> None:
    """It is no checkpoint, and says so: new weights must not go with the old position."""
    model = language_model(1, tied=False)
    pipe = pipeline(model, [1, 2])
    save_checkpoint(tmp_path, pipe, extra={"step": 1})

    def killed(state: dict[str, object], checkpoint_id: str) -> None:
        if tensors_written:
            save(state, checkpoint_id=checkpoint_id)
        raise Killed

    with monkeypatch.context() as during:
        during.setattr(torch_checkpoint, "save", killed)
        with pytest.raises(Killed):
            save_checkpoint(tmp_path, pipe, extra={"step": 2})
    for load in (
        lambda: load_checkpoint(tmp_path, pipe),
        lambda: load_into_module(tmp_path, model),
        lambda: load_extra(tmp_path),
    ):
        with pytest.raises(CheckpointError, match="its save was cut short"):
            load()
    save_checkpoint(tmp_path, pipe, extra={"step": 3})
    assert load_checkpoint(tmp_path, pipe) == {"step": 3}

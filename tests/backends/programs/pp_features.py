"""What a pipeline over two ranks must cope with, each as a named check; writes JSON: name -> what it found.

Usage: torchrun --nproc-per-node=2 pp_features.py OUT [schedule ...], the schedules for the checks of pp_correct.py
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pp_correct
import torch
import torch.distributed as dist
from pipeline_models import blocks, cut, full_batch_gradients, language_model, relative_error, token_loss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from headrace.errors import HeadraceError
from headrace.parallel import Schedule, build_schedule
from headrace.parallel.torch_distributed import DistributedPipeline, RunOptions
from headrace.parallel.torch_stage import PipelineStage

MSE = nn.functional.mse_loss
F64 = torch.float64
NO_DOG = RunOptions(watchdog=False)


def worst(pipeline: DistributedPipeline, wanted: dict[str, Tensor]) -> float:
    return max(
        relative_error(p.grad, wanted[n])  # type: ignore[arg-type]
        for module in pipeline.modules.values()
        for n, p in module.named_parameters()
    )


class Turn(nn.Module):
    """Hands on a tensor that does not lie in memory as its shape says."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (2, 4)).transpose(1, 2)


class Back(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(1)


def transposed() -> dict[str, Any]:
    model = blocks(2)
    stages = [PipelineStage(nn.Sequential(model[0], Turn())), PipelineStage(nn.Sequential(Back(), model[1]))]
    found = {}
    for schedule in ("1f1b", "zb-h1"):
        batch, target = torch.randn(4, 8, dtype=F64), torch.randn(4, 8, dtype=F64)
        _, grads = full_batch_gradients(model, dict(model.named_parameters()), batch, target, MSE)
        model.zero_grad()
        pipeline = DistributedPipeline(stages, 2, schedule, MSE, NO_DOG)
        pipeline.step(batch, target)
        by_name = {f"module.0.{n[2:]}": g for n, g in grads.items() if n.startswith("0.")}
        by_name |= {f"module.1.{n[2:]}": g for n, g in grads.items() if n.startswith("1.")}
        found[schedule] = worst(pipeline, by_name)
    return found


class Split(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(x), 2 * x, torch.arange(len(x), device=x.device)


class Join(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, skip: Tensor, ids: Tensor) -> Tensor:
        return self.inner(x + skip * (1 + 0 * ids[:, None]))


def skips() -> dict[str, Any]:
    """Stage 0's input reaches stage 3, with its gradient, on schedules with one, two loops, and a V."""
    found = {}
    for schedule in ("interleaved-1f1b", "zbv"):
        model = blocks(4)
        stages = [
            PipelineStage(Split(model[0])),
            PipelineStage(model[1], carry=2),
            PipelineStage(model[2], carry=2, recompute=True),
            PipelineStage(Join(model[3])),
        ]
        batch, target = torch.randn(8, 8, dtype=F64), torch.randn(8, 8, dtype=F64)
        loss = MSE(model[3](model[2](model[1](model[0](batch))) + 2 * batch), target)
        named = dict(model.named_parameters())
        grads = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        pipeline = DistributedPipeline(stages, 4, schedule, MSE, NO_DOG)
        result = pipeline.step(batch, target)
        errors = [relative_error(named[n].grad, g) for n, g in grads.items() if named[n].grad is not None]
        assert result.loss is not None
        found[schedule] = max(*errors, relative_error(result.loss, loss))
    return found


def shapes() -> dict[str, Any]:
    """Shapes that change between steps, and within one."""
    model = language_model(2, tied=False)
    pipeline = DistributedPipeline(
        cut(model, [2, 2]), 3, "1f1b", token_loss, RunOptions(watchdog=False, variable_shapes=True)
    )
    found: dict[str, Any] = {}
    named = {f"module.{n}": p for n, p in model.named_parameters()}
    for name, sizes in {
        "short": [(2, 3)] * 3,
        "long": [(2, 9)] * 3,
        "mixed": [(1, 4), (3, 2), (2, 6)],
        "short again": [(2, 3)] * 3,
    }.items():
        tokens, labels = ([torch.randint(0, 17, size) for size in sizes] for _ in range(2))
        tokens_in_all = sum(y.numel() for y in labels)
        wanted = sum(token_loss(model(t), y) * y.numel() / tokens_in_all for t, y in zip(tokens, labels, strict=True))
        grads = dict(zip(named, torch.autograd.grad(wanted, list(named.values())), strict=True))  # type: ignore[arg-type]
        model.zero_grad()
        result = pipeline.step_microbatches(tokens if pipeline.is_first else None, labels if pipeline.is_last else None)
        assert result.loss is not None
        found[name] = max(worst(pipeline, grads), relative_error(result.loss, wanted))  # type: ignore[arg-type]
    return found


def masked() -> dict[str, Any]:
    """Labels that are ignored, unevenly, and in one microbatch all of them; training and evaluation."""
    found = {}
    for schedule in ("1f1b", "zb-h1", "zbv"):
        model = language_model(2, tied=False)
        pipeline = DistributedPipeline(
            cut(model, [1, 1, 1, 1] if schedule == "zbv" else [2, 2]), 4, schedule, token_loss, NO_DOG
        )
        tokens, labels = (torch.randint(0, 17, (8, 5)) for _ in range(2))
        labels[0, 1:] = labels[2:4] = -100
        loss, grads = full_batch_gradients(model, dict(model.named_parameters()), tokens, labels, token_loss)
        result, evaluated = pipeline.step(tokens, labels), pipeline.eval(tokens, labels)
        assert result.loss is not None
        assert evaluated.loss is not None
        losses = [relative_error(r, loss) for r in (result.loss, evaluated.loss)]
        found[schedule] = max(*losses, worst(pipeline, {f"module.{n}": g for n, g in grads.items()}))
    return found


def frozen_tie() -> dict[str, bool]:
    """A shared weight that is not trained gets no gradient, which weight decay would take for a reason to change it."""
    model = language_model(2, tied=True)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    pipeline = DistributedPipeline(cut(model, [2, 2]), 2, "1f1b", token_loss, NO_DOG)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1.0, weight_decay=0.1)
    tokens = torch.randint(0, 17, (4, 5))
    pipeline.step(tokens, tokens)
    optimizer.step()
    return {"no gradient": model[0].weight.grad is None, "as it was": torch.equal(model[0].weight, before)}


class Counted(nn.Module):
    """An embedding and a batch norm: what a probe on garbage would break or change."""

    def __init__(self, embed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4) if embed else None
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            self.calls += 1
        if self.embed is not None:
            x = x * 0 + self.embed((x[:, 0] > 0).long())
        return self.norm(x)


def no_probe() -> dict[str, Any]:
    """Each stage runs exactly M times, and its running statistics have seen nothing but data."""
    torch.manual_seed(3)
    stages = [PipelineStage(Counted(embed)) for embed in (False, True)]
    reference = copy.deepcopy(stages)
    batch, target = torch.randn(8, 4), torch.zeros(8, 4)
    pipeline = DistributedPipeline(stages, 4, "1f1b", MSE, NO_DOG)
    pipeline.step(batch, target)
    for mb in batch.split(2):
        reference[1](reference[0](mb))
    rank = dist.get_rank()
    ours, theirs = pipeline.modules[rank].module, reference[rank].module
    return {"calls": ours.calls, "statistics": relative_error(ours.norm.running_mean, theirs.norm.running_mean)}  # type: ignore[union-attr]


def clipping() -> dict[str, Any]:
    model = blocks(2)
    batch, target = torch.randn(4, 8, dtype=F64), torch.randn(4, 8, dtype=F64)
    _, grads = full_batch_gradients(model, dict(model.named_parameters()), batch, target, MSE)
    found = {}
    for norm_type in (2.0, float("inf"), 1.0):
        model.zero_grad()
        pipeline = DistributedPipeline(cut(model, [1, 1]), 2, "1f1b", MSE, NO_DOG)
        pipeline.step(batch, target)
        norm = torch.nn.utils.get_total_norm(list(grads.values()), norm_type)
        returned = pipeline.clip_grad_norm_(float(norm) / 4, norm_type)
        scaled = {f"module.{n}": g / 4 for n, g in grads.items()}
        found[str(norm_type)] = max(relative_error(returned, norm), worst(pipeline, scaled))
    return found


def message(run: Callable[[], Any]) -> str:
    """The text of the headrace error that `run` raises; empty if it raises none."""
    try:
        run()
    except HeadraceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals() -> dict[str, str]:
    """What must not run, and what it says; the same on every rank, and without a hang."""

    def make(schedule: str | Schedule = "1f1b", stages: Any = None, **options: Any) -> DistributedPipeline:
        given = cut(blocks(2), [1, 1]) if stages is None else stages
        return DistributedPipeline(given, 2, schedule, MSE, RunOptions(**{"watchdog": False, **options}))

    def ddp(stage: PipelineStage) -> nn.Module:
        return DistributedDataParallel(
            stage, process_group=dist.new_group([dist.get_rank()], use_local_synchronization=True)
        )

    swapped = (
        "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1\n1RECV_F1,1RECV_F0,1F0,1F1,1B0,1B1,1SEND_B0,1SEND_B1\n"
    )
    missing = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n"
    disorder = "0F0,0F1,0B1,0B0\n1F1,1F0,1B1,1B0\n"
    return {
        "ddp with split backward": message(lambda: make("zb-h1", wrap=ddp)),
        "missing action": message(lambda: make(Schedule.from_csv(missing, num_microbatches=2))),
        "disorder": message(lambda: make(Schedule.from_csv(disorder))),
        "swapped": message(lambda: proven(Schedule.from_csv(swapped))),
        "too many ranks": message(lambda: make(build_schedule("1f1b", 3, 2), cut(blocks(3), [1, 1, 1]))),
        "local stages by name": message(
            lambda: make(stages={dist.get_rank(): cut(blocks(2), [1, 1])[dist.get_rank()]})
        ),
        "frozen on one rank": message(half_frozen),
        "not my stage": message(
            lambda: make(build_schedule("1f1b", 2, 2), stages={1 - dist.get_rank(): cut(blocks(2), [1, 1])[0]})
        ),
    }


def half_frozen() -> None:
    """One copy of a shared weight would be trained, the other not."""
    model = language_model(2, tied=True)
    model[0].weight.requires_grad_(dist.get_rank() == 0)
    DistributedPipeline(cut(model, [2, 2]), 2, "1f1b", token_loss, NO_DOG)


def proven(schedule: Schedule) -> None:
    from headrace.parallel.check import prove

    prove(schedule)


def ddp_with_full_backward() -> float:
    """A stage in DistributedDataParallel (of one replica) on 1F1B: its gradients are reduced at the last backward."""
    model = blocks(2)
    batch, target = torch.randn(4, 8, dtype=F64), torch.randn(4, 8, dtype=F64)
    _, grads = full_batch_gradients(model, dict(model.named_parameters()), batch, target, MSE)
    mine = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    options = RunOptions(watchdog=False, wrap=lambda stage: DistributedDataParallel(stage, process_group=mine))
    pipeline = DistributedPipeline(cut(model, [1, 1]), 2, "1f1b", MSE, options)
    pipeline.step(batch, target)
    return worst(pipeline, {f"module.module.{n}": g for n, g in grads.items()})


CHECKS = [transposed, skips, shapes, masked, frozen_tie, no_probe, clipping, ddp_with_full_backward, refusals]


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    for check in CHECKS:
        torch.manual_seed(0)
        found[check.__name__] = check()
    world = dist.get_world_size()
    found["correct"] = {f"{s}/{c}": pp_correct.case(s, c, world) for s in sys.argv[2:] for c in pp_correct.CASES}
    path = out / f"rank{dist.get_rank()}.json"
    path.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

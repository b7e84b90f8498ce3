"""Every schedule on real ranks: gradients, loss, outputs, norm against the full batch on one process. Writes JSON.

Usage: torchrun ... pp_correct.py OUT [schedule ...]
"""

from __future__ import annotations

import copy
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_models import Block, blocks, cut, full_batch_gradients, language_model, relative_error, token_loss
from torch import nn

from headrace.parallel import schedules
from headrace.parallel.builders.registry import recipe
from headrace.parallel.torch_distributed import DistributedPipeline, RunOptions
from headrace.parallel.torch_stage import Tie

MSE = nn.functional.mse_loss
DTYPE = torch.float64
CASES = ("plain", "recompute", "tied", "uneven", "few")


def layers_per_stage(num_stages: int, total: int, *, uneven: bool) -> list[int]:
    counts = [total // num_stages] * num_stages
    if uneven and num_stages > 1:
        counts[0] += 1
        counts[-1] -= 1
    return counts


def case(schedule: str, name: str, world: int) -> dict[str, Any]:
    """One schedule with one kind of stages: the errors that this rank sees."""
    num_stages = world * recipe(schedule).chunks
    total = 2 * num_stages
    num_microbatches = max(1, world - 1) if name == "few" else 2 * world
    rows = 2 * num_microbatches
    torch.manual_seed(5)
    if name == "tied":
        model: nn.Sequential = language_model(total - 2, tied=True)
        batch, target = torch.randint(0, 17, (rows, 5)), torch.randint(0, 17, (rows, 5))
        loss_fn = token_loss
    else:
        model = blocks(total, dtype=DTYPE)
        batch, target = torch.randn(rows, 8, dtype=DTYPE), torch.randn(rows, 8, dtype=DTYPE)
        loss_fn = MSE
    named = dict(model.named_parameters())
    loss, wanted = full_batch_gradients(model, named, batch, target, loss_fn)
    norm = torch.nn.utils.get_total_norm(list(wanted.values()))
    calls = [b.calls for b in model.modules() if isinstance(b, Block)]
    counts = layers_per_stage(num_stages, total, uneven=name == "uneven")
    stages = cut(model, counts, recompute=name == "recompute")
    if name == "tied":  # ranks share no memory, but here one process built both ends: part them, as on a cluster
        stages = [stages[0], *(copy.deepcopy(s) for s in stages[1:])]
        ties = [Tie(((0, "module.0.weight"), (num_stages - 1, f"module.{total - 1}.weight")))]
        if recipe(schedule).placement == "v":  # first and last stage live on one rank: they must share
            stages[-1].get_submodule(f"module.{total - 1}").weight = stages[0].get_submodule("module.0").weight
    else:
        ties = None
    pipeline = DistributedPipeline(stages, num_microbatches, schedule, loss_fn, RunOptions(ties=ties, watchdog=False))
    out: dict[str, Any] = {}
    result = pipeline.step(batch if pipeline.is_first else None, target if pipeline.is_last else None)
    reference = {f"module.{k}": v for k, v in wanted.items()}
    if name == "tied":
        reference[f"module.{total - 1}.weight"] = reference["module.0.weight"]

    def worst(times: float) -> float:
        found = [
            relative_error(p.grad, times * reference[n])  # type: ignore[arg-type]
            for module in pipeline.modules.values()
            for n, p in module.named_parameters()
        ]
        return max(found)

    out["gradient"] = worst(1)
    assert result.loss is not None
    out["loss"] = relative_error(result.loss, loss)
    out["norm"] = relative_error(pipeline.clip_grad_norm_(1e9), norm)
    if pipeline.is_last:
        out["outputs"] = relative_error(result.outputs, model(batch)) if name != "tied" else 0.0
    local = [b for m in pipeline.modules.values() for b in m.modules() if isinstance(b, Block)]
    if name == "recompute":
        out["calls"] = max(b.calls - calls[0] for b in local) / num_microbatches
        if pipeline.is_last:  # model(batch) above ran each block once more
            out["calls"] = max(b.calls - calls[0] - 1 for b in local) / num_microbatches
    evaluated = pipeline.eval(batch if pipeline.is_first else None, target if pipeline.is_last else None)
    assert evaluated.loss is not None
    out["eval"] = relative_error(evaluated.loss, loss)
    pipeline.step(batch if pipeline.is_first else None, target if pipeline.is_last else None)
    out["twice"] = worst(2)
    timeline = pipeline.timeline()
    out["spans"] = len(timeline.spans)
    out["expected_spans"] = sum(len(a.leaves()) for row in pipeline.schedule.rows for a in row)
    pipeline.close()
    return out


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    world = dist.get_world_size()
    names = sys.argv[2:] or list(schedules())
    found = {f"{s}/{c}": case(s, c, world) for s in names for c in CASES}
    Path(sys.argv[1], f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

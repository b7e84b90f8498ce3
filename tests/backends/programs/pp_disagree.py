"""Ranks that are given different things: every rank gets the same error at construction, and the group lives on. Writes JSON.

Usage: pp_disagree.py OUT CASE ...    (2 processes; each case in its turn)
       pp_disagree.py OUT replicas    (3 processes: a pipeline of two whose ranks differ, and one of one)
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from headrace.errors import HeadraceError
from headrace.parallel import Schedule, build_schedule
from headrace.parallel.torch_distributed import DistributedPipeline, RunOptions
from headrace.parallel.torch_stage import split_model

OUT, CASES = Path(sys.argv[1]), sys.argv[2:]
SAME: dict[str, Any] = {
    "cut": [2, 2],
    "num_microbatches": 4,
    "schedule": "1f1b",
    "width": 4,
    "tied": False,
    "own": False,
}

DIFFERENT: dict[str, list[dict[str, Any]]] = {
    "schedule": [{"schedule": "1f1b"}, {"schedule": "gpipe"}],
    "schedule of one name": [{}, {"schedule": Schedule("1f1b", 4, build_schedule("gpipe", 2, 4).rows, (0, 1))}],
    "unknown schedule": [{}, {"schedule": "1fb1"}],
    "cut": [{"cut": [2, 2]}, {"cut": [1, 3]}],
    "cut of own stages": [{"own": True}, {"own": True, "cut": [1, 3]}],
    "cut of own stages on one": [{}, {"own": True, "cut": [1, 3]}],
    "number of stages": [{}, {"cut": [1, 1, 2]}],
    "microbatches": [{}, {"num_microbatches": 8}],
    "shape": [{}, {"width": 5}],
    "variable shapes": [{}, {"variable_shapes": True}],
    "watchdog": [{"watchdog": True}, {"watchdog": False}],
    "shared weight": [{"tied": True}, {}],
    "failed on one": [{}, {"reduction": "median"}],
    "equal": [{}, {}],
    "equal by another name": [{"schedule": "gpipe"}, {"schedule": build_schedule("gpipe", 2, 4).compute_only()}],
    "equal, own stages on one": [{}, {"own": True}],
    "equal, own stages": [{"own": True}, {"own": True}],
    "equal, shared weight": [{"tied": True}, {"tied": True}],
}


def layers(width: int, tied: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    if tied:
        model[3].weight = model[0].weight
    return model


def run(rank: int, given: dict[str, Any], group: dist.ProcessGroup | None = None) -> float:
    """The loss of one step."""
    given = {**SAME, **given}
    stages: Any = split_model(layers(given["width"], given["tied"]), given["cut"])
    schedule = given["schedule"]
    if given["own"]:
        stages = {rank: stages[rank]}
        schedule = build_schedule("1f1b", 2, 4)
    settings = {name: given[name] for name in ("variable_shapes", "watchdog", "reduction") if name in given}
    options = RunOptions(group=group, **{"watchdog": False, **settings})
    pipeline = DistributedPipeline(stages, given["num_microbatches"], schedule, nn.functional.mse_loss, options)
    until = time.monotonic() + given.get("patience", 0)
    found = pipeline.step(torch.ones(8, 4), torch.zeros(8, 4)).loss
    while time.monotonic() < until:  # news of other pipelines comes when it comes
        pipeline.step(torch.ones(8, 4), torch.zeros(8, 4))
    assert found is not None
    return float(found)


def attempt(rank: int, given: dict[str, Any], group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    began = time.monotonic()
    try:
        found: dict[str, Any] = {"loss": run(rank, given, group)}
    except HeadraceError as error:
        found = {"text": f"{type(error).__name__}: {error}"}
    return {**found, "seconds": time.monotonic() - began}


def replicas(rank: int) -> dict[str, Any]:
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    if rank == 2:
        return attempt(0, {"cut": [4], "watchdog": True, "patience": 5}, alone)
    return attempt(rank, {**DIFFERENT["cut"][rank], "watchdog": True}, pair)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    model, ones = layers(4, False), torch.ones(8, 4)
    found: dict[str, Any] = {"full batch": nn.functional.mse_loss(model(ones), torch.zeros(8, 4)).item()}
    for case in CASES:
        if case == "replicas":
            found[case] = replicas(rank)
        elif case == "ended" and rank == 1:
            break
        else:
            found[case] = attempt(rank, {} if case == "ended" else DIFFERENT[case][rank])
    (OUT / f"rank{rank}.json").write_text(json.dumps(found))
    time.sleep(0.3)
    os._exit(0)


if __name__ == "__main__":
    main()

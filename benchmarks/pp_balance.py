"""What balance is worth: a small embedding, sixteen blocks and a heavy head on four ranks, run for real.

    python -m benchmarks.pp_balance [--microbatches 16] [--unit 0.012] [--steps 3]

The layers sleep, so that four ranks run side by side on any machine: the embedding 0.3, a block 1, the head 2.6 units
forward, twice that backward. The even cut gives every stage four blocks, and the head to the last on top. The other cut
comes from the costs by layer, as `headrace.parallel.plan` does it with measured ones.
"""

from __future__ import annotations

import argparse
import json
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.pp_sleep import Sleeper, launch
from headrace.parallel import build_schedule
from headrace.parallel.layers import LayerCost, stage_costs
from headrace.parallel.partition import balance
from headrace.parallel.simulate import simulate
from headrace.parallel.torch_distributed import DistributedPipeline, RunOptions
from headrace.parallel.torch_stage import split_model

COSTS = (0.3, *[1.0] * 16, 2.6)
EVEN = (5, 4, 4, 5)


def loss_fn(out: Tensor, target: Tensor) -> Tensor:
    return ((out - target) ** 2).mean()


def worker(arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    m = arguments.microbatches
    schedule = build_schedule("1f1b", 4, m)
    layers = [LayerCost.of(str(i), c * arguments.unit, 2 * c * arguments.unit) for i, c in enumerate(COSTS)]
    cuts = {"even": EVEN, "balanced": balance(layers, schedule).counts}
    rows: list[dict[str, Any]] = []
    for name, counts in cuts.items():
        model = [Sleeper((c.forward, c.backward_input, c.backward_weight)) for c in layers]
        pipeline = DistributedPipeline(split_model(model, counts), m, schedule, loss_fn, RunOptions(watchdog=False))
        batch = torch.zeros(m, 64)
        makespans: list[float] = []
        for step in range(arguments.steps + 1):
            pipeline.step(batch, batch, align=True)
            timeline = pipeline.timeline()
            if step:
                makespans.append(timeline.makespan)
        predicted = simulate(schedule, stage_costs(layers, counts))
        rows.append(
            {
                "cut": name,
                "layers": list(counts),
                "predicted": predicted.makespan,
                "measured": median(makespans),
                "explain": pipeline.compare(predicted).explain(),
            }
        )
    if dist.get_rank() == 0:
        Path(arguments.out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def gain(rows: list[dict[str, Any]], what: str) -> float:
    """How much shorter the balanced step is: 0.2 is twenty per cent."""
    even, balanced = rows
    return 1 - balanced[what] / even[what]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--unit", type=float, default=0.012, help="seconds of a block's forward")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", default="")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    given = [f"--{name}={getattr(arguments, name)}" for name in ("microbatches", "unit", "steps")]
    rows = launch(__file__, given, 4)
    for row in rows:
        print(f"{row['cut']:<9} {row['layers']}  predicted {row['predicted']:.2f} s  measured {row['measured']:.2f} s")
    print(f"gain      predicted {gain(rows, 'predicted'):.1%}, measured {gain(rows, 'measured'):.1%}")
    for row in rows:
        print(f"\n{row['cut']}\n{row['explain']}")


if __name__ == "__main__":
    main()

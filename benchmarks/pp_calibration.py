"""Does a real run take the time that the simulator says? Stages that sleep, every schedule, real processes on gloo.

    python -m benchmarks.pp_calibration [--ranks 4] [--microbatches 8] [--unit 0.04] [--steps 5] [--schedules 1f1b zbv]

A stage that sleeps takes its time on any number of cores, so a laptop can hold the engine, the transports and the
schedule to account. Forward, input gradient and weight gradient of a stage take 1, 1.3 and 0.7 units. Printed: the
median makespan of `--steps` steps beside the simulation of the same schedule.
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

from benchmarks.pp_sleep import Sleeper, launch
from headrace.parallel import schedules
from headrace.parallel.builders.registry import recipe
from headrace.parallel.costs import StageCosts
from headrace.parallel.simulate import simulate
from headrace.parallel.torch_distributed import DistributedPipeline
from headrace.parallel.torch_stage import PipelineStage

TIMES = (1.0, 1.3, 0.7)


def worker(arguments: argparse.Namespace) -> None:
    """One rank: run each schedule, gather the timelines, let rank 0 write the table."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    world, m = dist.get_world_size(), arguments.microbatches
    rows: list[dict[str, Any]] = []
    for name in arguments.schedules or schedules():
        chunks = recipe(name).chunks
        times = tuple(t * arguments.unit for t in TIMES)
        stages = [PipelineStage(Sleeper(times)) for _ in range(world * chunks)]  # type: ignore[arg-type]
        pipeline = DistributedPipeline(stages, m, name, lambda out, target: ((out - target) ** 2).mean())
        batch = torch.zeros(m, 64)
        makespans: list[float] = []
        for step in range(arguments.steps + 1):
            pipeline.step(batch, batch, align=True)
            timeline = pipeline.timeline()
            if step:  # the first connects the ranks
                makespans.append(timeline.makespan)
        predicted = simulate(pipeline.schedule, StageCosts.uniform(world * chunks, times))  # type: ignore[arg-type]
        report = pipeline.compare(predicted)
        rows.append(
            {
                "schedule": name,
                "predicted": predicted.makespan,
                "measured": median(makespans),
                "all": makespans,
                "jitter": report.jitter,
            }
        )
        pipeline.close()
    if dist.get_rank() == 0:
        Path(arguments.out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["schedule             predicted ms  measured ms      off"]
    for row in rows:
        predicted, measured = row["predicted"] * 1000, row["measured"] * 1000
        lines.append(f"{row['schedule']:<20} {predicted:>12.0f} {measured:>12.0f} {measured / predicted - 1:>+8.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.04, help="seconds of a forward of one stage")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--schedules", nargs="*")
    parser.add_argument("--out", default="")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    given = [f"--microbatches={arguments.microbatches}", f"--unit={arguments.unit}", f"--steps={arguments.steps}"]
    if arguments.schedules:
        given += ["--schedules", *arguments.schedules]
    rows = launch(__file__, given, arguments.ranks)
    print(f"{arguments.ranks} ranks, {arguments.microbatches} microbatches, unit {arguments.unit * 1000:g} ms, gloo")
    print(table(rows))
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

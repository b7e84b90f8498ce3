"""Measure, plan, run and compare over two real processes. Starts them itself:

    python examples/model_pipeline_run.py

A language model with a heavy head is measured layer by layer, cut by its measured times, and trained on two ranks; the
same steps on the even cut show what the cut is worth.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.parallel import (
    DistributedPipeline,
    balance,
    build_schedule,
    feed,
    load_checkpoint,
    profile_layers,
    save_checkpoint,
    simulate,
    split_model,
    stage_costs,
)
from headrace.parallel.torch_profile import Repeats

RANKS, MICROBATCHES, ROWS, LENGTH, VOCABULARY, WIDTH, STEPS = 2, 8, 32, 64, 4096, 128, 8


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(6)), nn.Linear(WIDTH, VOCABULARY))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(steps: int) -> Iterator[dict[str, Tensor]]:
    """Stands for a data pipeline: dicts with input_ids and labels, equal on every rank that asks."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        yield {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(pipeline: DistributedPipeline) -> tuple[list[float], float]:
    """The losses of some steps, and the median makespan of a step."""
    optimizer = torch.optim.AdamW(pipeline.parameters(), 1e-3)
    losses: list[float] = []
    makespans: list[float] = []
    for batch, target in feed(pipeline, lambda: batches(STEPS), microbatch_size=ROWS // MICROBATCHES):
        optimizer.zero_grad()
        result = pipeline.step(batch, target)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(float(result.loss) if result.loss is not None else float("nan"))
        makespans.append(pipeline.timeline().makespan)
    return losses, median(makespans[1:])


def shared_counts(counts: Sequence[int]) -> list[int]:
    """The cut that rank 0 measured, on every rank: each measures a little differently."""
    table = torch.tensor(list(counts))
    dist.broadcast(table, 0)
    return table.tolist()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    schedule = build_schedule("1f1b", RANKS, MICROBATCHES)
    sample = next(batches(1))
    size = ROWS // MICROBATCHES
    often = Repeats(warmup=3, timed=15)
    costs = profile_layers(model(), sample["input_ids"][:size], sample["labels"][:size], loss_fn, often)
    say("layer seconds " + ", ".join(f"{c.name}: {c.seconds * 1000:.1f} ms" for c in costs))
    cuts = {"even": [4, 4], "balanced": shared_counts(balance(costs, schedule).counts)}
    times: dict[str, float] = {}
    for name, counts in cuts.items():
        pipeline = DistributedPipeline(split_model(model(), counts), MICROBATCHES, schedule, loss_fn)
        losses, times[name] = train(pipeline)
        report = pipeline.compare(simulate(schedule, stage_costs(costs, counts)))
        say(f"\n{name} cut {counts}: losses {', '.join(f'{x:.3f}' for x in losses)}\n{report.explain()}")
        if name == "even":
            folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
            dist.broadcast_object_list(folder)
            save_checkpoint(folder[0], pipeline, extra={"step": STEPS} if pipeline.is_first else None)
        else:
            extra = load_checkpoint(folder[0], pipeline)
            say(f"the checkpoint of the even cut, after step {extra['step']}, loads into this one")
        pipeline.close()
    say(f"\nstep of the even cut {times['even']:.3f} s, of the balanced one {times['balanced']:.3f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        os.execv(sys.executable, [sys.executable, *torchrun, __file__])

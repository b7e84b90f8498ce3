"""Pipeline parallelism on a laptop, in one process: exact gradients, the bubble, memory, balance.

python examples/model_pipeline.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.parallel import (
    Pipeline,
    StageCosts,
    balance,
    bubble_fraction,
    build_schedule,
    compare_recompute,
    profile_layers,
    split_model,
    to_text,
)

VOCABULARY, WIDTH, LENGTH, BATCH, MICROBATCHES = 2048, 64, 32, 16, 8


class Block(nn.Module):
    """A residual block of a small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(8)), nn.Linear(WIDTH, VOCABULARY))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    torch.set_num_threads(1)  # small matrices: threads cost more than they give
    layers = model()
    tokens, labels = batch()

    print("1. The gradients of any schedule are those of the full batch")
    loss_fn(layers(tokens), labels).backward()
    wanted = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    for name in ("gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zbv"):
        layers.zero_grad()
        stages = split_model(layers, num_stages=4)
        result = Pipeline(stages, MICROBATCHES, name, loss_fn).step(tokens, labels)
        worst = max(
            float((p.grad - w).abs().max() / w.abs().max())
            for p, w in zip(layers.parameters(), wanted, strict=True)
            if p.grad is not None
        )
        print(f"   {name:<18} loss {float(result.loss or 0):.4f}  gradient off by {worst:.0e}")

    print(f"\n2. 1F1B on equal stages, bubble {bubble_fraction(4, MICROBATCHES):.1%} by the closed form")
    stages = split_model(layers, num_stages=4)
    result = Pipeline(stages, MICROBATCHES, "1f1b", loss_fn, costs=StageCosts.uniform(4)).step(tokens, labels)
    print(to_text(result.timeline, width=100))
    print(f"   on simulated clocks (forward 1, backward 2): bubble {result.timeline.bubble:.1%}")
    print(f"   microbatches in flight by stage {result.peak_in_flight}")

    print("\n3. Equal time beats equal layers: measured costs, and the cut that follows from them")
    costs = profile_layers(layers, tokens[:2], labels[:2], loss_fn)
    for cost in (costs[0], costs[1], costs[-1]):
        print(f"   layer {cost.name:<3} {cost.seconds * 1000:6.2f} ms, {cost.activation:>9,} bytes for the backward")
    found = balance(costs, build_schedule("1f1b", 4, MICROBATCHES))
    print(f"   layers per stage {list(found.counts)}: step {found.gain:.0%} shorter than with the even cut (simulated)")

    print("\n4. Activation checkpointing: memory against time")
    layers.zero_grad()
    print(compare_recompute(layers, [3, 2, 2, 3], batch, loss_fn, num_microbatches=MICROBATCHES).explain())


if __name__ == "__main__":
    main()

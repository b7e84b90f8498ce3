"""Small models for the tests: deterministic, with something of everything that makes pipelines go wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from headrace.parallel.torch_stage import PipelineStage, split_model

WIDTH = 8


class Block(nn.Module):
    """A residual block: norm, two linears, a parameter of its own that cannot defer; counts its forwards."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


def blocks(count: int, width: int = WIDTH, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(width) for _ in range(count))).to(dtype)


def language_model(
    num_blocks: int, vocabulary: int = 17, *, tied: bool, dtype: torch.dtype = torch.float64
) -> nn.Sequential:
    """Embedding, blocks, head; `tied` shares the embedding's weight with the head."""
    torch.manual_seed(1)
    embed, head = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
    model = nn.Sequential(embed, *(Block() for _ in range(num_blocks)), head).to(dtype)
    if tied:
        head.weight = embed.weight
    return model


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def full_batch_gradients(
    model: Callable[[Tensor], Tensor],
    parameters: dict[str, Tensor],
    batch: Tensor,
    target: Tensor,
    loss_fn: Callable[..., Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The reference: one forward and backward over the whole batch. Leaves no gradient behind."""
    loss = loss_fn(model(batch), target)
    names = list(parameters)
    grads = torch.autograd.grad(loss, [parameters[n] for n in names])
    return loss.detach(), dict(zip(names, grads, strict=True))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over largest reference value."""
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def cut(model: nn.Sequential, counts: Sequence[int], *, recompute: bool = False) -> list[PipelineStage]:
    return split_model(model, counts, recompute=recompute)


def clone(model: nn.Sequential) -> nn.Sequential:
    return copy.deepcopy(model)

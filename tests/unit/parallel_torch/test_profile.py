"""Measured costs: bytes exactly, times by order of size, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from pipeline_models import blocks, language_model, token_loss
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.parallel.layers import Hardware
from headrace.parallel.torch_memory import LiveBytes, compare_recompute
from headrace.parallel.torch_profile import Repeats, plan, profile_layers

MSE = nn.functional.mse_loss


def test_bytes_are_exact() -> None:
    """A linear saves its input (which the layer before has, or the batch is); a tanh its output, which it hands on."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    first, tanh, last = profile_layers(model, torch.randn(16, 4))
    assert (first.parameters, tanh.parameters, last.parameters) == (4 * 40, 0, 4 * 18)
    assert (first.output, tanh.output, last.output) == (4 * 16 * 8, 4 * 16 * 8, 4 * 16 * 2)
    assert (first.activation, tanh.activation, last.activation) == (4 * 16 * 4, 4 * 16 * 8, 0)


def test_times_follow_the_work() -> None:
    """A layer of sixty-four times the arithmetic takes longer, in each of its three parts."""
    torch.manual_seed(0)
    costs = profile_layers([nn.Linear(64, 64), nn.Linear(64, 2048), nn.Linear(2048, 2048)], torch.randn(128, 64))
    assert costs[2].forward > costs[0].forward
    assert costs[2].backward_input > costs[0].backward_input
    assert costs[2].backward_weight > costs[0].backward_weight


def test_loss_belongs_to_the_last_layer() -> None:
    model = language_model(1, tied=True)
    tokens = torch.randint(0, 17, (2, 5))
    bare = profile_layers(model, tokens)
    full = profile_layers(model, tokens, tokens, token_loss)
    assert full[-1].activation > bare[-1].activation
    assert full[0].tied == full[-1].tied == "0"
    assert full[1].tied is None


def test_nothing_is_left_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[0].weight.grad = torch.full((4, 4), 7.0)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    profile_layers(model, torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 7.0))
    assert model[0].bias.grad is None
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    assert int(model[1].num_batches_tracked) == 0
    assert "forward" not in model[0].__dict__


def test_errors_name_the_layer() -> None:
    with pytest.raises(ConfigError, match=r"layer 1 \('1'\) failed on float32\[2, 4\]"):
        profile_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4)), torch.randn(2, 4))

    class Dictionary(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x}

    with pytest.raises(ConfigError, match="only tensors go from layer to layer"):
        profile_layers([Dictionary(), nn.Linear(4, 4)], torch.randn(2, 4))
    with pytest.raises(ConfigError, match="timed at least 1"):
        Repeats(timed=0)


def test_plan_chooses_what_fits() -> None:
    """From a model to a schedule and a cut; with a tight cap, what fits in it or a refusal of everything."""
    model = blocks(6, dtype=torch.float32)
    batch = torch.randn(4, 8)
    free = plan(model, batch, 2, num_microbatches=4, target=batch, loss_fn=MSE, hardware=Hardware(latency=1e-5))
    assert sum(free.num_layers_per_stage) == 6
    assert free.schedule.num_ranks == 2
    assert free.schedule.num_microbatches == 4
    tight = plan(model, batch, 2, num_microbatches=4, memory=1000, schedules=["1f1b", "gpipe"])
    assert all(c.rejected for c in tight.candidates)
    assert {c.schedule for c in tight.candidates} == {"1f1b", "gpipe"}


def test_live_bytes_counts_what_is_alive() -> None:
    with LiveBytes() as live:
        a = torch.zeros(1000)
        b = a.view(10, 100) + 1
        del a
        c = b.t()
        del b, c
        torch.ones(10)
    assert live.peak == 8000
    assert live.now == 0


def test_recompute_trades_memory_for_time() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 32)) for _ in range(6)))

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(64, 32), torch.randn(64, 32)

    report = compare_recompute(model, [3, 3], batch, MSE, num_microbatches=8, schedule="gpipe")
    assert report.bytes_recomputed < report.bytes_kept / 2
    assert report.saved == pytest.approx(1 - report.bytes_recomputed / report.bytes_kept)
    text = report.explain()
    assert f"{report.bytes_kept:,}" in text
    assert f"{report.bytes_recomputed:,}" in text

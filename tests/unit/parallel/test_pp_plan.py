"""Cutting layers, balancing them, and planning: what is chosen, and the reasons given for the rest."""

from __future__ import annotations

import math

import pytest

from headrace.errors import ConfigError, FormatError
from headrace.parallel import (
    Hardware,
    LayerCost,
    balance,
    build_schedule,
    even_split,
    load_layers,
    partition,
    plan_layers,
    save_layers,
    schedules,
    stage_costs,
)
from headrace.parallel.layers import cut, recompute_peak, with_checkpointing
from headrace.parallel.planner import parse_size, size

MIB = 2**20


def heavy_ends(blocks=16):
    """A light embedding, equal blocks, a heavy head: forward 1 and backward 2 for a block."""
    inner = [LayerCost.of(f"block{i}", 1, 2) for i in range(blocks)]
    return [LayerCost.of("embedding", 0.3, 0.6), *inner, LayerCost.of("head", 2.6, 5.2)]


def sized():
    """Layers with bytes, in the proportions of a small language model with tied embeddings."""
    blocks = [LayerCost(f"block{i}", 0.010, 0.011, 0.009, 64 * MIB, 4 * MIB, 28 * MIB) for i in range(16)]
    ends = {"parameters": 200 * MIB, "tied": "embedding"}
    first = LayerCost("embedding", 0.003, 0.0, 0.006, 4 * MIB, 4 * MIB, **ends)
    return [first, *blocks, LayerCost("head", 0.026, 0.026, 0.026, 100 * MIB, 0, **ends)]


def test_balanced_cut_beats_the_even_one_by_a_fifth():
    """Equal compute a stage matters more than equal layers: 353.7 against 280.5 for 16 microbatches on four ranks."""
    found = balance(heavy_ends(), build_schedule("1f1b", 4, 16), even=(5, 4, 4, 5))
    assert found.counts == (5, 5, 5, 3)
    assert found.even_makespan == pytest.approx(353.7)
    assert found.makespan == pytest.approx(280.5)
    assert found.gain == pytest.approx(0.207, abs=0.001)
    assert "20.7% saved" in found.explain()


@pytest.mark.parametrize("name", schedules())
def test_balanced_cut_beats_the_even_one_on_every_schedule(name):
    """The even one: equal blocks, with the embedding on the first stage and the head on the last."""
    schedule = build_schedule(name, 4, 16)
    inner = even_split(16, schedule.num_stages)
    even = (inner[0] + 1, *inner[1:-1], inner[-1] + 1)
    found = balance(heavy_ends(), schedule, even=even)
    assert found.gain >= 0.15, found.explain()


def test_equal_parameters_are_not_equal_compute():
    """An embedding with most of the parameters costs little time; cutting by parameters starves the other ranks."""
    layers = sized()
    by_parameters = (1, 8, 8, 1)
    schedule = build_schedule("1f1b", 4, 16)
    by_time = balance(layers, schedule, even=by_parameters)
    assert by_time.even_makespan > 1.4 * by_time.makespan


def test_ties_across_stages_are_reported():
    found = balance(sized(), build_schedule("1f1b", 4, 8))
    assert found.ties == {"embedding": (0, 3)}
    assert "tied 'embedding' is on stages 0, 3: its gradients are summed over ranks 0, 3" in found.explain()


def test_a_v_holds_tied_ends_once():
    """First and last stage live on rank 0, so an embedding tied to the head is there one time, not two."""
    schedule = build_schedule("zbv", 4, 8)
    found = balance(sized(), schedule)
    assert "stages 0, 7, all on rank 0: held once" in found.explain()
    apart = stage_costs(sized(), found.counts)
    assert sum(apart.state) - sum(found.costs.state) == 4 * 200 * MIB


def test_pareto_front():
    plan = plan_layers(sized(), 4, 8, names=["gpipe", "1f1b", "zb-h1", "v-half"])
    front = plan.pareto
    assert [c.seconds for c in front] == sorted(c.seconds for c in front)
    sizes = [max(c.peak_bytes) for c in front]
    assert sizes == sorted(sizes, reverse=True)
    assert len(front) >= 2
    for other in plan.candidates:
        assert any(c.seconds <= other.seconds and max(c.peak_bytes) <= max(other.peak_bytes) for c in front)


def test_glued_layers_stay_together():
    layers = [LayerCost(f"l{i}", 1, 1, 1, glued=i % 2 == 0) for i in range(6)]
    assert partition(layers, 3) == (2, 2, 2)
    with pytest.raises(ConfigError, match="no cut of 6 layers into 4 stages"):
        partition(layers, 4)


def test_caps_bend_the_cut():
    layers = [LayerCost(f"l{i}", 1, 1, 1, parameters=10) for i in range(4)] + [
        LayerCost("big", 1, 1, 1, parameters=100)
    ]
    assert partition(layers, 2) == (3, 2) or partition(layers, 2) == (2, 3)
    assert partition(layers, 2, memory=[math.inf, 400]) == (4, 1)
    with pytest.raises(ConfigError, match="layer 'big' alone needs 400 bytes"):
        partition(layers, 2, memory=300)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: even_split(3, 4), "3 layers cannot fill 4 stages"),
        (lambda: partition([], 1), "0 layers cannot fill 1 stages"),
        (lambda: cut(heavy_ends(2), (1, 2)), "they sum to 3"),
        (lambda: cut(heavy_ends(2), (4, 0)), "stage 1 gets 0 layers"),
        (lambda: LayerCost("x", -1, 0, 0), "layer 'x': forward is -1"),
        (lambda: plan_layers([], 2, 4), "no layers to plan for"),
        (lambda: plan_layers(heavy_ends(), 2, 0), "num_microbatches is 0"),
        (lambda: partition(heavy_ends(), 2, held=[1]), "one value for each of 2 stages"),
    ],
)
def test_bad_questions(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_even_split_and_sums():
    assert even_split(10, 4) == (3, 3, 2, 2)
    costs = stage_costs(sized(), (5, 4, 4, 5), Hardware(latency=0.001, bandwidth=1e9))
    assert costs.activation[1] == 4 * 64 * MIB
    assert costs.boundary == (4 * MIB,) * 3
    assert costs.state[0] == 4 * (200 + 4 * 28) * MIB
    assert costs.latency == (0.001,) * 3


def test_checkpointing_trades_time_for_bytes():
    layers = sized()
    again = with_checkpointing(layers)
    assert again[3].backward_input == layers[3].backward_input + layers[3].forward
    assert again[3].activation == 4 * MIB
    assert recompute_peak(layers) == 100 * MIB


def test_plan_takes_the_fastest_that_fits():
    free = plan_layers(sized(), 4, 8)
    assert free.choice.seconds == min(c.seconds for c in free.candidates)
    assert free.choice.rejected == ""
    tight = plan_layers(sized(), 4, 8, memory=1.6 * 2**30)
    assert max(tight.choice.peak_bytes) <= 1.6 * 2**30
    assert tight.choice.seconds >= free.choice.seconds
    assert max(tight.choice.peak_bytes) < max(free.choice.peak_bytes)
    fits = [c for c in tight.candidates if c.peak_bytes and max(c.peak_bytes) <= tight.memory]
    assert tight.choice.seconds == min(c.seconds for c in fits)


def test_plan_explains_itself():
    plan = plan_layers(sized(), 4, 8, memory=2**31, names=["1f1b", "zbv", "gpipe"])
    text = plan.explain()
    assert "chosen" in text
    assert "slower" in text
    assert "cap 2 GiB" in text
    assert f"layers per stage {list(plan.choice.counts)}" in text
    assert plan.num_layers_per_stage == plan.choice.counts
    assert plan.recompute is plan.choice.checkpointing


def test_plan_predicts_proves_and_draws_its_choice(tmp_path):
    plan = plan_layers(heavy_ends(), 4, 8, names=["1f1b", "zbv"], checkpointing=[False])
    assert plan.simulation.makespan == pytest.approx(plan.choice.seconds)
    assert plan.prove().num_computations > 0
    plan.save_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


def test_plan_says_why_nothing_is_possible():
    too_many = plan_layers(heavy_ends(2), 8, 4, names=["1f1b"])
    with pytest.raises(ConfigError, match="needs 8 stages, there are 4 layers"):
        _ = too_many.choice
    too_big = plan_layers(sized(), 4, 4, memory=2**20, names=["1f1b"])
    with pytest.raises(ConfigError, match="no schedule fits in 1 MiB a rank; the least is 1f1b"):
        _ = too_big.choice


def test_plans_are_deterministic():
    assert plan_layers(sized(), 3, 6).candidates == plan_layers(sized(), 3, 6).candidates


def test_profiles_on_disk(tmp_path):
    save_layers(sized(), tmp_path / "layers.json")
    assert load_layers(tmp_path / "layers.json") == sized()
    (tmp_path / "bad.json").write_text('[{"name": "x", "forward": 1}]')
    with pytest.raises(FormatError, match=r"bad.json is not a profile of layers.*backward_input"):
        load_layers(tmp_path / "bad.json")


def test_sizes():
    assert parse_size("6GiB") == 6 * 2**30
    assert parse_size("1.5 GB") == 1.5e9
    assert parse_size("512") == 512
    assert parse_size("unlimited") == math.inf
    assert size(3 * 2**20) == "3 MiB"
    for bad in ("6 potatoes", "", "-1GiB", "1.2.3GB", "0"):
        with pytest.raises(ConfigError, match="is not a size"):
            parse_size(bad)

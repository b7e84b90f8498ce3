"""The partition is exact: no contiguous cut that fits has a faster slowest stage."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.parallel import LayerCost, StageCosts, balance, build_schedule, partition, simulate
from headrace.parallel.layers import cut, parameter_bytes, stage_costs


@st.composite
def layer_lists(draw):
    size = draw(st.integers(1, 8))
    return [
        LayerCost(
            f"layer{i}",
            draw(st.integers(0, 9)),
            draw(st.integers(0, 9)),
            draw(st.integers(0, 9)),
            draw(st.integers(0, 9)),
            draw(st.integers(0, 3)),
            draw(st.integers(0, 9)),
            draw(st.sampled_from([None, None, "shared"])),
            draw(st.integers(0, 4)) == 0,
        )
        for i in range(size)
    ]


def all_cuts(layers, stages):
    for places in combinations(range(1, len(layers)), stages - 1):
        ends = (*places, len(layers))
        if not any(layers[end - 1].glued for end in places):
            yield tuple(end - begin for begin, end in zip((0, *places), ends, strict=True))


def slowest(layers, counts):
    return max(sum(x.seconds for x in stage) for stage in cut(layers, counts))


def fits(layers, counts, cap, held):
    need = (
        parameter_bytes(stage) * 4 + held[s] * sum(x.activation for x in stage)
        for s, stage in enumerate(cut(layers, counts))
    )
    return max(need) <= cap


@given(layers=layer_lists(), stages=st.integers(1, 4), cap=st.sampled_from([float("inf"), 120.0, 60.0]), data=st.data())
@settings(max_examples=400, deadline=None)
def test_exact_minimax(layers, stages, cap, data):
    held = data.draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    possible = [c for c in all_cuts(layers, stages) if fits(layers, c, cap, held)]
    try:
        found = partition(layers, stages, memory=cap, held=held)
    except ConfigError:
        assert not possible
        return
    assert found in possible
    assert slowest(layers, found) == min(slowest(layers, c) for c in possible)


@given(layers=layer_lists(), name=st.sampled_from(["gpipe", "1f1b", "zb-h1", "zbv"]), ranks=st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_balance_is_never_slower_than_the_exact_cut(layers, name, ranks):
    schedule = build_schedule(name, ranks, 5)
    if schedule.num_stages > len(layers) or any(x.glued for x in layers):
        return
    found = balance(layers, schedule)
    start = simulate(schedule, stage_costs(layers, partition(layers, schedule.num_stages)))
    assert found.makespan <= start.makespan
    assert sum(found.counts) == len(layers)
    assert isinstance(found.costs, StageCosts)

"""Topology is not data: any number of groups, resized at any step, delivers the single-process stream."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_recipes import Recipe, recipes, seen

LAW = settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
LEGS = st.lists(st.tuples(st.one_of(st.integers(1, 4), st.integers(1, 12)), st.integers(0, 4)), min_size=1, max_size=3)
QUIET: dict[str, Any] = {"runner": "inline", "auto_validation": "off"}


def endless(recipe: Recipe) -> Recipe:
    """The same recipe without an end, so that every group can fill every step."""
    source = {k: v for k, v in recipe.source.items() if k != "exhausted_policy"}
    # No lane may starve: chunks are dealt by chance, passes are reshuffled, and a flush emits its tail as a padded row. (A lane
    # that is dealt the same empty documents for ever, or whose tails are always dropped, rightly never fills a batch.)
    source |= {"stop_after_passes": None, "lane_assignment": "permute", "shuffle_within_shard": True}
    return replace(
        recipe,
        source=source,
        keep=None if recipe.keep == 2 else recipe.keep,
        pack=recipe.pack and {**recipe.pack, "pad_token_id": 7},
        batch=recipe.batch or {"microbatch_size": 2},
    )


def fertile(recipe: Recipe) -> bool:
    """Whether records (and tokens) keep coming: a corpus of filtered or empty documents alone never fills a batch."""
    numbers = [
        1000 * (1 + "abc".index(n)) + 100 * i + r
        for n, c in recipe.shards.items()
        for i, k in enumerate(c)
        for r in range(k)
    ]
    return any(0 < n % 10 <= 3 and (recipe.keep is None or n % recipe.keep) for n in numbers)


RESIZED = given(recipes(max_lanes=12).map(endless).filter(fertile), LEGS, st.sampled_from([1, 7, 1024]))


@LAW
@RESIZED
def test_resized_runs_deliver_the_single_process_stream(recipe: Recipe, legs: list[tuple[int, int]], cut: int) -> None:
    resize(recipe, legs, cut)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(LAW, max_examples=4000)
@RESIZED
def test_thousands_of_resized_runs_do(recipe: Recipe, legs: list[tuple[int, int]], cut: int) -> None:
    resize(recipe, legs, cut)


def resize(recipe: Recipe, legs: list[tuple[int, int]], cut: int) -> None:
    """Run the legs, each of some groups and steps, and compare with a run of one group."""
    total = sum(groups * steps for groups, steps in legs)
    alone = iter(recipe.build(cut_every=cut, **QUIET))
    expected = [seen(item) for item in islice(alone, total)]
    alone.close()
    delivered: dict[int, Any] = {}
    states: list[dict[str, Any]] = []
    position = 0
    for groups, steps in legs:
        next_states = []
        for group in range(groups):
            pipeline = recipe.build(cut_every=cut, dp_degree=groups, dp_group_id=group, **QUIET)
            if states:
                pipeline.restore(states)
            iterator = iter(pipeline)
            for step, item in enumerate(islice(iterator, steps)):
                delivered[position + step * groups + (group - position) % groups] = seen(item)
            next_states.append(pipeline.checkpoint())
            iterator.close()
        states, position = next_states, position + groups * steps
    assert [delivered[j] for j in range(total)] == expected


@settings(LAW, max_examples=80)
@given(recipes(max_lanes=6).map(endless).filter(fertile), st.integers(1, 8), st.integers(0, 6))
def test_ranks_that_compute_the_same_lane_agree_on_it(recipe: Recipe, groups: int, steps: int) -> None:
    lanes: dict[str, Any] = {}
    for group in range(groups):
        pipeline = recipe.build(dp_degree=groups, dp_group_id=group, cut_every=5, **QUIET)
        iterator = iter(pipeline)
        assert len(list(islice(iterator, steps))) == steps
        state = pipeline.checkpoint()
        iterator.close()
        assert state["position"] == steps * groups
        for lane, held in state["lanes"].items():
            assert lanes.setdefault(lane, held) == held
    assert sorted(map(int, lanes)) == list(range(recipe.lanes))


@settings(LAW, max_examples=60)
@given(
    recipes(max_lanes=3).map(endless).filter(fertile),
    st.integers(1, 3),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
def test_contiguous_groups_resume_exactly(recipe: Recipe, groups: int, legs: list[int]) -> None:
    wide = replace(recipe, lanes=recipe.lanes * groups)
    for group in range(groups):
        options: dict[str, Any] = {"dp_degree": groups, "dp_group_id": group, "mapping_strategy": "contiguous", **QUIET}
        whole = iter(wide.build(**options))
        expected = [seen(item) for item in islice(whole, sum(legs))]
        whole.close()
        got: list[Any] = []
        state = None
        for steps in legs:
            pipeline = wide.build(cut_every=7, **options)
            if state is not None:
                pipeline.restore(state)
            iterator = iter(pipeline)
            got += [seen(item) for item in islice(iterator, steps)]
            state = pipeline.checkpoint()
            iterator.close()
        assert got == expected

"""Changing a run on purpose: nothing delivered comes again, nothing is lost uncounted, and settings and topology stay no data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pipeline_recipes import ALGORITHMS, Recipe, deep_recipes, packing, recipes, seen, settings_of_a_run
from test_topology_laws import LEGS, endless, fertile

# a changed pack_flat may be given groups that leave out a dataset of this run, and says so
pytestmark = pytest.mark.filterwarnings("ignore:pack_flat. in no group")
LAW = settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
PAD = 7
"""No token of a document."""
CUT = st.sampled_from([1, 4, 13, 40])
QUIET: dict[str, Any] = {"runner": "inline", "auto_validation": "off", "uneven": "keep"}
KINDS = ("mixture", "datasets", "shards", "flush", "shuffle", "pack_flat", "batch")


@st.composite
def changed(draw: st.DrawFn, recipe: Recipe, kinds: tuple[str, ...] = KINDS) -> Recipe:
    """The recipe with some of its parameters changed."""
    chosen = draw(st.sets(st.sampled_from(kinds), min_size=1))
    shards, weights = dict(recipe.shards), dict(recipe.weights)
    if "mixture" in chosen:
        weights = {name: draw(st.floats(0.05, 1.0)) for name in weights}
    if "datasets" in chosen:
        for name in sorted(set("abc") - set(shards)):
            shards[name], weights[name] = (draw(st.integers(1, 30)),), draw(st.floats(0.05, 1.0))
    if "shards" in chosen:
        shards = {name: (*counts, *draw(st.lists(st.integers(0, 20), max_size=2))) for name, counts in shards.items()}
    recipe = replace(recipe, shards=shards, weights=weights)
    if "flush" in chosen:
        recipe = replace(recipe, flush=draw(st.sampled_from([None, 1, 2])))
    if "shuffle" in chosen and recipe.shuffle:
        algorithm = draw(st.sampled_from(ALGORITHMS))
        recipe = replace(recipe, shuffle=draw(st.integers(1, 30)), shuffle_algorithm=algorithm)
    if "shuffle" in chosen and recipe.late_shuffle:
        recipe = replace(recipe, late_shuffle=draw(st.integers(1, 9)))
    if "pack_flat" in chosen and recipe.pack:
        recipe = replace(recipe, pack=draw(packing(sorted(recipe.shards))))
    if "batch" in chosen and recipe.batch:
        recipe = replace(recipe, batch={"microbatch_size": draw(st.integers(1, 5)), "drop_last": draw(st.booleans())})
    return recipe


def ungrouped(recipe: Recipe) -> Recipe:
    """Without groups of components, which an added dataset would be in none of."""
    if not recipe.pack or recipe.pack["homogeneity"] != "group":
        return recipe
    return replace(recipe, pack={**recipe.pack, "homogeneity": "full", "groups": None})


@st.composite
def once(
    draw: st.DrawFn, max_lanes: int = 3, drawn: Callable[[int], st.SearchStrategy[Recipe]] = recipes, **fixed: Any
) -> Recipe:
    """A recipe whose rows come once."""
    recipe = ungrouped(draw(drawn(max_lanes)))
    return replace(recipe, source={**recipe.source, "exhausted_policy": "redistribute"}, **fixed)


def padded(recipe: Recipe) -> Recipe:
    """Without drops at a flush, where rows longer than the documents between two flushes would never come."""
    return replace(recipe, pack=recipe.pack and {**recipe.pack, "pad_token_id": PAD})


def tokens(items: list[Any]) -> list[int]:
    """Every token of these batches or records, padding aside."""
    rows = chain.from_iterable(item.records if hasattr(item, "records") else [item] for item in items)
    return [t for row in rows for t in row.payload["input_ids"] if t != PAD]


def begin(recipe: Recipe, taken: int, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """The first batches, and the checkpoint behind them."""
    pipeline = recipe.build(**QUIET | options)
    iterator = iter(pipeline)
    items = list(islice(iterator, taken))
    state = pipeline.checkpoint()
    iterator.close()
    return items, state


def goes_on(recipe: Recipe, state: Any, **options: Any) -> Any:
    pipeline = recipe.build(**QUIET | options)
    pipeline.restore(state, accept=acceptable(recipe))
    return pipeline


def acceptable(recipe: Recipe) -> set[str]:
    """What may be accepted of this recipe."""
    operators = {"shuffle": recipe.shuffle or recipe.late_shuffle, "pack_flat": recipe.pack, "batch": recipe.batch}
    return set(KINDS[:4]) | {name for name, there in operators.items() if there}


@LAW
@given(st.data(), once(drawn=deep_recipes), st.integers(0, 12), CUT, CUT)
def test_nothing_delivered_comes_again(
    data: st.DataObject, recipe: Recipe, taken: int, cut: int, next_cut: int
) -> None:
    new = data.draw(changed(recipe))
    items, state = begin(recipe, taken, cut_every=cut)
    before = tokens(items)
    after = tokens(list(goes_on(new, state, cut_every=next_cut)))
    assert len(set(before)) == len(before) and len(set(after)) == len(after)
    assert not set(before) & set(after)


@LAW
@given(st.data(), once(keep=None), st.integers(0, 12), CUT)
def test_all_the_rest_comes_or_is_counted(data: st.DataObject, recipe: Recipe, taken: int, cut: int) -> None:
    def cutting(some: Recipe) -> Recipe:
        if some.pack is None:
            return some
        kept = {k: v for k, v in some.pack.items() if k not in ("num_bins", "min_sequence_length", "flush_strategy")}
        if "wrap" not in kept["algorithm"]:
            kept["algorithm"] = "wrap"
        return replace(some, pack={**kept, "pad_token_id": PAD})

    recipe = replace(cutting(recipe), batch=recipe.batch and {"microbatch_size": 2, "drop_last": False})
    new = cutting(data.draw(changed(recipe)))
    new = replace(new, batch=new.batch and {**new.batch, "drop_last": False})
    items, state = begin(recipe, taken, cut_every=cut)
    pipeline = goes_on(new, state, cut_every=cut)
    after = tokens(list(pipeline))
    summary = pipeline.metrics_snapshot()
    assert summary is not None
    every = tokens(list(replace(new, shuffle=None, pack=None, late_shuffle=None, batch=None).build(**QUIET)))
    assert set(tokens(items)) | set(after) <= set(every)
    assert len(every) == len(tokens(items)) + len(after) + sum(summary.dropped_tokens.values())


@LAW
@given(
    st.data(),
    once(drawn=deep_recipes),
    st.integers(0, 12),
    st.lists(st.integers(0, 6), max_size=3),
    CUT,
    settings_of_a_run(),
)
def test_a_changed_run_resumes_like_any_other(
    data: st.DataObject, recipe: Recipe, taken: int, stops: list[int], cut: int, options: dict[str, Any]
) -> None:
    new = data.draw(changed(recipe))
    _, state = begin(recipe, taken, cut_every=cut)
    whole = [seen(item) for item in goes_on(new, state, cut_every=cut)]
    got: list[Any] = []
    accept: Any = acceptable(new)
    for number in [*stops, None]:
        pipeline = new.build(**QUIET | options, cut_every=cut)
        pipeline.restore(state, accept=accept)
        iterator = iter(pipeline)
        got += [seen(item) for item in islice(iterator, number)]
        state, accept = pipeline.checkpoint(), ()
        iterator.close()
    assert got == whole


@LAW
@given(st.data(), once(drawn=deep_recipes), st.lists(st.integers(0, 5), min_size=2, max_size=4), CUT)
def test_changes_follow_each_other(data: st.DataObject, recipe: Recipe, stops: list[int], cut: int) -> None:
    before: list[int] = []
    items, state = begin(recipe, stops[0], cut_every=cut)
    before += tokens(items)
    for taken in [*stops[1:], None]:
        recipe = data.draw(changed(recipe))
        pipeline = goes_on(recipe, state, cut_every=data.draw(CUT))
        iterator = iter(pipeline)
        before += tokens(list(islice(iterator, taken)))
        state = pipeline.checkpoint()
        iterator.close()
    assert len(set(before)) == len(before)


@LAW
@given(st.data(), once(max_lanes=1, flush=None, late_shuffle=None, keep=None), st.integers(0, 12), CUT)
def test_another_row_length_continues_the_token_stream(
    data: st.DataObject, recipe: Recipe, taken: int, cut: int
) -> None:
    lengths = st.integers(1, 40)
    old, new = ({"algorithm": "wrap", "max_length": data.draw(lengths), "pad_token_id": PAD} for _ in range(2))
    batch = recipe.batch and {**recipe.batch, "drop_last": False}
    recipe = replace(recipe, batch=batch)
    whole = tokens(list(replace(recipe, pack=new).build(**QUIET)))
    items, state = begin(replace(recipe, pack=old), taken, cut_every=cut)
    rows = list(goes_on(replace(recipe, pack=new), state, cut_every=cut))
    assert tokens(items) + tokens(rows) == whole
    for item in rows:
        for row in item.records if recipe.batch else [item]:
            assert len(row.payload["input_ids"]) == new["max_length"]


@settings(LAW, max_examples=20)
@given(st.data(), recipes(max_lanes=6).map(endless), st.integers(1, 4), LEGS, st.integers(0, 4), CUT)
def test_every_topology_sees_the_same_change(
    data: st.DataObject, recipe: Recipe, groups: int, legs: list[tuple[int, int]], steps: int, cut: int
) -> None:
    recipe = padded(ungrouped(recipe))
    new = padded(data.draw(changed(recipe)))
    assume(fertile(recipe) and fertile(new))
    states = []
    for group in range(groups):
        pipeline = recipe.build(**QUIET, dp_degree=groups, dp_group_id=group, cut_every=cut)
        iterator = iter(pipeline)
        assert len(list(islice(iterator, steps))) == steps
        states.append(pipeline.checkpoint())
        iterator.close()
    position, total = groups * steps, sum(later * more for later, more in legs)
    alone = iter(goes_on(new, states, cut_every=cut))
    expected = dict(enumerate((seen(item) for item in islice(alone, total)), position))
    alone.close()
    delivered: dict[int, Any] = {}
    accept: Any = acceptable(new)
    for later, more in legs:
        next_states = []
        for group in range(later):
            pipeline = new.build(**QUIET, dp_degree=later, dp_group_id=group, cut_every=cut)
            pipeline.restore(states, accept=accept)
            iterator = iter(pipeline)
            for step, item in enumerate(islice(iterator, more)):
                delivered[position + step * later + (group - position) % later] = seen(item)
            next_states.append(pipeline.checkpoint())
            iterator.close()
        states, position, accept = next_states, position + later * more, ()
    assert delivered == expected


@LAW
@given(st.data(), once(max_lanes=2, batch=None), st.integers(0, 12), st.integers(1, 5), CUT)
def test_another_batch_size_cuts_the_same_rows(
    data: st.DataObject, recipe: Recipe, taken: int, size: int, cut: int
) -> None:
    def rows(items: list[Any], lane: int) -> list[Any]:
        return [seen(row) for item in items for row in item.records if row.meta.lane_id == lane]

    old, new = (replace(recipe, batch={"microbatch_size": n, "drop_last": False}) for n in (3, size))
    whole = list(old.build(**QUIET))
    items, state = begin(old, taken, cut_every=cut)
    rest = list(goes_on(new, state, cut_every=data.draw(CUT)))
    for lane in range(recipe.lanes):
        assert rows(items, lane) + rows(rest, lane) == rows(whole, lane)


@settings(LAW, max_examples=20)
@given(st.data(), once(max_lanes=2), st.integers(1, 12), st.lists(st.integers(0, 3), max_size=3), CUT)
def test_without_determinism_a_changed_run_loses_and_repeats_nothing(
    data: st.DataObject, recipe: Recipe, taken: int, stops: list[int], cut: int
) -> None:
    plain = data.draw(st.booleans())
    if plain:
        recipe = replace(recipe, pack=None, late_shuffle=None, batch={"microbatch_size": 2, "drop_last": False})
    new = data.draw(changed(recipe))
    new = replace(new, batch=new.batch and {**new.batch, "drop_last": False})
    options = {"runner": "threads", "deterministic": False, "micro_batch": 1, "cut_every": cut}
    items, state = begin(recipe, taken, **{**options, "deterministic": data.draw(st.booleans())})
    got, accept = tokens(items), acceptable(new)
    for number in [*stops, None]:
        pipeline = new.build(**QUIET | options)
        pipeline.restore(state, accept=accept)
        iterator = iter(pipeline)
        got += tokens(list(islice(iterator, number)))
        state, accept = pipeline.checkpoint(), set()
        iterator.close()
    assert len(set(got)) == len(got)
    if plain:
        assert sorted(got) == sorted(tokens(list(new.build(**QUIET))))


@pytest.mark.parametrize("micro_batch", [1, 7, 256])
def test_empty_documents_keep_their_place_in_what_a_new_packer_takes_over(micro_batch: int) -> None:
    pack = {"max_length": 16, "algorithm": "wrap", "shuffle_strategy": "length"}
    recipe = Recipe(
        {"a": (40, 40)}, {"a": 1.0}, {"chunk_size": 48}, pack=pack, batch={"microbatch_size": 3}, flush=None
    )
    new = replace(recipe, pack={**pack, "max_length": 18})
    _, state = begin(recipe, 1, cut_every=40)
    rows = [seen(item) for item in goes_on(new, state, micro_batch=micro_batch)]
    assert rows == [seen(item) for item in goes_on(new, state, micro_batch=40)]


def test_an_empty_document_does_not_stand_before_one_that_was_begun() -> None:
    recipe = Recipe({"a": (3,)}, {"a": 1.0}, pack={"max_length": 2, "algorithm": "wrap"}, flush=None)
    items, state = begin(recipe, 1)
    rest = list(goes_on(replace(recipe, pack={"max_length": 1, "algorithm": "wrap"}), state))
    assert tokens(items) + tokens(rest) == [100100, 100200, 100201]

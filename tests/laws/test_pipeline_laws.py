"""The laws, as properties of random recipes under random settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_recipes import Recipe, recipes, seen, settings_of_a_run

LAW = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
CUT = st.sampled_from([1, 4, 13, 1024])


def stream(recipe: Recipe, **options: Any) -> list[Any]:
    return [seen(item) for item in recipe.build(**options)]


@LAW
@given(recipes(), settings_of_a_run(), CUT)
def test_settings_are_not_data(recipe: Recipe, options: dict[str, Any], cut: int) -> None:
    assert stream(recipe, runner="inline", auto_validation="off") == stream(recipe, cut_every=cut, **options)


@settings(LAW, max_examples=4)
@given(recipes(), settings_of_a_run(runners=("process",)))
def test_processes_are_not_data_either(recipe: Recipe, options: dict[str, Any]) -> None:
    assert stream(recipe, runner="inline", auto_validation="off") == stream(recipe, **options)


@LAW
@given(recipes(), st.lists(st.integers(0, 12), max_size=5), st.lists(settings_of_a_run(), min_size=6, max_size=6), CUT)
def test_resume_is_invisible(recipe: Recipe, stops: list[int], options: list[dict[str, Any]], cut: int) -> None:
    whole = stream(recipe, runner="inline", auto_validation="off")
    got: list[Any] = []
    state = None
    for taken, chosen in zip([*stops, None], options, strict=False):
        pipeline = recipe.build(cut_every=cut, **chosen)
        if state is not None:
            pipeline.restore(state)
            assert pipeline.checkpoint() == state
        iterator = iter(pipeline)
        got += [seen(item) for item in islice(iterator, taken)]
        state = pipeline.checkpoint()
        iterator.close()
        assert pipeline.checkpoint() == state
    assert got == whole


@LAW
@given(recipes(), st.integers(0, 30), settings_of_a_run(), CUT)
def test_a_checkpoint_is_a_function_of_recipe_and_position(
    recipe: Recipe, taken: int, options: dict[str, Any], cut: int
) -> None:
    states = set()
    for chosen in ({"runner": "inline", "auto_validation": "off"}, options):
        pipeline = recipe.build(cut_every=cut, **chosen)
        iterator = iter(pipeline)
        for _ in islice(iterator, taken):
            pass
        states.add(pipeline.checkpoint(as_bytes=True))
        iterator.close()
    assert len(states) == 1


@LAW
@given(recipes(), settings_of_a_run())
def test_every_sample_is_delivered_once_or_counted(recipe: Recipe, options: dict[str, Any]) -> None:
    pipeline = recipe.build(**options)
    items = [seen(item) for item in pipeline]
    summary = pipeline.metrics_snapshot()
    assert summary is not None
    for dataset in summary.datasets:
        assert dataset.delivered + sum(dataset.dropped.values()) == dataset.handed_out
    assert sum(d.handed_out for d in summary.datasets) == len(pipeline.work_source)
    if recipe.pack is None:
        rows = [row for item in items for row in (item if recipe.batch else [item])]
        assert len(rows) == sum(d.delivered for d in summary.datasets)


@LAW
@given(recipes(), settings_of_a_run())
def test_no_token_is_lost_uncounted(recipe: Recipe, options: dict[str, Any]) -> None:
    pipeline = recipe.build(**options)
    batches = list(pipeline)
    unpacked = Recipe(recipe.shards, recipe.weights, recipe.source, keep=recipe.keep, lanes=recipe.lanes).build(
        runner="inline"
    )
    tokens_in = sum(len(record.payload["input_ids"]) for record in unpacked)
    records = [r for b in batches for r in (b.records if recipe.batch else [b])]
    tokens_out = sum(len(r.payload["input_ids"]) - r.meta.padding_length for r in records)
    summary = pipeline.metrics_snapshot()
    assert summary is not None
    assert tokens_in == tokens_out + sum(summary.dropped_tokens.values())


@settings(LAW, max_examples=25)
@given(
    recipes(max_lanes=2),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.lists(st.tuples(st.booleans(), st.sampled_from(["threads", "inline"]), CUT), min_size=4, max_size=4),
)
def test_without_order_a_resumed_run_still_delivers_each_once(
    recipe: Recipe, stops: list[int], legs: list[tuple[bool, str, int]]
) -> None:
    simple = Recipe(
        recipe.shards, recipe.weights, recipe.source, keep=recipe.keep, batch=recipe.batch, lanes=recipe.lanes
    )
    options: dict[str, Any] = {"micro_batch": 3, "auto_validation": "off"}
    whole = stream(replace(simple, batch=None), runner="inline", auto_validation="off")
    flat = sorted(whole)
    got: list[Any] = []
    state = None
    for taken, (ordered, runner, cut) in zip([*stops, None], legs, strict=False):
        pipeline = simple.build(deterministic=ordered, runner=runner, cut_every=cut, **options)
        if state is not None:
            pipeline.restore(state)
        iterator = iter(pipeline)
        got += [seen(item) for item in islice(iterator, taken)]
        state = pipeline.checkpoint()
        iterator.close()
    rows = sorted(row for item in got for row in (item if recipe.batch else [item]))
    assert Counter(rows) <= Counter(flat)
    if not (recipe.batch and recipe.batch.get("drop_last", True)):
        assert rows == flat
    else:
        assert len(flat) - len(rows) < recipe.lanes * recipe.batch["microbatch_size"]

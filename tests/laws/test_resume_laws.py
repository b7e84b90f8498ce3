"""Resuming is invisible whatever holds records: every packing, several stateful operators in a row, pieces of documents."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_recipes import Recipe, deep_recipes, seen, settings_of_a_run

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource

LAW = settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
CUT = st.sampled_from([1, 4, 13, 40])
QUIET: dict[str, Any] = {"runner": "inline", "auto_validation": "off"}


CHAINS = given(deep_recipes(), st.lists(st.integers(0, 9), max_size=6), CUT)


@LAW
@CHAINS
def test_any_chain_of_resumes_delivers_the_whole_stream(recipe: Recipe, stops: list[int], cut: int) -> None:
    resume_in_a_chain(recipe, stops, cut)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(LAW, max_examples=4000)
@CHAINS
def test_thousands_of_chains_do(recipe: Recipe, stops: list[int], cut: int) -> None:
    resume_in_a_chain(recipe, stops, cut)


def resume_in_a_chain(recipe: Recipe, stops: list[int], cut: int) -> None:
    """Take some batches, save, restore, and so on to the end."""
    whole = [seen(item) for item in recipe.build(**QUIET)]
    got: list[Any] = []
    state = None
    for taken in [*stops, None]:
        pipeline = recipe.build(cut_every=cut, **QUIET)
        if state is not None:
            pipeline.restore(state)
        iterator = iter(pipeline)
        got += [seen(item) for item in islice(iterator, taken)]
        state = pipeline.checkpoint(as_bytes=True)
        iterator.close()
    assert got == whole


@LAW
@given(deep_recipes(), st.integers(0, 25), st.integers(0, 9), CUT, settings_of_a_run())
def test_a_resumed_run_has_the_checkpoints_of_one_that_never_stopped(
    recipe: Recipe, first: int, second: int, cut: int, options: dict[str, Any]
) -> None:
    one = recipe.build(cut_every=cut, **QUIET)
    whole = iter(one)
    for _ in islice(whole, first):
        pass
    other = recipe.build(cut_every=cut, **options)
    other.restore(one.checkpoint())
    resumed = iter(other)
    assert [seen(item) for item in islice(whole, second)] == [seen(item) for item in islice(resumed, second)]
    assert one.checkpoint(as_bytes=True) == other.checkpoint(as_bytes=True)
    whole.close()
    resumed.close()


@pytest.mark.parametrize("flush", [None, 2])
@pytest.mark.parametrize("runner", ["inline", "threads"])
def test_large_buffers_come_back_while_the_run_goes_on(flush: int | None, runner: str) -> None:
    recipe = Recipe(
        {"a": (3000, 4000), "b": (2500,)},
        {"a": 0.7, "b": 0.3},
        {"chunk_size": 2000, "exhausted_policy": "redistribute"},
        shuffle=1500,
        pack={"max_length": 64, "algorithm": "wrap"},
        batch={"microbatch_size": 4},
        flush=flush,
    )
    whole = [seen(item) for item in recipe.build(**QUIET)]
    got: list[Any] = []
    state = None
    for taken in [3, 40, 1, 25, 0, 60, None]:
        pipeline = recipe.build(runner=runner, auto_validation="off", cut_every=300)
        if state is not None:
            pipeline.restore(state)
        iterator = iter(pipeline)
        got += [seen(item) for item in islice(iterator, taken)]
        state = pipeline.checkpoint()
        iterator.close()
    assert got == whole


def test_the_first_batch_after_a_restore_reads_few_of_the_held_records() -> None:
    read: list[int] = []

    def noted(payload: dict[str, int]) -> dict[str, int]:
        read.append(payload["n"])
        return payload

    def build() -> Pipeline:
        data = Dataset.from_dict("a", {0: InMemoryShard([{"n": n} for n in range(12_000)])})
        source = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"a": 1.0}), stop_after_passes=None)
        pipeline = Pipeline(source).options(cut_every=64, micro_batch=64, **QUIET)
        return pipeline.map_transform(noted).shuffle(buffer_size=5000).batch(8)

    pipeline = build()
    iterator = iter(pipeline)
    for _ in islice(iterator, 1200):
        pass
    state = pipeline.checkpoint()
    expected = next(iterator)
    iterator.close()
    resumed = build()
    resumed.restore(state)
    read.clear()
    again = iter(resumed)
    assert [r.payload for r in next(again).records] == [r.payload for r in expected.records]
    assert len(read) < 500
    again.close()

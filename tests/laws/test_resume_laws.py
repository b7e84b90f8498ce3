"""Resuming is invisible whatever holds records: every packing, several stateful operators in a row, pieces of documents."""

from __future__ import annotations

from itertools import islice
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_recipes import Recipe, deep_recipes, seen, settings_of_a_run

LAW = settings(deadline=None, max_examples=120, suppress_health_check=list(HealthCheck))
CUT = st.sampled_from([1, 4, 13, 40])
QUIET: dict[str, Any] = {"runner": "inline", "auto_validation": "off"}


@LAW
@given(deep_recipes(), st.lists(st.integers(0, 9), max_size=6), CUT)
def test_any_chain_of_resumes_delivers_the_whole_stream(recipe: Recipe, stops: list[int], cut: int) -> None:
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


@settings(LAW, max_examples=60)
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

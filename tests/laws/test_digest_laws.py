"""Digests: the same for the same stream, whatever the settings, the topology and the restarts; different for another one."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_recipes import Recipe, recipes, seen, settings_of_a_run
from test_topology_laws import endless, fertile

from headrace import verify
from headrace.errors import DataError

LAW = settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
QUIET: dict[str, Any] = {"runner": "inline", "auto_validation": "off"}


def run(recipe: Recipe, log: Path, taken: int | None = None, state: Any = None, **options: Any) -> Any:
    """Deliver some batches into a log; the checkpoint after them."""
    pipeline = recipe.build(digest=True, digest_log=str(log), **{**QUIET, **options})
    if state is not None:
        pipeline.restore(state)
    iterator = iter(pipeline)
    for _ in islice(iterator, taken):
        pass
    state = pipeline.checkpoint()
    iterator.close()
    return state


def difference(a: Path, b: Any) -> verify.Difference | None:
    """What `diff` says; a run that delivered nothing cannot be compared, and differs from none."""
    if verify.summary(a).batches and verify.summary(b).batches:
        return verify.diff(a, b)
    with pytest.raises(DataError, match="no batch in common"):
        verify.diff(a, b)
    return None


@LAW
@given(recipes(), settings_of_a_run(), st.sampled_from([1, 13, 1024]))
def test_settings_do_not_change_a_digest(recipe: Recipe, options: dict[str, Any], cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder, "a"), Path(folder, "b")
        run(recipe, a)
        run(recipe, b, cut_every=cut, **options)
        assert difference(a, b) is None
        assert verify.summary(a) == verify.summary(b)


@LAW
@given(
    recipes(max_lanes=6).map(endless).filter(fertile),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3),
    st.integers(0, 2),
)
def test_ranks_and_resumed_legs_add_up_to_the_uninterrupted_stream(
    recipe: Recipe, legs: list[tuple[int, int]], beyond: int
) -> None:
    """Each leg runs `beyond` steps further than its checkpoint, as a killed run does: those batches are logged twice."""
    total = sum(groups * steps for groups, steps in legs)
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder, "alone")
        run(recipe, alone, total)
        logs, states = [], None
        for leg, (groups, steps) in enumerate(legs):
            further = beyond if leg + 1 < len(legs) else 0
            after = []
            for group in range(groups):
                logs.append(Path(folder, f"{leg}-{group}"))
                options = {"dp_degree": groups, "dp_group_id": group}
                pipeline = recipe.build(digest=True, digest_log=str(logs[-1]), **QUIET, **options)
                if states is not None:
                    pipeline.restore(states)
                iterator = iter(pipeline)
                for _ in islice(iterator, steps):
                    pass
                after.append(pipeline.checkpoint())
                for _ in islice(iterator, further):
                    pass
                iterator.close()
            states = after
        assert difference(alone, logs) is None
        if not beyond:
            assert verify.summary(alone) == verify.summary(logs)


@LAW
@given(recipes().filter(fertile), st.sampled_from(["seed", "keep", "shuffle"]))
def test_another_stream_has_another_digest(recipe: Recipe, change: str) -> None:
    match change:
        case "seed":
            other = replace(recipe, source={**recipe.source, "seed": recipe.source["seed"] + 1})
        case "keep":
            other = replace(recipe, keep=5 if recipe.keep is None else None)
        case _:
            other = replace(recipe, shuffle=7 if recipe.shuffle is None else None)
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder, "a"), Path(folder, "b")
        run(recipe, a)
        run(other, b)
        rows_a, rows_b = ([seen(item) for item in r.build(**QUIET)] for r in (recipe, other))
        first = next((i for i, (x, y) in enumerate(zip(rows_a, rows_b, strict=False)) if x != y), None)
        found = difference(a, b)
        if first is not None:
            assert found is not None
            if recipe.lanes == 1:  # a digest also sees segments without tokens, and what rows are made of
                assert found.batch <= first
        elif found is not None and recipe.lanes == 1:
            assert "lacks" in found.what or recipe.pack is not None

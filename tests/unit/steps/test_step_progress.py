"""The bar counts inputs: outputs may be none or many for each."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from headrace.steps import Pipeline
from headrace.steps.progress import shown


def thrice(x: int) -> Iterator[int]:
    yield from (x, x, x)


def nothing(x: int) -> Iterator[int]:
    yield from ()


@pytest.mark.parametrize(("step", "outputs"), [(thrice, 900), (nothing, 0)])
def test_a_bar_counts_inputs(step: object, outputs: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Pipeline([step], runner="inline") as pipeline:
        bar = shown(pipeline.map(range(300)), 300, "step", lambda: pipeline.statistics().finished, console)
        assert sum(1 for _ in bar) == outputs
    assert "300/300" in out.getvalue()
    assert "900/300" not in out.getvalue()


def test_a_second_run_begins_at_zero() -> None:
    with Pipeline([thrice], runner="inline") as pipeline:
        for _ in range(2):
            out = io.StringIO()
            console = Console(file=out, force_terminal=True, width=100)
            bar = shown(pipeline.map(range(5)), 5, "s", lambda: pipeline.statistics().finished, console)
            assert sum(1 for _ in bar) == 15
            assert "5/5" in out.getvalue()
            assert "10/5" not in out.getvalue()

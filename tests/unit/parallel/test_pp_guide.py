"""The guide tells the truth: its examples run, its tables are what the simulator measures; and so do the doctests."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from fractions import Fraction
from pathlib import Path

import pytest

import headrace.parallel
from headrace.parallel import StageCosts, build_schedule, closed_form, schedules, simulate
from headrace.parallel.memory import peak_in_flight

GUIDE = (Path(__file__).parents[3] / "docs" / "guide" / "model-pipelines.md").read_text(encoding="utf-8")


def test_examples_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", GUIDE, re.S)
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number} of the guide", "exec"), names)
    assert len(blocks) >= 10
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    said = [line[2:].strip() for block in blocks for line in block.splitlines() if line.startswith("# ")]
    for line in said:
        text = re.sub(r"\s+", " ", line.split("  rank ")[0].split("...")[0].split("..")[0]).strip()
        assert text in printed, line
    assert (tmp_path / "schedule.html").exists()


def rows_of(first_column):
    return [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in GUIDE.splitlines()
        if re.match(rf"\| {first_column}", line)
    ]


def test_table_of_schedules_is_measured():
    told = {row[0].strip("`"): row[1:] for row in rows_of(r"`[\w-]+` \| \d \|")}
    assert set(told) == set(schedules())
    for name, (stages, bubble, span, other, latency, held) in told.items():
        schedule = build_schedule(name, 4, 12)
        each = schedule.num_stages // 4

        def run(times, c=0, *, schedule=schedule, each=each):
            return simulate(
                schedule, StageCosts.uniform(schedule.num_stages, tuple(Fraction(t) / each for t in times), c)
            )

        equal = run((1, 1, 1))
        found = [
            str(each),
            f"{float(equal.bubble):.1%}",
            f"{float(equal.span_bubble):.1%}",
            f"{float(run((1, Fraction(6, 5), Fraction(3, 5))).bubble):.1%}",
            f"{float(run((1, 1, 1), Fraction(1, 4)).bubble):.1%}",
            ", ".join(f"{units:g}" for units in peak_in_flight(schedule).units),
        ]
        assert found == [stages, bubble, span, other, latency, held], name


def test_table_of_closed_forms_is_the_library_s():
    told = {
        name.strip("` "): (formula, condition)
        for names, formula, condition in rows_of(r"(?:`[\w, `-]+` \| \(|`zbv` \| 0,)")
        for name in names.split(",")
    }
    assert set(told) == set(schedules())
    for name, (formula, condition) in told.items():
        form = closed_form(name, 4, 12)
        assert formula == form.formula + (", span" if form.of == "span" else "")
        assert condition == form.condition


PURE = sorted(
    module.name
    for module in pkgutil.walk_packages(headrace.parallel.__path__, "headrace.parallel.")
    if ".torch_" not in module.name
)


@pytest.mark.parametrize("name", PURE)
def test_doctests(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.failed == 0

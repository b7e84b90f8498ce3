"""The simulator against real runs on gloo, with stages that sleep. Ratios only; medians of several steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.parallel import schedules

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import pp_balance, pp_calibration
from benchmarks.pp_sleep import launch

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(900)]


def test_measured_makespan_within_a_tenth_of_the_simulation() -> None:
    """Every schedule on four ranks. A schedule that is off gets a second chance: other work shares this machine."""
    program = pp_calibration.__file__
    assert program is not None
    given = ["--microbatches=6", "--unit=0.04", "--steps=3"]
    rows = {row["schedule"]: row for row in launch(program, given, 4, seconds=400)}
    assert set(rows) == set(schedules())

    def off(row: dict[str, float]) -> float:
        return abs(row["measured"] / row["predicted"] - 1)

    late = [name for name, row in rows.items() if off(row) >= 0.1]
    if late:
        rows |= {row["schedule"]: row for row in launch(program, [*given, "--schedules", *late], 4, seconds=400)}
    assert {name: off(row) for name, row in rows.items() if off(row) >= 0.1} == {}


def test_balanced_cut_is_a_sixth_shorter() -> None:
    """A small embedding, sixteen blocks, a heavy head: at least fifteen per cent, simulated and measured."""
    program = pp_balance.__file__
    assert program is not None
    rows = launch(program, ["--microbatches=16", "--unit=0.012", "--steps=3"], 4, seconds=300)
    assert pp_balance.gain(rows, "predicted") >= 0.15
    assert pp_balance.gain(rows, "measured") >= 0.15

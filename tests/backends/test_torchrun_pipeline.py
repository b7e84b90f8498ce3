"""Pipelines over processes: exact against the full batch, and loud when they cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torchrun_launch import by_hand, torchrun

from headrace.parallel import schedules

pytestmark = pytest.mark.torchrun
EXACT = 1e-12
CASES = ("plain", "recompute", "tied", "uneven", "few")


def results(out: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def check_exact(found: dict[str, Any], names: tuple[str, ...]) -> None:
    """Gradients (after one step and two), loss, outputs, norm and evaluation; one recompute."""
    assert set(found) == {f"{name}/{case}" for name in names for case in CASES}
    for case, values in found.items():
        for what in ("gradient", "twice", "loss", "norm", "eval"):
            assert values[what] < EXACT, (case, what, values)
        assert values.get("outputs", 0.0) < EXACT, (case, values)
        assert values["spans"] == values["expected_spans"], case
        if case.endswith("/recompute"):
            assert values["calls"] == 2, case


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule(tmp_path: Path, ranks: int) -> None:
    """Every schedule on every kind of stage, on every rank."""
    finished = torchrun("pp_correct.py", ranks, str(tmp_path), seconds=280)
    assert finished.codes == (0,), finished.text
    for found in results(tmp_path, ranks):
        check_exact(found, schedules())


def test_two_ranks(tmp_path: Path) -> None:
    """A plain schedule, one that splits the backward, and a V; and whatever else a pipeline must cope with."""
    names = ("1f1b", "zb-h1", "zbv")
    finished = torchrun("pp_features.py", 2, str(tmp_path), *names)
    assert finished.codes == (0,), finished.text
    for found in results(tmp_path, 2):
        check_exact(found["correct"], names)
        for schedule in ("1f1b", "zb-h1"):
            assert found["transposed"][schedule] < EXACT
        for schedule in ("interleaved-1f1b", "zbv"):
            assert found["skips"][schedule] < EXACT
        assert max(found["shapes"].values()) < EXACT
        assert len(found["shapes"]) == 4
        assert max(found["masked"].values()) < EXACT
        assert found["frozen_tie"] == {"no gradient": True, "as it was": True}
        assert found["no_probe"] == {"calls": 4, "statistics": 0.0}
        assert max(found["clipping"].values()) < 1e-4  # torch divides by the norm plus 1e-6
        assert found["ddp_with_full_backward"] < EXACT
        check_refusals(found["refusals"])


def check_refusals(said: dict[str, str]) -> None:
    words = {
        "ddp with split backward": ("stage ", "fully_shard"),
        "missing action": ("ScheduleError", "stage 1", "microbatch 1"),
        "disorder": ("ScheduleError", "ascending order"),
        "swapped": ("ScheduleError",),
        "too many ranks": ("runs on 3 ranks",),
        "local stages by name": ("needs the number of stages",),
        "frozen on one rank": ("shared weights", "of stage 1 on rank 0, ", "of stage 1 (frozen) on rank 1"),
        "not my stage": ("but got no stage",),
    }
    assert set(said) == set(words)
    for case, expected in words.items():
        for word in expected:
            assert word in said[case], (case, said[case])


@pytest.mark.parametrize(
    ("case", "rank", "words"),
    [
        ("not divisible", 0, "3 rows, which do not divide into 2 microbatches"),
        pytest.param("target not divisible", 1, "the target has 3 rows", marks=pytest.mark.slow),
        ("target of fewer rows", 1, "the batch has 4 rows, the target 2"),
        pytest.param("no target", 1, "missing a required argument: 'target'", marks=pytest.mark.slow),
        pytest.param("changed shape", 0, "variable_shapes=True", marks=pytest.mark.slow),
        pytest.param("no batch", 0, "holds stage 0 and got no batch", marks=pytest.mark.slow),
        pytest.param("no loss", 1, "stage 1, microbatch 0: there is no loss", marks=pytest.mark.slow),
        pytest.param("wrong shape", 1, "stage 1 does not accept what stage 0 hands it", marks=pytest.mark.slow),
        pytest.param("late shape", 1, "stage 1, microbatch 0: forward failed on float64", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_one_rank_refuses_ends_on_all(tmp_path: Path, case: str, rank: int, words: str) -> None:
    """The rank at fault raises its own error, the other one says whose fault it is; nobody waits for a time-out."""
    finished = by_hand("pp_refuse.py", 2, str(tmp_path), case)
    found = results(tmp_path, 2)
    assert words in found[rank]["text"], finished.text
    assert f"WorkerDied: rank {rank} failed" in found[1 - rank]["text"]
    assert words in found[1 - rank]["text"]
    assert max(f["seconds"] for f in found) < 20

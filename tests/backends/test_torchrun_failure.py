"""A rank that fails in the middle of a step is known to every other rank within two seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torchrun_launch import by_hand, torchrun

pytestmark = pytest.mark.torchrun
SECONDS = 2.0


def survivors(out: Path, ranks: int, victim: int) -> dict[int, dict[str, object]]:
    """What each other rank wrote: late, wrong or missing reports fail here."""
    failed_at = float((out / "failed_at").read_text())
    found: dict[int, dict[str, object]] = {}
    for rank in range(ranks):
        if rank == victim:
            continue
        report = json.loads((out / f"rank{rank}.json").read_text())
        assert report["at"] - failed_at < SECONDS, report
        assert report["type"] == "WorkerDied", report
        assert f"rank {victim} failed" in report["text"]
        assert "stood at step 1, " in report["text"]
        assert f"this rank {rank} stood at step 1, " in report["text"]
        assert "has failed and cannot go on" in report["again"]
        found[rank] = report
    return found


@pytest.mark.parametrize(
    ("victim", "how", "schedule"),
    [
        (3, "kill", "1f1b"),
        pytest.param(0, "kill", "gpipe", marks=pytest.mark.slow),
        pytest.param(1, "kill", "zbv", marks=pytest.mark.slow),
        pytest.param(2, "exit", "interleaved-1f1b", marks=pytest.mark.slow),
    ],
)
def test_rank_that_dies(tmp_path: Path, victim: int, how: str, schedule: str) -> None:
    """Also the rank that runs the watchdog's hub, and neighbours and others alike."""
    by_hand("pp_kill.py", 4, str(tmp_path), str(victim), how, schedule)
    for report in survivors(tmp_path, 4, victim).values():
        assert "process" in str(report["text"])


@pytest.mark.slow
def test_rank_of_another_replica_that_dies(tmp_path: Path) -> None:
    """With data parallelism the other replica's ranks, tied to the dead one by a collective, learn of it too."""
    by_hand("pp_kill.py", 4, str(tmp_path), "3", "kill", "zb-h1", "2d")
    survivors(tmp_path, 4, 3)


@pytest.mark.slow
def test_stage_that_raises(tmp_path: Path) -> None:
    """The rank itself raises its own error; the others say what it was."""
    by_hand("pp_kill.py", 4, str(tmp_path), "2", "raise", "1f1b")
    for report in survivors(tmp_path, 4, 2).values():
        assert "the stage ran into trouble" in str(report["text"])
    own = json.loads((tmp_path / "rank2.json").read_text())
    assert own["type"] == "OperatorError"
    assert "stage 2, microbatch 1: forward failed on float32[1, 4]: ArithmeticError" in own["text"]


@pytest.mark.slow
def test_rank_that_falls_silent(tmp_path: Path) -> None:
    """A stopped process keeps its sockets open; only its silence tells."""
    by_hand("pp_kill.py", 3, str(tmp_path), "1", "stop", "1f1b")
    for report in survivors(tmp_path, 3, 1).values():
        assert "silent for 1 s" in str(report["text"])


@pytest.mark.slow
def test_under_torchrun_the_report_comes_before_the_agent_ends_the_ranks(tmp_path: Path) -> None:
    """torchrun ends the others a moment after one dies; their logs say first why."""
    finished = torchrun("pp_kill.py", 3, str(tmp_path), "1", "kill", "1f1b")
    assert finished.codes != (0,)
    for rank in (0, 2):
        assert f"this rank {rank} stands at step 1, " in finished.text


@pytest.mark.parametrize(
    "where", ["clip", "feed", *(pytest.param(w, marks=pytest.mark.slow) for w in ("timeline", "save", "load", "close"))]
)
def test_rank_that_dies_between_steps(tmp_path: Path, where: str) -> None:
    """Every call in which ranks wait for each other says it as `step` does."""
    finished = by_hand("pp_kill_outside.py", 2, str(tmp_path), where)
    report = json.loads((tmp_path / "rank0.json").read_text())
    assert report["type"] == "WorkerDied", finished.text
    assert "rank 1 failed: its process ended" in report["text"]
    assert "this rank 0 stood at between steps (after step 0)" in report["text"]
    assert "has failed and cannot go on" in report["again"]

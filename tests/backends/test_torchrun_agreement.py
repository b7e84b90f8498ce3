"""Ranks that were given different schedules, cuts or options: one error on all, with the values by rank, and no hang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torchrun_launch import by_hand, torchrun

pytestmark = pytest.mark.torchrun
SECONDS = 20  # the process group's time-out is 60

WORDS = {
    "schedule": "schedule: '1f1b' on rank 0, 'gpipe' on rank 1",
    "schedule of one name": "schedule: '1f1b' (digest of its actions: ",
    "unknown schedule": "schedule: '1f1b' on rank 0, '1fb1' on rank 1. Rank 1 failed: UnknownOptionError",
    "cut": "layers of each stage: [2, 2] on rank 0, [1, 3] on rank 1",
    "cut of own stages": "layers of each stage: [2, 2] on rank 0, [1, 3] on rank 1",
    "cut of own stages on one": "layers of each stage: [2, 2] on rank 0, [1, 3] on rank 1",
    "number of stages": "layers of each stage: [2, 2] on rank 0, [1, 1, 2] on rank 1. Rank 1 failed: ConfigError: schedule",
    "microbatches": "number of microbatches: 4 on rank 0, 8 on rank 1",
    "shape": "stage 0, tensor 'module.0.weight': [4, 4] on rank 0, [5, 5] on rank 1",
    "variable shapes": "RunOptions.variable_shapes: False on rank 0, True on rank 1",
    "watchdog": "RunOptions.watchdog: True on rank 0, False on rank 1",
    "shared weight": "shared weights (RunOptions.ties): 'module.0.weight' of stage 0 = 'module.3.weight' of stage 1 on",
}
EQUAL = ("equal", "equal by another name", "equal, own stages on one", "equal, own stages")


def results(out: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def test_what_the_ranks_do_not_agree_on_is_said_on_every_rank(tmp_path: Path) -> None:
    """In one life of the process group: an error at construction leaves it usable. Right configurations still run."""
    cases = [*WORDS, "failed on one", *EQUAL, "equal, shared weight"]
    finished = torchrun("pp_disagree.py", 2, str(tmp_path), *cases)
    assert finished.codes == (0,), finished.text
    first, second = results(tmp_path, 2)
    for case, words in WORDS.items():
        text = first[case]["text"]
        assert text == second[case]["text"], case
        assert text.startswith("ConfigError: the ranks of this pipeline were not given the same: " + words), (
            case,
            text,
        )
        assert "; " not in text.split(". ")[0], text  # one difference, not what follows from it
        assert "torch.distributed.broadcast_object_list(choice, src=0)" in text, text
    assert second["failed on one"]["text"].startswith("ConfigError: ")
    assert "median" in second["failed on one"]["text"]
    assert first["failed on one"]["text"].startswith("WorkerDied: rank 1 failed before its first step: ConfigError: ")
    for found in (first, second):
        for case in EQUAL:
            assert found[case]["loss"] == pytest.approx(found["full batch"], rel=1e-5), case
        assert found["equal, shared weight"]["loss"] > 0
        assert max(found[case]["seconds"] for case in cases) < SECONDS


def test_a_rank_that_ends_before_it_compares(tmp_path: Path) -> None:
    by_hand("pp_disagree.py", 2, str(tmp_path), "ended")
    found = results(tmp_path, 2)[0]["ended"]
    assert found["text"].startswith("WorkerDied: rank 0 came to compare"), found
    assert found["seconds"] < SECONDS


def test_another_pipeline_of_the_job_hears_of_it(tmp_path: Path) -> None:
    """Its ranks wait for all processes at the watchdog."""
    by_hand("pp_disagree.py", 3, str(tmp_path), "replicas")
    *pair, alone = (found["replicas"] for found in results(tmp_path, 3))
    for found in pair:
        assert found["text"].startswith("ConfigError: the ranks of this pipeline were not given the same: "), found
        assert WORDS["cut"] in found["text"]
    assert alone["text"].startswith("WorkerDied: rank "), alone
    assert WORDS["cut"] in alone["text"]
    assert max(found["seconds"] for found in (*pair, alone)) < SECONDS

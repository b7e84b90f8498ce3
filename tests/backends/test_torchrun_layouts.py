"""Other layouts: two dimensions, other numbers of stages, and data that arrives from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torchrun_launch import torchrun

from headrace.parallel import schedules
from headrace.parallel.builders.registry import recipe

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]
EXACT = 1e-12


def results(out: Path, ranks: int) -> list[dict[str, Any]]:
    found = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    for rank in range(ranks):
        (out / f"rank{rank}.json").unlink()
    return found


def test_two_by_two(tmp_path: Path) -> None:
    """Every schedule with fully_shard (whole stages, and blocks), replicate, DDP where it is allowed, recompute, ties."""
    finished = torchrun("pp_two_dims.py", 4, str(tmp_path), str(tmp_path / "checkpoint"), seconds=280)
    assert finished.codes == (0,), finished.text
    cases = {f"{s}/{how}" for s in schedules() for how in ("fsdp", "nested", "replicate", "recompute", "tied")}
    cases |= {f"{s}/ddp" for s in schedules() if not recipe(s).splits_backward} | {"checkpoint"}
    for found in results(tmp_path, 4):
        assert set(found) == cases
        for case, errors in found.items():
            assert max(errors.values()) < EXACT, (case, errors)


def test_four_stages_load_on_two_and_on_one(tmp_path: Path) -> None:
    """Weights, outputs, optimizer and the losses of the steps that follow, whatever the cut and the schedule."""
    checkpoint = str(tmp_path / "checkpoint")
    finished = torchrun("pp_checkpoint.py", 4, str(tmp_path), checkpoint, "save", "1f1b")
    assert finished.codes == (0,), finished.text
    for found in results(tmp_path, 4):
        assert found["losses"] < EXACT
        assert "two stages call a tensor '0.weight'" in found["clash"]
    for ranks, schedule in ((2, "zbv"), (2, "1f1b"), (1, "gpipe")):
        finished = torchrun("pp_checkpoint.py", ranks, str(tmp_path), checkpoint, "load", schedule)
        assert finished.codes == (0,), finished.text
        for found in results(tmp_path, ranks):
            assert found["extra"] == {"step": 3}
            assert found["weights"] < EXACT
            assert found.get("outputs", 0.0) < EXACT
            assert found["losses"] < EXACT


def test_only_the_ends_build_data(tmp_path: Path) -> None:
    finished = torchrun("pp_feed.py", 3, str(tmp_path))
    assert finished.codes == (0,), finished.text
    first, middle, last = results(tmp_path, 3)
    assert (first["built"], middle["built"], last["built"]) == (1, 0, 1)
    assert first["seen"] == [[True, False]] * 3
    assert middle["seen"] == [[False, False]] * 3
    assert last["seen"] == [[False, True]] * 3
    for found in (first, middle, last):
        assert found["difference"] < EXACT
        assert "at step 1 1 of 2 feeding ranks have another batch" in found["uneven"]
        assert found["rows"].startswith(("ConfigError", "DataError"))
        assert found["column"].startswith("DataError")
    assert "has 4 rows of 'input_ids'; num_microbatches x microbatch_size is 6" in first["rows"]
    assert "no 'targets', only 'input_ids', 'labels', 'loss_mask'" in last["column"]
    assert "another rank" in middle["rows"]

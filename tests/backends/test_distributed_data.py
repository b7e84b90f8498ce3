"""Data pipelines under torchrun: every check of `programs/dist_checkpoint.py` holds on every rank that took part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torchrun_launch import torchrun

pytestmark = pytest.mark.torchrun


def test_six_ranks_save_reshard_gather_and_agree(tmp_path: Path) -> None:
    finished = torchrun("dist_checkpoint.py", 6, str(tmp_path), seconds=240)
    assert finished.codes == (0,), finished.text
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(6)]
    everyone = {"on 6", "in place", "lanes", "torn", "collective", "mesh"}
    for rank, checks in enumerate(found):
        some = {"before"} if rank < 4 else set()
        some |= {f"on {world}" for world in (1, 2, 3) if rank < world}
        assert checks.keys() == everyone | some
        assert all(checks.values()), (rank, checks)

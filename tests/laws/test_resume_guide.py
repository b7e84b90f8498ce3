"""The page on checkpoints runs from top to bottom, and what it prints is what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "checkpoints.md"


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 8
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {"__name__": "page"})
    said = capsys.readouterr().out
    for line in re.findall(r"^    # (\S.*)$", "\n".join(blocks), re.MULTILINE):
        assert line in said
    assert "seed: 0 -> 1: seed decides the order of rows within a dataset" in said

"""The guide's code runs as it stands, from a script without a main guard; so do the examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(script: Path) -> str:
    done = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_guide_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "guide" / "step-pipelines.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 7
    script = tmp_path / "guide.py"
    script.write_text("\n".join(blocks))
    out = run(script)
    assert "auto: in this process" in out and "1000 items in, 1000 done" in out


@pytest.mark.parametrize(
    ("name", "told"),
    [("steps_text", "5000 sentences"), ("steps_errors", "all 100 outputs in order"), ("steps_state", "sensor4")],
)
def test_the_examples_run(name: str, told: str) -> None:
    assert told in run(ROOT / "examples" / f"{name}.py")

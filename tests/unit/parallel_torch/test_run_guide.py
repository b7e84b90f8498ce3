"""The guide page on running pipelines runs, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "model-pipelines-run.md"


def test_every_block_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    names: dict[str, Any] = {"__name__": "guide"}
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)  # our own page
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert names["report"].measured > 0

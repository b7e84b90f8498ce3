"""How deep a row may be nested is fixed, and never depends on how deep the calls are that read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core.op import BadRows
from headrace.io import Dataset
from headrace.io.formats.jsonl import MOST_NESTED

FIELDS = [None, frozenset({"n", "deep"}), frozenset({"n"})]


def nested(depth: int, n: int) -> str:
    """A row that is `depth` containers deep, itself the first."""
    lists = (depth - 1) // 2 * 2
    inner = '[{"k":' * (lists // 2) + ("[]" if depth - 1 - lists else "0") + "}]" * (lists // 2)
    return f'{{"n": {n}, "deep": {inner}, "code": "{"[{" * 300}"}}\n'


def below(calls: int, look: Callable[[], Any]) -> Any:
    """`look()` from so many calls further down."""
    return below(calls - 1, look) if calls else look()


def outcome(path: Path, fields: frozenset[str] | None, rows: int) -> tuple[list[int], list[int]]:
    bad = BadRows()
    got: Any = Dataset.from_path("d", path).open().read(0, np.arange(rows), fields, bad)
    return (got.get("n", []) if isinstance(got, dict) else [row["n"] for row in got]), bad.rows


@pytest.mark.parametrize("calls", [0, 400])
@pytest.mark.parametrize("fields", FIELDS[:2])
def test_the_limit_is_the_same_from_everywhere(tmp_path: Path, fields: frozenset[str] | None, calls: int) -> None:
    depths = [1, 2, MOST_NESTED - 1, MOST_NESTED, MOST_NESTED + 1, MOST_NESTED + 2, 900, 1000, 100_000]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(nested(depth, n) for n, depth in enumerate(depths)))
    assert below(calls, lambda: outcome(path, fields, len(depths))) == ([0, 1, 2, 3], [4, 5, 6, 7, 8])


@pytest.mark.parametrize("fields", FIELDS)
def test_a_row_reads_alike_from_everywhere(tmp_path: Path, fields: frozenset[str] | None) -> None:
    """A field that nobody wants is not looked into, and may be as deep as the decoder goes."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(nested(600 + 20 * n, n) for n in range(25)))
    here = outcome(path, fields, 25)
    assert below(300, lambda: outcome(path, fields, 25)) == below(600, lambda: outcome(path, fields, 25)) == here
    assert bool(here[0]) == (fields == FIELDS[2])


def test_the_error_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(nested(MOST_NESTED + 1, 0))
    with pytest.raises(Exception, match=f"row 0: it is nested more than {MOST_NESTED} deep"):
        Dataset.from_path("d", path).open().read(0, np.arange(1), None)

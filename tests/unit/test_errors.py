"""Every error of the package crosses to another process as what it was."""

from __future__ import annotations

import ast
import copy
import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import HeadraceError
from headrace.io.row_error import RowError

ARGUMENTS: dict[str, dict[str, Any]] = {
    "UnknownOptionError": {"kind": "option", "name": "max_worker", "known": ("max_workers", "runner")},
    "CheckpointMismatch": {"differences": ["seed: 1 -> 2", "lanes: 2 -> 4"], "advice": "Do otherwise."},
    "RowError": {"message": "cannot be read", "row": 3, "path": "a.jsonl", "offset": 17, "position": 2},
}
"""Of those that take more than a message."""


def every_error() -> list[type[HeadraceError]]:
    """Found in the source, so that no module is loaded but those that define one."""
    root = Path(headrace.__file__).parent
    defined = [
        (path, node.name, {ast.unparse(base).rpartition(".")[2] for base in node.bases})
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    names = {"HeadraceError"}
    while more := {name for _, name, bases in defined if bases & names} - names:
        names |= more
    return [
        getattr(importlib.import_module(".".join(("headrace", *path.relative_to(root).with_suffix("").parts))), name)
        for path, name, _ in defined
        if name in names
    ]


def test_all_errors_are_found() -> None:
    found = every_error()
    assert {HeadraceError, headrace.errors.InternalError, RowError} <= set(found)
    made = {kind for kind in HeadraceError.__subclasses__() if kind.__module__.startswith("headrace.")}
    assert made <= set(found)


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=["pickle", "copy"])
def test_an_error_survives_pickling(kind: type[HeadraceError], again: Any) -> None:
    given = ARGUMENTS.get(kind.__name__)
    error = kind("what happened, and where") if given is None else kind(**given)
    error.add_note("seen by a worker")
    error.origin = (0, 1, 2)  # type: ignore[attr-defined]
    for _ in range(2):
        twin = again(error)
        assert type(twin) is kind and str(twin) == str(error) and twin.args == error.args
        assert vars(twin) == vars(error) and twin.__notes__ == ["seen by a worker"]
        error = twin

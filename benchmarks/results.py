"""Runs grouped by configuration, and the medians over them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

Run = dict[str, Any]


def label(run: Run) -> str:
    options = " ".join(f"{key}={value}" for key, value in run["options"].items())
    return f"{run['loader']} {options}".strip()


def grouped(runs: Iterable[Run], workload: str) -> dict[str, list[Run]]:
    """Runs of one workload by configuration: the undisturbed ones, else the least disturbed three."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run["workload"] == workload:
            groups.setdefault(label(run), []).append(run)
    for name, found in groups.items():
        good = [run for run in found if "error" not in run]
        quiet = [run for run in good if not run.get("disturbed")]
        groups[name] = quiet or sorted(good, key=lambda run: run.get("foreign_cores", 0.0))[:3] or found[:1]
    return groups


def median(runs: list[Run], key: str) -> float | None:
    values = [run[key] for run in runs if run.get(key) is not None]
    return statistics.median(values) if values else None


def best(groups: dict[str, list[Run]], key: str, fits: Callable[[Run], bool]) -> float | None:
    """The best median among the configurations that fit."""
    found = [median(runs, key) for runs in groups.values() if fits(runs[0]) and "error" not in runs[0]]
    return max((value for value in found if value is not None), default=None)


def is_rival(run: Run) -> bool:
    """zephon with its own way of tokenizing: the configuration that the ratios are taken against."""
    return run["loader"] == "zephon" and "tok" not in run["options"]

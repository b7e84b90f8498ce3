"""The project's own goals, checked against a set of results: ratios within one run, never figures of another machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .results import Run, best, grouped, is_rival, median

Runs = list[Run]
BARE = "bare"


@dataclass(frozen=True)
class Goal:
    """`measure(results)` should be at least (or at most) `limit`; None means that a run it needs is missing."""

    text: str
    limit: float
    measure: Callable[[Runs], float | None]
    at_most: bool = False


def chosen(**wanted: Any) -> Callable[[Run], bool]:
    """Runs of headrace whose options contain `wanted`."""
    return lambda run: run["loader"] == "headrace" and all(run["options"].get(k) == v for k, v in wanted.items())


def bare(**wanted: Any) -> Callable[[Run], bool]:
    return lambda run: run["loader"] == BARE and all(run["options"].get(k) == v for k, v in wanted.items())


def is_peer(run: Run) -> bool:
    return run["loader"] not in ("headrace", BARE)


def zephon_with_fast_encoder(run: Run) -> bool:
    return run["loader"] == "zephon" and run["options"].get("tok") == "gigatoken"


def ratio(workload: str, ours: Callable[[Run], bool], theirs: Callable[[Run], bool]) -> Callable[[Runs], float | None]:
    """Best of ours over best of theirs, in the workload's unit."""
    key = "tokens_per_s" if workload == "W1" else "records_per_s"

    def measure(runs: Runs) -> float | None:
        groups = grouped(runs, workload)
        mine, other = best(groups, key, ours), best(groups, key, theirs)
        return mine / other if mine and other else None

    return measure


def resume(part: str, key: str) -> Callable[[Runs], float | None]:
    """A figure of W4 for headrace with the shuffle of 8192."""

    def measure(runs: Runs) -> float | None:
        mine = chosen(fmt="jsonl", shuffle=8192)
        found = [run[part] for group in grouped(runs, "W4").values() for run in group if mine(run) and part in run]
        return median([part for part in found if "error" not in part], key)

    return measure


def memory(runs: Runs) -> float | None:
    """Our peak memory over zephon's default one, both on W1."""
    groups = [group for group in grouped(runs, "W1").values() if "error" not in group[0]]
    plain = {"fmt": "jsonl"}
    mine = [median(group, "peak_pss_mb") for group in groups if chosen()(group[0]) and group[0]["options"] == plain]
    other = [median(group, "peak_pss_mb") for group in groups if is_rival(group[0])]
    values = [value for value in other if value]
    return mine[0] / min(values) if mine and mine[0] and values else None


AUTO = chosen(fmt="jsonl")
GOALS = [
    Goal("W1: times zephon's best with its own tokenizer path", 25, ratio("W1", AUTO, is_rival)),
    Goal("W1: times zephon with the same fast encoder", 5, ratio("W1", AUTO, zephon_with_fast_encoder)),
    Goal("W1: times zephon, both on `tokenizers`", 1.6, ratio("W1", chosen(encoder="reference"), is_rival)),
    Goal("W1: share of the encoder alone", 0.6, ratio("W1", AUTO, bare(threads=2, whole=None))),
    Goal("W1: times the best peer", 1, ratio("W1", AUTO, is_peer)),
    Goal("W2: times zephon's best", 5, ratio("W2", chosen(), is_rival)),
    Goal("W2: share of a bare loop, JSONL", 0.8, ratio("W2", chosen(fmt="jsonl"), bare(fmt="jsonl"))),
    Goal("W2: share of a bare loop, Parquet", 0.8, ratio("W2", chosen(fmt="parquet"), bare(fmt="parquet"))),
    Goal("W3: times zephon's best", 8, ratio("W3", chosen(), is_rival)),
    Goal("W3: times the best peer", 1, ratio("W3", chosen(), is_peer)),
    Goal("W3: share of a bare gather", 0.4, ratio("W3", chosen(), bare())),
    Goal("W4: seconds to the first batch", 0.7, resume("first", "first_batch_s"), at_most=True),
    Goal("W4: seconds from restore to the first batch", 1.0, resume("load", "first_batch_s"), at_most=True),
    Goal(
        "W4: kB of state", 20, lambda runs: (size := resume("save", "state_bytes")(runs)) and size / 1e3, at_most=True
    ),
    Goal("W5: peak memory over zephon's least", 1, memory, at_most=True),
]


def goals_table(runs: Runs) -> list[str]:
    lines = ["### Goals", "", "| goal | wanted | measured | |", "|---|---|---|---|"]
    for goal in GOALS:
        value = goal.measure(runs)
        if value is None:
            continue
        reached = value <= goal.limit if goal.at_most else value >= goal.limit
        sign = "at most" if goal.at_most else "at least"
        lines.append(f"| {goal.text} | {sign} {goal.limit:g} | {value:.3g} | {'reached' if reached else 'missed'} |")
    return lines

"""Pipeline parallelism: measure, plan, simulate, prove, run, compare.

    action.py     Kind, Action(stage, kind, microbatch, parts); text as torch's runtime reads it
    schedule.py   Schedule(name, num_microbatches, rows, stage_to_rank): one row of actions a rank; CSV both ways
    timeline.py   Span(rank, action, start, end), Timeline: predicted and measured alike
    formulas.py   bubble_fraction and the questions asked of it
    builders/     one schedule a file; build_schedule(name, num_ranks, num_microbatches, chunks=None) -> Schedule
    lower.py      compute actions -> with sends, receives, unshard, reshard, reduce
    check.py      the static proof: complete, acyclic, matched, free of deadlock, within the memory cap
    simulate.py   times and bytes per stage -> Timeline, bubbles, critical path, peak memory, lower bound
    partition.py  cut layers into stages by measured cost
    planner.py    candidates with time, bubble, bytes, gap to the bound; explain()
    compare.py    where the time of a real run went
    draw/         ASCII, SVG, HTML, Perfetto trace
    torch*.py     everything that needs torch; resolved on first use, so that the rest works without it

Contract with the torch files: they take a `Schedule` (compute-only; `lower()` gives the one with communication), run its
rows in order, and record a `Timeline` of `Span`s in seconds since the step began.
"""

from __future__ import annotations

from headrace.parallel.action import Action, Kind
from headrace.parallel.builders.registry import build as build_schedule
from headrace.parallel.builders.registry import schedules
from headrace.parallel.formulas import (
    bubble_fraction,
    effective_batch,
    microbatches_for_bubble,
    microbatches_of_batch,
)
from headrace.parallel.schedule import Schedule
from headrace.parallel.timeline import Span, Timeline

# Names that need torch, by the module that holds them: resolved on first use.
_TORCH = {
    "Pipeline": "headrace.parallel.torch_pipeline",
    "PipelineStage": "headrace.parallel.torch_pipeline",
}


def __getattr__(name: str) -> object:
    """Resolve the torch half on first use; without torch the error says which extra to install."""
    module = _TORCH.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)


__all__ = [
    "Action",
    "Kind",
    "Schedule",
    "Span",
    "Timeline",
    "bubble_fraction",
    "build_schedule",
    "effective_batch",
    "microbatches_for_bubble",
    "microbatches_of_batch",
    "schedules",
]

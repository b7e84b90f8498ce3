"""Pipeline parallelism: measure, plan, simulate, prove, run, compare.

    action.py        Kind, Action(stage, kind, microbatch, parts); text as torch's runtime reads it
    schedule.py      Schedule(name, num_microbatches, rows, stage_to_rank): one row of actions a rank; CSV both ways
    builders/        one schedule a file; build_schedule(name, num_ranks, num_microbatches, chunks=None) -> Schedule
    lower.py         compute actions -> with sends, receives, unshard, reshard, reduce
    transport.py     who waits for whom, on each model of message transport
    check.py         the static proof: complete, matched, free of deadlock, within the memory cap
    costs.py         seconds and bytes by stage; layers.py the same by layer
    program.py       a schedule as integers, for the simulator
    simulate.py      times -> Timeline, bubbles; critical.py its critical path
    memory.py        activations in flight and bytes held; bound.py a time that no order can beat
    formulas.py      bubble_fraction and the questions asked of it; closed_forms.py all schedules, with conditions
    partition.py     cut layers into stages by measured cost
    planner.py       candidates with time, bubble, bytes, gap to the bound; explain()
    timeline.py      Span(rank, action, start, end), Timeline: predicted and measured alike
    compare.py       where the time of a real step went
    data_parallel.py pipeline x data parallel: which reductions are hidden
    draw/            text, SVG, HTML, Perfetto trace
    torch_*.py       everything that needs torch; resolved on first use, so that the rest works without it

Contract with the torch files: they take a `Schedule` (compute-only; `lower()` gives the one with communication), run its
rows in order, and record a `Timeline` of `Span`s in seconds since the step began.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.lazy import lazy
from headrace.parallel.action import Action, Kind
from headrace.parallel.builders.registry import build as build_schedule
from headrace.parallel.builders.registry import schedules
from headrace.parallel.check import Proof, prove
from headrace.parallel.closed_forms import ClosedForm, closed_form
from headrace.parallel.compare import Comparison, compare
from headrace.parallel.costs import StageCosts
from headrace.parallel.data_parallel import Grid, replicate
from headrace.parallel.draw import to_grid_svg, to_html, to_svg, to_text, to_trace
from headrace.parallel.formulas import (
    bubble_fraction,
    effective_batch,
    microbatches_for_bubble,
    microbatches_of_batch,
)
from headrace.parallel.layers import Hardware, LayerCost, even_split, load_layers, save_layers, stage_costs
from headrace.parallel.lower import lower
from headrace.parallel.partition import Balance, balance, partition
from headrace.parallel.planner import Candidate, Plan, plan_layers
from headrace.parallel.schedule import Schedule
from headrace.parallel.simulate import Simulation, simulate
from headrace.parallel.timeline import Span, Timeline

if TYPE_CHECKING:
    from headrace.parallel.torch_checkpoint import load_checkpoint as load_checkpoint
    from headrace.parallel.torch_checkpoint import save_checkpoint as save_checkpoint
    from headrace.parallel.torch_distributed import DistributedPipeline as DistributedPipeline
    from headrace.parallel.torch_distributed import RankResult as RankResult
    from headrace.parallel.torch_distributed import RunOptions as RunOptions
    from headrace.parallel.torch_feed import feed as feed
    from headrace.parallel.torch_memory import compare_recompute as compare_recompute
    from headrace.parallel.torch_pipeline import Pipeline as Pipeline
    from headrace.parallel.torch_pipeline import StepResult as StepResult
    from headrace.parallel.torch_profile import plan as plan
    from headrace.parallel.torch_profile import profile_layers as profile_layers
    from headrace.parallel.torch_stage import PipelineStage as PipelineStage
    from headrace.parallel.torch_stage import split_model as split_model

# Names that need torch, by the module that holds them: resolved on first use.
_TORCH = {
    "DistributedPipeline": "headrace.parallel.torch_distributed",
    "Pipeline": "headrace.parallel.torch_pipeline",
    "PipelineStage": "headrace.parallel.torch_stage",
    "RankResult": "headrace.parallel.torch_distributed",
    "RunOptions": "headrace.parallel.torch_distributed",
    "StepResult": "headrace.parallel.torch_pipeline",
    "compare_recompute": "headrace.parallel.torch_memory",
    "feed": "headrace.parallel.torch_feed",
    "load_checkpoint": "headrace.parallel.torch_checkpoint",
    "plan": "headrace.parallel.torch_profile",
    "profile_layers": "headrace.parallel.torch_profile",
    "save_checkpoint": "headrace.parallel.torch_checkpoint",
    "split_model": "headrace.parallel.torch_stage",
}

_get, __dir__ = lazy(__name__, _TORCH)


def __getattr__(name: str) -> object:
    """Resolve the torch half on first use; without torch the error says which extra to install."""
    try:
        return _get(name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"headrace.parallel.{name} runs on torch, which is not installed: pip install 'headrace[torch]'. "
            "Building, proving, simulating, planning and drawing schedules work without it",
            name="torch",
        ) from error


__all__ = [
    "Action",
    "Balance",
    "Candidate",
    "ClosedForm",
    "Comparison",
    "Grid",
    "Hardware",
    "Kind",
    "LayerCost",
    "Plan",
    "Proof",
    "Schedule",
    "Simulation",
    "Span",
    "StageCosts",
    "Timeline",
    "balance",
    "bubble_fraction",
    "build_schedule",
    "closed_form",
    "compare",
    "effective_batch",
    "even_split",
    "load_layers",
    "lower",
    "microbatches_for_bubble",
    "microbatches_of_batch",
    "partition",
    "plan_layers",
    "prove",
    "replicate",
    "save_layers",
    "schedules",
    "simulate",
    "stage_costs",
    "to_grid_svg",
    "to_html",
    "to_svg",
    "to_text",
    "to_trace",
]

"""`headrace pp`: pipeline parallelism on the command line. Needs no torch and no accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from headrace.errors import ConfigError
from headrace.parallel import bubble_fraction
from headrace.parallel.action import Kind
from headrace.parallel.builders import build, recipe, schedules
from headrace.parallel.check import prove as prove_schedule
from headrace.parallel.costs import StageCosts
from headrace.parallel.draw import to_html, to_svg, to_text, to_trace
from headrace.parallel.draw.panel import seconds
from headrace.parallel.formulas import microbatches_for_bubble
from headrace.parallel.layers import Hardware, load_layers
from headrace.parallel.memory import peak_in_flight
from headrace.parallel.planner import parse_size, plan_layers
from headrace.parallel.schedule import Schedule
from headrace.parallel.simulate import Simulation, simulate

app = App(
    name="pp",
    help="Pipeline parallelism: show, draw, plan and prove schedules.",
    result_action="return_value",
)


@app.command
def demo(stages: int = 4, microbatches: int = 8, schedule: list[str] | None = None) -> None:
    """Run a pipeline on a simulated clock: trace of each microbatch, Gantt chart, bubble beside the closed form.

    Parameters
    ----------
    stages: how many stages, one a rank.
    microbatches: how many microbatches.
    schedule: which schedules to run; gpipe and 1f1b by default.
    """
    for name in schedule or ["gpipe", "1f1b"]:
        run = _uniform(name, stages, microbatches, (1, 1, 1), 0)
        print(f"{recipe(name).name}: {stages} ranks, {microbatches} microbatches; forward 1 s, backward 2 s a rank\n")
        print("\n".join(_trace(run)))
        print()
        print(to_text(run))
        print()
        held = ", ".join(f"{units:g}" for units in peak_in_flight(run.schedule).units)
        closed = bubble_fraction(stages, microbatches)
        print(f"bubble measured        {float(run.bubble):.4f}")
        print(
            f"bubble (N-1)/(M+N-1)   {closed:.4f}" + ("" if name in _CLOSED else "   (of GPipe and 1F1B, to compare)")
        )
        print(f"activations held       {held} microbatches by rank\n")
    wanted = microbatches_for_bubble(stages, 0.05)
    print(f"a bubble of 5 % would take {wanted} microbatches")


_CLOSED = {"gpipe", "1f1b", "eager-1f1b"}


def _trace(run: Simulation) -> list[str]:
    """One line for each microbatch: where it is when, forward and back."""
    lines: list[str] = []
    for mb in range(run.schedule.num_microbatches):
        hops: list[tuple[float, str]] = []
        for span in run.timeline.spans:
            for leaf in span.action.leaves():
                if leaf.microbatch == mb and leaf.kind is not Kind.W:
                    way = "F" if leaf.kind is Kind.F else "B"
                    hops.append((float(span.start), f"{way}{leaf.stage}@{float(span.start):g}-{float(span.end):g}"))
        lines.append(f"microbatch {mb:>2}: " + " ".join(text for _, text in sorted(hops)))
    return lines


def _uniform(
    name: str,
    ranks: int,
    microbatches: int,
    times: tuple[float, float, float],
    latency: float,
    chunks: int | None = None,
) -> Simulation:
    """Simulate a schedule by name; `times` are of a whole rank, shared by its stages."""
    schedule = build(name, ranks, microbatches, chunks=chunks)
    each = schedule.num_stages / schedule.num_ranks
    f, i, w = (t / each for t in times)
    return simulate(schedule, StageCosts.uniform(schedule.num_stages, (f, i, w), latency))


@app.command
def gantt(
    schedule: Annotated[list[str] | None, Parameter(name=["--schedule", "-s"])] = None,
    *,
    ranks: int = 4,
    microbatches: int = 8,
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
    latency: float = 0.0,
    csv: Path | None = None,
    html: Path | None = None,
    svg: Path | None = None,
    trace: Path | None = None,
) -> None:
    """Draw schedules: as text, or as a page, a picture or a trace for Perfetto.

    Parameters
    ----------
    schedule: one or more names; 1f1b by default.
    ranks: pipeline ranks.
    microbatches: microbatches of a step.
    times: seconds of forward, input gradient and weight gradient of a whole rank.
    latency: seconds that a message takes.
    csv: draw the schedule in this file instead.
    html: write a page to zoom and hover in.
    svg: write a picture.
    trace: write a Chrome/Perfetto trace.
    """
    if csv is not None:
        loaded = Schedule.load(csv)
        prove_schedule(loaded)
        runs = [simulate(loaded, StageCosts.uniform(loaded.num_stages, times, latency))]
    else:
        runs = [_uniform(name, ranks, microbatches, times, latency) for name in schedule or ["1f1b"]]
    for path, draw in ((html, to_html), (svg, to_svg), (trace, to_trace)):
        if path is not None:
            path.write_text(draw(list(runs)), encoding="utf-8")
            print(f"wrote {path}")
    if html is None and svg is None and trace is None:
        print(to_text(list(runs)))


@app.command
def prove(file: Path, *, cap: int | None = None, microbatches: int | None = None) -> None:
    """Prove a schedule in a CSV file: complete, matched, free of deadlock, within a cap; exit status 1 if it is not.

    Parameters
    ----------
    file: one line of actions for each rank, as torch's pipeline runtime reads it; with or without communication.
    cap: most microbatches in flight on a rank.
    microbatches: how many microbatches the step has; by default as many as the file mentions.
    """
    print(prove_schedule(Schedule.load(file, microbatches), cap=cap))


@app.command
def plan(
    profile: Path,
    *,
    ranks: int,
    microbatches: int,
    memory: str = "unlimited",
    latency: float = 0.0,
    bandwidth: float = float("inf"),
    state_factor: float = 4.0,
    schedule: list[str] | None = None,
    html: Path | None = None,
) -> None:
    """Choose schedule and cut from costs by layer: a table of candidates, and why each was not taken.

    Parameters
    ----------
    profile: JSON list of layers: name, forward, backward_input, backward_weight (seconds); activation, output, parameters (bytes).
    ranks: pipeline ranks.
    microbatches: microbatches of a step.
    memory: what a rank may hold, such as 6GiB.
    latency: seconds that a message takes.
    bandwidth: bytes a second of a link.
    state_factor: bytes kept for each byte of parameters, with gradients and optimizer.
    schedule: only these schedules.
    html: write the predicted step as a page.
    """
    hardware = Hardware(latency, bandwidth, state_factor)
    layers = load_layers(profile)
    found = plan_layers(layers, ranks, microbatches, memory=parse_size(memory), hardware=hardware, names=schedule)
    print(found.explain())
    choice = found.choice
    print(
        f"\nrun {choice.label} with num_layers_per_stage={list(choice.counts)}; predicted step {seconds(choice.seconds)}"
    )
    if html is not None:
        found.save_html(html)
        print(f"wrote {html}")


@app.command(name="list")
def list_schedules() -> None:
    """Name the schedules, with what each is for."""
    for name in schedules():
        print(f"{name:<18} {recipe(name).about}")


@app.command
def csv(name: str, *, ranks: int = 4, microbatches: int = 8, chunks: int | None = None) -> None:
    """Print a schedule as CSV, which torch's pipeline runtime loads and `headrace pp prove` checks."""
    if ranks < 1:
        raise ConfigError(f"ranks is {ranks}; a pipeline has at least one")
    print(build(name, ranks, microbatches, chunks=chunks).to_csv(), end="")

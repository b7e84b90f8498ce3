"""A trace in Chrome's JSON format, for Perfetto (ui.perfetto.dev) or chrome://tracing.

One process for each timeline, so that predicted and measured lie above each other; one thread for each rank; arrows from
the computation that makes a tensor to the one that uses it; a counter of memory for each rank.
"""

from __future__ import annotations

import json

from headrace.parallel.action import Kind
from headrace.parallel.draw.panel import WORDS, Drawable, Panel, kind_of, panels
from headrace.parallel.timeline import Span

Event = dict[str, object]


def to_trace(drawables: Drawable | list[Drawable]) -> str:
    """The trace as JSON text; times in it are microseconds."""
    events: list[Event] = []
    for pid, panel in enumerate(panels(drawables)):
        events += _names(panel, pid)
        events += [_slice(span, pid) for span in panel.timeline.spans]
        events += _arrows(panel, pid)
        events += _counters(panel, pid)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _micro(value: float) -> float:
    return round(float(value) * 1e6, 3)


def _names(panel: Panel, pid: int) -> list[Event]:
    process: Event = {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": panel.title}}
    ranks = range(panel.timeline.num_ranks)
    return [process] + [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": f"rank {rank}"}} for rank in ranks
    ]


def _slice(span: Span, pid: int) -> Event:
    return {
        "ph": "X",
        "name": str(span.action),
        "cat": WORDS[kind_of(span.action.kind)],
        "pid": pid,
        "tid": span.rank,
        "ts": _micro(span.start),
        "dur": _micro(span.duration),
        "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
    }


def _arrows(panel: Panel, pid: int) -> list[Event]:
    """From the end of what makes a tensor to the start of what uses it on another rank."""
    made: dict[tuple[int, bool, int | None], Span] = {}
    for span in panel.timeline.compute:
        for leaf in span.action.leaves():
            if leaf.kind is not Kind.W:
                made[leaf.stage, leaf.kind is Kind.F, leaf.microbatch] = span
    arrows: list[Event] = []
    for (stage, forward, mb), user in made.items():
        maker = made.get((stage + (-1 if forward else 1), forward, mb))
        if maker is None or maker.rank == user.rank:
            continue
        common: Event = {"cat": "message", "name": "message", "pid": pid, "id": f"{pid}.{len(arrows)}"}
        arrows.append({**common, "ph": "s", "tid": maker.rank, "ts": _micro(maker.end)})
        arrows.append({**common, "ph": "f", "bp": "e", "tid": user.rank, "ts": _micro(user.start)})
    return arrows


def _counters(panel: Panel, pid: int) -> list[Event]:
    return [
        {"ph": "C", "name": f"memory of rank {rank}", "pid": pid, "ts": _micro(at), "args": {panel.unit: float(amount)}}
        for rank, series in enumerate(panel.memory)
        for at, amount in series
    ]

"""A Gantt chart in plain characters: a line for each rank, time to the right.

Each action is as wide as its time; where it fits it shows kind and microbatch (and the stage, if its rank has several).
"""

from __future__ import annotations

from headrace.parallel.action import Action
from headrace.parallel.draw.panel import Drawable, Panel, kind_of, panels
from headrace.parallel.timeline import Span

_ANSI = {"F": "44;97", "B": "42;97", "I": "46;30", "W": "43;30", "OVERLAP_F_B": "45;97", "other": "100;97"}


def to_text(drawables: Drawable | list[Drawable], width: int = 120, *, colour: bool = False) -> str:
    """Draw one or more timelines below each other on one time scale; at most `width` characters wide.

    With `colour` the actions are filled with terminal colours.
    """
    drawn = panels(drawables)
    longest = max((p.timeline.makespan for p in drawn), default=0)
    room = max(20, width - 9)
    shortest = min((s.duration for p in drawn for s in p.timeline.compute if s.duration > 0), default=1)
    # Three columns for the shortest action read well; more only stretch the picture.
    scale = min(room / float(longest), 3 / float(shortest)) if longest else 1.0
    if scale * float(shortest) >= 1:
        # Whole columns, so that equal actions are drawn equal.
        scale = int(scale * float(shortest) + 1e-9) / float(shortest)
    return "\n\n".join(_panel(panel, scale, colour) for panel in drawn)


def _panel(panel: Panel, scale: float, colour: bool) -> str:
    lines = [f"{panel.title}: {panel.summary}"]
    several = len({s.action.stage for s in panel.timeline.compute if s.action.stage >= 0}) > panel.timeline.num_ranks
    begin = min((s.start for s in panel.timeline.spans), default=0)
    end = round(float(panel.timeline.makespan) * scale)
    for rank in range(panel.timeline.num_ranks):
        spans = [s for s in panel.timeline.of_rank(rank) if s.action.is_compute]
        lines.append(f"rank {rank:<3} {_line(spans, float(begin), scale, (several, colour), end)}")
    return "\n".join(lines)


def _line(spans: list[Span], begin: float, scale: float, style: tuple[bool, bool], end: int) -> str:
    several, colour = style
    out: list[str] = []
    at = 0
    for span in spans:
        left = round((float(span.start) - begin) * scale)
        right = round((float(span.end) - begin) * scale)
        out.append("." * (left - at))
        cell = _cell(span.action, right - left, several)
        out.append(f"\x1b[{_ANSI[kind_of(span.action.kind)]}m{cell}\x1b[0m" if colour and cell else cell)
        at = max(at, right)
    return "".join(out) + "." * (end - at)


def _cell(action: Action, width: int, several: bool) -> str:
    """The label that fits, padded to the width; from three columns on the last one keeps neighbours apart."""
    if width <= 0:
        return ""
    room = width if width < 3 else width - 1
    label = next((text for text in _labels(action, several) if len(text) <= room), "#")
    return label.ljust(room) + "|" * (width - room)


def _labels(action: Action, several: bool) -> list[str]:
    """Texts for an action, longest first."""
    if action.parts:
        return ["+".join(str(p) if several else f"{p.kind}{p.microbatch}" for p in action.parts), "FB", "X"]
    short = f"{action.kind.value}{action.microbatch}"
    return ([str(action)] if several else []) + [short, action.kind.value]

"""A Gantt chart as one SVG: static, no script, a tooltip on every action."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from headrace.parallel.draw.panel import (
    COLOURS,
    FAINT,
    LETTERS,
    WORDS,
    Drawable,
    Panel,
    is_faint,
    kind_of,
    panels,
    seconds,
)
from headrace.parallel.timeline import Span

ROW, GAP, LEFT, TOP = 26, 5, 64, 34
FONT = "font-family='system-ui, sans-serif'"


def to_svg(drawables: Drawable | list[Drawable], width: int = 1200) -> str:
    """Draw timelines below each other on one time scale, with an axis and a legend."""
    drawn = panels(drawables)
    longest = max((float(p.timeline.makespan) for p in drawn), default=0.0) or 1.0
    scale = (width - LEFT - 16) / longest
    body: list[str] = []
    y = 8
    for panel in drawn:
        body.append(_panel(panel, y, scale))
        y += TOP + panel.timeline.num_ranks * (ROW + GAP)
    body.append(draw_axis(longest, scale, y))
    kinds = list(dict.fromkeys(kind_of(s.action.kind) for p in drawn for s in p.timeline.spans))
    several = any(any(is_faint(p.timeline)) for p in drawn)
    body.append(draw_legend(kinds, y + 32, [("lighter: every second stage of a rank", "#c9ced6")] if several else ()))
    height = y + 56
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
        f"{FONT} font-size='12'>\n<rect width='100%' height='100%' fill='#ffffff'/>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _panel(panel: Panel, y: float, scale: float) -> str:
    begin = min((float(s.start) for s in panel.timeline.spans), default=0.0)
    out = [
        f"<text x='8' y='{y + 18}' font-size='13'><tspan font-weight='600'>{escape(panel.title)}</tspan>"
        f"<tspan fill='#555'>  {escape(panel.summary)}</tspan></text>"
    ]
    length = float(panel.timeline.makespan) * scale
    faint = is_faint(panel.timeline)
    for rank in range(panel.timeline.num_ranks):
        top = y + TOP + rank * (ROW + GAP) - 6
        out.append(f"<text x='{LEFT - 8}' y='{top + ROW / 2 + 4}' text-anchor='end' fill='#333'>rank {rank}</text>")
        out.append(f"<rect x='{LEFT}' y='{top}' width='{length:.2f}' height='{ROW}' fill='#eeeeee'/>")
        out += [
            draw_box(span, (begin, scale), top, span.action.stage in faint[rank])
            for span in panel.timeline.of_rank(rank)
        ]
    return "\n".join(out)


def draw_box(span: Span, frame: tuple[float, float], top: float, faint: bool) -> str:
    """One action with its tooltip and, if it fits, its label. `frame` is the time of the left edge and pixels a second."""
    begin, scale = frame
    x, wide = LEFT + (float(span.start) - begin) * scale, float(span.duration) * scale
    kind = kind_of(span.action.kind)
    tip = f"{span.action}: {WORDS[kind]}, {seconds(span.start)} to {seconds(span.end)} ({seconds(span.duration)})"
    label = _label(span, wide)
    ink = LETTERS.get(kind, "#fff")
    paint = f"fill='{COLOURS[kind]}'" + (f" fill-opacity='{FAINT}'" if faint else "")
    # Communication is a strip at the foot of the row: it runs beside computation and would hide it.
    high, low = (ROW, top) if kind != "other" else (5, top + ROW - 5)
    text = (
        f"<text x='{x + wide / 2:.2f}' y='{top + ROW / 2 + 4}' text-anchor='middle' fill='{ink}' font-size='11'>{label}</text>"
        if label and kind != "other"
        else ""
    )
    # A hairline of background keeps equal neighbours apart; narrow boxes have none to spare.
    inset = min(1.0, wide / 8)
    return (
        f"<g><title>{escape(tip)}</title><rect x='{x:.2f}' y='{low}' width='{max(wide - inset, 0.2):.2f}' height='{high}' "
        f"{paint}/>{text}</g>"
    )


def _label(span: Span, wide: float) -> str:
    """The longest text that fits in so many pixels."""
    action = span.action
    short = "+".join(f"{p.kind}{p.microbatch}" for p in action.leaves())
    full = "+".join(map(str, action.leaves()))
    mb = "" if action.parts else str(action.microbatch)
    return next((text for text in (full, short, mb) if text and 8 * len(text) + 2 <= wide), "")


def draw_axis(longest: float, scale: float, y: float) -> str:
    """A line with round numbers."""
    step = nice_step(longest / 10)
    out = [f"<line x1='{LEFT}' y1='{y}' x2='{LEFT + longest * scale:.2f}' y2='{y}' stroke='#888'/>"]
    for i in range(int(longest / step + 1e-9) + 1):
        x = LEFT + i * step * scale
        out.append(f"<line x1='{x:.2f}' y1='{y}' x2='{x:.2f}' y2='{y + 4}' stroke='#888'/>")
        out.append(
            f"<text x='{x:.2f}' y='{y + 16}' text-anchor='middle' fill='#555' font-size='10'>{seconds(i * step)}</text>"
        )
    return "\n".join(out)


def nice_step(rough: float) -> float:
    """The next of 1, 2, 5 times a power of ten.

    >>> nice_step(3.3), nice_step(0.07)
    (5.0, 0.1)
    """
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


def draw_legend(kinds: list[str], y: float, more: Sequence[tuple[str, str]] = ()) -> str:
    """Colours and what they mean; `more` are further (word, colour) pairs."""
    out: list[str] = []
    x = float(LEFT)
    for word, colour in [*((WORDS[kind], COLOURS[kind]) for kind in kinds), *more]:
        out.append(f"<rect x='{x}' y='{y}' width='12' height='12' fill='{colour}'/>")
        out.append(f"<text x='{x + 17}' y='{y + 10}' fill='#333'>{word}</text>")
        x += 40 + 7 * len(word)
    out.append(f"<rect x='{x}' y='{y}' width='12' height='12' fill='#eeeeee' stroke='#ccc'/>")
    out.append(f"<text x='{x + 17}' y='{y + 10}' fill='#333'>idle (bubble)</text>")
    return "\n".join(out)

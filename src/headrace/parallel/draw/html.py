"""One HTML file to explore timelines: zoom with the wheel, drag, hover; nothing is loaded from elsewhere.

The page draws on a canvas, so that a hundred thousand actions stay fluent.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files

from headrace.parallel.draw.panel import COLOURS, FAINT, LETTERS, WORDS, Drawable, Panel, is_faint, kind_of, panels


def to_html(drawables: Drawable | list[Drawable], title: str = "Pipeline schedule") -> str:
    """The page as text; timelines stand below each other on one time axis."""
    page = files("headrace.parallel.draw").joinpath("page.html").read_text(encoding="utf-8")
    drawn = panels(drawables)
    data = {
        "title": title,
        "kinds": [
            {"key": key, "colour": COLOURS[key], "word": WORDS[key], "ink": LETTERS.get(key, "#fff")} for key in COLOURS
        ],
        "faint": FAINT,
        "panels": [_data(panel) for panel in drawn],
    }
    # A "</script>" in a title must not end the script.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return page.replace("{{title}}", escape(title)).replace("{{data}}", text)


def _data(panel: Panel) -> dict[str, object]:
    """A panel as plain lists: for each rank its boxes [start, end, kind, label, faint], and its memory [time, amount]."""
    order = list(COLOURS)
    faint = is_faint(panel.timeline)
    begin = min((float(s.start) for s in panel.timeline.spans), default=0.0)
    rows: list[list[list[object]]] = [[] for _ in range(panel.timeline.num_ranks)]
    for span in panel.timeline.spans:
        kind = order.index(kind_of(span.action.kind))
        strength = 1 if span.action.stage in faint[span.rank] else 0
        rows[span.rank].append([float(span.start) - begin, float(span.end) - begin, kind, str(span.action), strength])
    return {
        "title": panel.title,
        "summary": panel.summary,
        "makespan": float(panel.timeline.makespan),
        "rows": rows,
        "memory": [[[float(at) - begin, float(amount)] for at, amount in series] for series in panel.memory],
        "unit": panel.unit,
    }

"""Pictures of timelines, predicted and measured alike: text for a terminal, SVG, a page to zoom in, a trace for Perfetto."""

from __future__ import annotations

from headrace.parallel.draw.grid import to_grid_svg
from headrace.parallel.draw.html import to_html
from headrace.parallel.draw.svg import to_svg
from headrace.parallel.draw.text import to_text
from headrace.parallel.draw.trace import to_trace

__all__ = ["to_grid_svg", "to_html", "to_svg", "to_text", "to_trace"]

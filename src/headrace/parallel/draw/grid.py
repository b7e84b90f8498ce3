"""The step of pipeline x data parallel as SVG: the ranks of each replica, and the reductions that join the replicas."""

from __future__ import annotations

from html import escape

from headrace.parallel.data_parallel import Grid, Reduction
from headrace.parallel.draw.panel import Panel, is_faint, panels, seconds
from headrace.parallel.draw.svg import FONT, GAP, LEFT, ROW, TOP, draw_axis, draw_box, draw_legend

REDUCE = "#d1605e"


def to_grid_svg(grid: Grid, width: int = 1200, replicas: int = 2) -> str:
    """Draw the first `replicas` replicas; each reduction is a box behind its stage's last backward, on all of them."""
    (panel,) = panels(grid.simulation)
    shown = min(replicas, grid.data_parallel)
    scale = (width - LEFT - 16) / (float(grid.seconds) or 1.0)
    body: list[str] = []
    y = 8.0
    for replica in range(shown):
        body.append(_replica(grid, panel, replica, (y, scale)))
        y += TOP + panel.timeline.num_ranks * (ROW + GAP)
    body.append(draw_axis(float(grid.seconds), scale, y))
    kinds = list(dict.fromkeys(s.action.kind.value for s in panel.timeline.spans))
    body.append(draw_legend(kinds, y + 32, [("reduction over replicas", REDUCE)]))
    for number, line in enumerate(grid.explain().splitlines()):
        body.append(f"<text x='{LEFT}' y='{y + 74 + 18 * number}' fill='#333'>{escape(line)}</text>")
    height = y + 74 + 18 * len(grid.explain().splitlines())
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
        f"{FONT} font-size='12'>\n<rect width='100%' height='100%' fill='#ffffff'/>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _replica(grid: Grid, panel: Panel, replica: int, at: tuple[float, float]) -> str:
    y, scale = at
    out = [
        f"<text x='8' y='{y + 18}' font-size='13'><tspan font-weight='600'>replica {replica} of {grid.data_parallel}</tspan>"
        f"<tspan fill='#555'>  {escape(panel.title)}, {escape(panel.summary)}</tspan></text>"
    ]
    faint = is_faint(panel.timeline)
    for rank in range(panel.timeline.num_ranks):
        top = y + TOP + rank * (ROW + GAP) - 6
        out.append(f"<text x='{LEFT - 8}' y='{top + ROW / 2 + 4}' text-anchor='end' fill='#333'>rank {rank}</text>")
        out.append(f"<rect x='{LEFT}' y='{top}' width='{grid.seconds * scale:.2f}' height='{ROW}' fill='#eeeeee'/>")
        out += [
            draw_box(span, (0.0, scale), top, span.action.stage in faint[rank]) for span in panel.timeline.of_rank(rank)
        ]
        out += [_reduction(r, scale, top) for r in grid.reductions if r.rank == rank and r.end > r.start]
    end = LEFT + float(grid.simulation.makespan) * scale
    foot = y + TOP + panel.timeline.num_ranks * (ROW + GAP) - 8
    out.append(f"<line x1='{end:.2f}' y1='{y + 24}' x2='{end:.2f}' y2='{foot}' stroke='#222' stroke-dasharray='4 3'/>")
    return "\n".join(out)


def _reduction(r: Reduction, scale: float, top: float) -> str:
    """A thin box at the foot of the row: it runs beside the computation of the same rank."""
    x, wide = LEFT + r.start * scale, (r.end - r.start) * scale
    tip = f"reduction of stage {r.stage}: {seconds(r.start)} to {seconds(r.end)}, {seconds(r.exposed)} exposed"
    label = f"reduce {r.stage}" if wide > 56 else ""
    return (
        f"<g><title>{escape(tip)}</title><rect x='{x:.2f}' y='{top + ROW - 12}' width='{wide:.2f}' height='12' fill='{REDUCE}'/>"
        f"<text x='{x + wide / 2:.2f}' y='{top + ROW - 2.5}' text-anchor='middle' fill='#fff' font-size='10'>{label}</text></g>"
    )

"""Drawings say what the timeline says: widths, labels, one file that needs nothing else."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from headrace.parallel import (
    Action,
    Kind,
    Span,
    StageCosts,
    Timeline,
    build_schedule,
    replicate,
    schedules,
    simulate,
    to_grid_svg,
    to_html,
    to_svg,
    to_text,
    to_trace,
)
from headrace.parallel.draw.panel import memory_series, panels

SVG = "{http://www.w3.org/2000/svg}"


def run(name="1f1b", ranks=4, microbatches=8, **costs):
    schedule = build_schedule(name, ranks, microbatches)
    return simulate(schedule, StageCosts.uniform(schedule.num_stages, **costs))


def measured():
    """A timeline as a run records it, with communication beside the computation, starting late."""
    spans = [s._replace(start=s.start + 7.0, end=s.end + 7.0) for s in run().timeline.spans]
    sends = [
        Span(s.rank, Action(s.action.stage, Kind.SEND_F, s.action.microbatch), s.end, s.end + 0.5)
        for s in spans
        if s.action.kind is Kind.F and s.rank < 3
    ]
    return Timeline.of([*spans, *sends], 4)


def test_text_is_the_chart_of_the_papers():
    text = to_text(run(microbatches=4), width=90).splitlines()
    assert text[0] == "1f1b (predicted): step 21 s, bubble 42.9%, span bubble 42.9%"
    assert text[1] == "rank 0   F0|F1|F2|F3|..................B0   |...B1   |...B2   |...B3   |"
    assert text[4] == "rank 3   .........F0|B0   |F1|B1   |F2|B2   |F3|B3   |.................."


@pytest.mark.parametrize("name", schedules())
@pytest.mark.parametrize("width", [40, 80, 200])
def test_text_keeps_within_its_width(name, width):
    lines = to_text(run(name), width=width).splitlines()[1:]
    assert len({len(line) for line in lines}) == 1, "all ranks end at the same column"
    assert all(len(line) <= width for line in lines)


def test_text_in_colour_is_the_same_text():
    plain = to_text(run("zbv"))
    assert re.sub(r"\x1b\[[0-9;]*m", "", to_text(run("zbv"), colour=True)) == plain
    assert "\x1b[44;97m" in to_text(run("zbv"), colour=True)


def test_predicted_and_measured_share_one_scale():
    text = to_text([run(), measured()], width=80)
    first, second = text.split("\n\n")
    assert first.splitlines()[1:] == second.splitlines()[1:]
    assert second.startswith("measured: step 33 s")


@pytest.mark.parametrize("name", schedules())
def test_svg_holds_every_action_with_its_tooltip(name):
    simulation = run(name)
    root = ET.fromstring(to_svg(simulation))
    tips = [t.text for t in root.iter(f"{SVG}title")]
    assert len(tips) == len(simulation.timeline.spans)
    assert all(t is not None for t in tips)
    wide = [float(r.get("width")) for r in root.iter(f"{SVG}rect") if r.get("width") != "100%"]
    assert min(wide) > 0
    assert (
        max(float(r.get("x", 0)) + float(r.get("width")) for g in root.iter(f"{SVG}g") for r in g.iter(f"{SVG}rect"))
        < 1200
    )


def test_svg_of_predicted_and_measured():
    text = to_svg([run(), measured()])
    assert "1f1b (predicted)" in text
    assert ">measured<" in text
    assert "communication" in text


def test_titles_are_escaped():
    schedule = build_schedule("1f1b", 2, 2)
    evil = simulate(type(schedule)("<script>&", 2, schedule.rows, schedule.stage_to_rank), StageCosts.uniform(2))
    ET.fromstring(to_svg(evil))
    page = to_html(evil, "</script><b>")
    assert page.count("</script>") == 2
    assert "<b>" not in page.split("<body>")[1].split("<script")[0].replace("&lt;b&gt;", "")


def test_html_is_one_file_that_loads_nothing():
    page = to_html([run("zb-h1", activation=64), measured()], "Predicted and measured")
    assert "http" not in page
    assert "src=" not in page
    assert "{{" not in page
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.S)[1].replace("<\\/", "</"))
    assert [p["title"] for p in data["panels"]] == ["zb-h1 (predicted)", "measured"]
    assert sum(len(row) for row in data["panels"][0]["rows"]) == 4 * 8 * 3
    assert data["panels"][0]["unit"] == "bytes"
    assert max(amount for _, amount in data["panels"][0]["memory"][0]) == 4 * 64
    assert min(box[0] for row in data["panels"][1]["rows"] for box in row) == 0, "a late start is moved to zero"


@pytest.mark.parametrize("name", schedules())
def test_trace_for_perfetto(name):
    simulation = run(name, latency=0.25)
    events = json.loads(to_trace([simulation, simulation]))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 2 * len(simulation.timeline.spans)
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(simulation.makespan * 1e6)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(ends[i]["ts"] - starts[i]["ts"] >= 0.25e6 - 1 for i in starts), "no arrow goes back in time"
    crossing = sum(
        a != b for a, b in zip(simulation.schedule.stage_to_rank, simulation.schedule.stage_to_rank[1:], strict=False)
    )
    assert len(starts) == 2 * 2 * crossing * 8
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert {e["name"] for e in counters} == {f"memory of rank {r}" for r in range(4)}


@pytest.mark.parametrize("name", schedules())
def test_memory_over_time_peaks_where_the_order_says(name):
    simulation = run(name, activation=10)
    series = memory_series(simulation.timeline, "W", simulation.costs, simulation.schedule)
    assert tuple(max(a for _, a in s) for s in series) == simulation.peak_bytes()
    assert all(s[-1][1] == 0 for s in series), "everything is given back"
    (panel,) = panels(simulation)
    assert panel.unit == "bytes"


def test_grid_of_replicas():
    grid = replicate(run(), 4, 3.0)
    root = ET.fromstring(to_grid_svg(grid))
    text = " ".join(t.text or "" for t in root.iter(f"{SVG}text"))
    assert "stage 0 (rank 0)" in text
    assert sum("reduction of stage" in (t.text or "") for t in root.iter(f"{SVG}title")) == 2 * 4

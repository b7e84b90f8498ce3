"""Every closed form that the library states is what its simulator measures, exactly, wherever its condition holds."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.parallel import StageCosts, bubble_fraction, build_schedule, closed_form, schedules, simulate
from headrace.parallel.builders import recipe
from headrace.parallel.memory import peak_in_flight

TIMES = [(1, 1, 1), (3, 2, 1), (2, 2, 1), (1, 3, 1), (1, 2, 2), (5, 4, 3)]


def run(name, ranks, microbatches, times, chunks, latency=0):
    schedule = build_schedule(name, ranks, microbatches, chunks=chunks if recipe(name).free_chunks else None)
    each = schedule.num_stages // ranks
    times = tuple(Fraction(t, each) for t in times)
    return simulate(schedule, StageCosts.uniform(schedule.num_stages, times, latency))


def exact(times):
    """Fractions, so that thirds stay thirds."""
    return tuple(Fraction(t) for t in times)


def lost(simulation, of, times):
    whole = simulation.makespan if of == "makespan" else simulation.span
    return whole - simulation.schedule.num_microbatches * sum(times)


@pytest.mark.parametrize("name", schedules())
def test_bubble_and_activations_over_a_grid(name):
    held = 0
    chunk_choices = (2, 3) if recipe(name).free_chunks else (recipe(name).chunks,)
    for chunks in chunk_choices:
        for ranks in (1, 2, 3, 4, 5, 6, 8):
            for microbatches in sorted({1, ranks, 2 * ranks - 1, 2 * ranks, 2 * ranks + 1, 3 * ranks}):
                for times in TIMES:
                    form = closed_form(name, ranks, microbatches, exact(times), chunks)
                    if not form.holds:
                        continue
                    held += 1
                    simulation = run(name, ranks, microbatches, times, chunks)
                    case = (name, ranks, microbatches, chunks, times)
                    assert lost(simulation, form.of, times) == form.bubble, case
                    units = peak_in_flight(simulation.schedule).units
                    if name == "v-min":
                        assert max(units) == max(form.activations), case
                    else:
                        assert units == form.activations, case
    assert held >= 20, "the grid must reach the condition often enough to mean something"


@given(
    name=st.sampled_from(schedules()),
    ranks=st.integers(1, 7),
    microbatches=st.integers(1, 20),
    chunks=st.integers(2, 4),
    times=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)),
)
@settings(max_examples=300, deadline=None)
def test_bubble_on_random_cases(name, ranks, microbatches, chunks, times):
    chunks = chunks if recipe(name).free_chunks else recipe(name).chunks
    form = closed_form(name, ranks, microbatches, exact(times), chunks)
    simulation = run(name, ranks, microbatches, times, chunks)
    if form.holds:
        assert lost(simulation, form.of, times) == form.bubble
    # Whatever the case, no rank holds more than the form allows: that part needs no equal times.
    if microbatches >= ranks and (microbatches % ranks == 0 or not recipe(name).free_chunks):
        assert max(peak_in_flight(simulation.schedule).units) <= max(form.activations)


@given(ranks=st.integers(1, 12), microbatches=st.integers(1, 40), name=st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]))
@settings(max_examples=150, deadline=None)
def test_bubble_fraction_is_the_measured_idle_share(ranks, microbatches, name):
    simulation = run(name, ranks, microbatches, (1, 1, 1), 1)
    assert simulation.bubble == Fraction(ranks - 1, microbatches + ranks - 1)
    assert bubble_fraction(ranks, microbatches) == pytest.approx(float(simulation.bubble), rel=1e-15)


@given(
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    backward=st.integers(1, 5),
    latency=st.integers(0, 4),
    name=st.sampled_from(["gpipe", "eager-1f1b"]),
)
@settings(max_examples=200, deadline=None)
def test_latency_is_paid_once_each_way_by_gpipe(ranks, microbatches, backward, latency, name):
    """T = (M+N-1)(tF+tB) + 2(N-1)c; eager 1F1B too, as long as what it runs ahead covers the latency."""
    forward = 2
    if name == "eager-1f1b" and 2 * latency > forward + backward:
        return
    simulation = run(name, ranks, microbatches, (forward, backward, 0), 1, latency)
    expected = (microbatches + ranks - 1) * (forward + backward) + 2 * (ranks - 1) * latency
    assert simulation.makespan == expected


@given(ranks=st.integers(2, 6), latency=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_1f1b_pays_latency_in_every_microbatch(ranks, latency):
    """Steady period tF+tB+2c(N-1)/N, so N microbatches more take N of these."""
    times = (2, 3, 1)
    few, many = (run("1f1b", ranks, m * ranks, times, 1, latency).makespan for m in (4, 8))
    assert many - few == 4 * ranks * sum(times) + 4 * 2 * latency * (ranks - 1)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_uneven_gpipe(data):
    """T = sum of tF + sum of tB + (M-1)(max tF + max tB), exactly, and 1F1B is never slower.

    The tighter (M-1) max(tF + tB) is often right for 1F1B but not a bound: forwards (0, 0, 1, 0), backwards (0, 1, 0, 0) and
    two microbatches take 4, not 3.
    """
    ranks, microbatches = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 10))
    some = st.tuples(*[st.integers(0, 9)] * ranks)
    forward, backward = data.draw(some), data.draw(some)
    costs = StageCosts(forward, backward, (0,) * ranks)
    total = sum(forward) + sum(backward)
    gpipe = simulate(build_schedule("gpipe", ranks, microbatches), costs)
    assert gpipe.makespan == total + (microbatches - 1) * (max(forward) + max(backward))
    one = simulate(build_schedule("1f1b", ranks, microbatches), costs)
    assert one.makespan <= gpipe.makespan


def test_the_tighter_form_is_no_bound_for_1f1b():
    costs = StageCosts((0, 0, 1, 0), (0, 1, 0, 0), (0, 0, 0, 0))
    assert simulate(build_schedule("1f1b", 4, 2), costs).makespan == 4

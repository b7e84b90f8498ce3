"""The simulator: times, links, overlap, memory, and its refusals."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import pytest

from headrace.errors import ConfigError, ScheduleError
from headrace.parallel import Schedule, StageCosts, build_schedule, schedules, simulate
from headrace.parallel.memory import peak_bytes, peak_in_flight


def test_the_smallest_pipeline_by_hand():
    run = simulate(build_schedule("1f1b", 2, 2), StageCosts((1, 2), (3, 4), (0, 0), (5,)))
    spans = {str(s.action): (s.start, s.end) for s in run.timeline.spans}
    assert spans["0F0"] == (0, 1)
    assert spans["1F0"] == (6, 8)
    assert spans["1B0"] == (8, 12)
    assert spans["0F1"] == (1, 2)
    assert spans["0B0"] == (17, 20)
    assert spans["1F1"] == (12, 14)
    assert run.makespan == 26
    assert run.timeline.makespan == 26
    assert run.busy == (8, 12)


def test_messages_queue_on_a_link_in_each_direction():
    """Two tensors of 10 bytes over 5 bytes/s: the second waits for the wire, not only for the latency."""
    costs = StageCosts((1, 0), (0, 0), (0, 0), (3,), (5.0,), (10,))
    run = simulate(build_schedule("gpipe", 2, 2), costs)
    starts = {str(s.action): s.start for s in run.timeline.spans}
    assert starts["1F0"] == 1 + 2 + 3
    assert starts["1F1"] == 1 + 2 + 2 + 3
    back = [s for s in run.timeline.spans if s.action.stage == 0 and s.action.kind == "B"]
    assert [s.start for s in back] == [8 + 2 + 3, 8 + 2 + 2 + 3]


def test_overlap_hides_the_shorter_half():
    schedule = build_schedule("dualpipe-v", 2, 8)
    turn, hidden = (simulate(schedule, StageCosts.uniform(4, (1, 1, 1), overlap=o)) for o in (0, 1))
    pairs = sum(bool(s.action.parts) for s in turn.timeline.spans if s.rank == 0)
    assert turn.busy[0] - hidden.busy[0] == pairs
    assert hidden.makespan < turn.makespan


def test_bubbles_of_makespan_and_span_differ_for_parallelograms():
    run = simulate(build_schedule("zb-h2", 4, 12), StageCosts.uniform(4))
    assert run.makespan - 36 == 3
    assert run.span_bubble == 0
    assert run.bubble == pytest.approx(3 / 39)
    assert run.timeline.span_bubble == pytest.approx(0)


def test_the_two_figures_of_unequal_times():
    """N=4, M=12, times (1, 1.2, 0.6) of a rank, shared by its two stages."""
    times = (Fraction(1, 2), Fraction(3, 5), Fraction(3, 10))
    work = Fraction(28, 10) * 12
    assert simulate(build_schedule("zbv", 4, 12), StageCosts.uniform(8, times)).span - work == Fraction(18, 10)
    assert simulate(build_schedule("dualpipe-v", 4, 12), StageCosts.uniform(8, times)).makespan - work == Fraction(
        39, 10
    )


def test_activations_by_stage_and_release():
    schedule = build_schedule("zb-h1", 4, 8)
    run = simulate(schedule, StageCosts.uniform(4))
    assert run.peak_activations() == (4, 4, 4, 4)
    assert run.peak_activations("I") == (4, 3, 2, 1)
    assert peak_in_flight(build_schedule("interleaved-1f1b", 4, 12)).units == (5.5, 4.5, 3.5, 2.5)
    assert peak_in_flight(build_schedule("dualpipe-v", 4, 8)).units == (4.5,) * 4


def test_bytes_are_state_buffers_and_activations():
    schedule = build_schedule("1f1b", 3, 6)
    costs = StageCosts(
        (1, 1, 1), (1, 1, 1), (1, 1, 1), boundary=(10, 20), activation=(100, 200, 300), state=(1000, 2000, 3000)
    )
    # What is sent, of all six microbatches: a rank in the middle sends activations to one side, gradients to the other.
    assert peak_bytes(schedule, costs) == (1000 + 60 + 3 * 100, 2000 + 60 + 120 + 2 * 200, 3000 + 120 + 300)


def test_memory_of_a_v_counts_both_stages_and_no_buffer_at_the_turn():
    schedule = build_schedule("zbv", 2, 4)
    costs = StageCosts((1,) * 4, (1,) * 4, (1,) * 4, boundary=(8, 8, 8), state=(5,) * 4)
    assert peak_bytes(schedule, costs) == (10 + 4 * 8 * 2, 10 + 4 * 8 * 2)


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (ConfigError, {"forward": (1, -2)}, "forward of stage 1 is -2"),
        (ConfigError, {"backward_weight": (1,)}, "backward_weight has 1 values for 2 stages"),
        (ConfigError, {"latency": (1, 2)}, "latency has 2 values"),
        (ConfigError, {"latency": (math.nan,)}, "latency of link 0 is nan"),
        (ConfigError, {"bandwidth": (0,)}, "bandwidth of link 0"),
        (ConfigError, {"forward": ()}, "no stages"),
        (ConfigError, {"overlap": 2}, "overlap"),
    ],
)
def test_costs_that_no_pipeline_has(kind, fields, words):
    usual = {"forward": (1, 1), "backward_input": (1, 1), "backward_weight": (1, 1)}
    with pytest.raises(kind, match=words):
        StageCosts(**{**usual, **fields})


def test_costs_from_forward_and_backward():
    costs = StageCosts.of([1, 2], [2, 4], weight_share=0.25)
    assert costs.backward_input == (1.5, 3)
    assert costs.backward == (2, 4)
    with pytest.raises(ConfigError, match="weight_share"):
        StageCosts.of([1], [1], weight_share=3)


def test_costs_must_match_the_stages():
    with pytest.raises(ScheduleError, match="has 4 stages, the costs describe 2"):
        simulate(build_schedule("zbv", 2, 4), StageCosts.uniform(2))


def test_a_schedule_that_cannot_run_is_refused_with_its_place():
    stuck = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(ScheduleError, match=r"rank 0 waits at action 1 \(0B0\)"):
        simulate(stuck, StageCosts.uniform(2))


def test_critical_path_names_what_to_shorten():
    costs = StageCosts((1, 5, 1), (1, 5, 1), (1, 5, 1))
    path = simulate(build_schedule("1f1b", 3, 8), costs).critical_path
    assert sum(s.duration for s in path if s.action.stage == 1) >= 8 * 15
    assert path[-1].action.stage == 0


def test_large_schedules_stay_quick():
    """64 stages x 1024 microbatches: about a third of a second when the machine is free; the limit only catches a hang."""
    schedule = build_schedule("1f1b", 64, 1024)
    begin = time.process_time()
    run = simulate(schedule, StageCosts.uniform(64))
    assert run.makespan == (1024 + 63) * 3
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("name", schedules())
def test_forward_only_runs_on_every_schedule(name):
    schedule = build_schedule(name, 3, 4).forward_only()
    run = simulate(schedule, StageCosts.uniform(schedule.num_stages))
    assert len(run.timeline.spans) == schedule.num_stages * 4
    assert schedule.is_forward_only

"""A real step beside its prediction, and the reductions of data parallelism."""

from __future__ import annotations

import random

import pytest

from headrace.errors import ConfigError
from headrace.parallel import (
    Action,
    Kind,
    Span,
    StageCosts,
    Timeline,
    build_schedule,
    compare,
    replicate,
    schedules,
    simulate,
)


def uniform(name="1f1b", ranks=4, microbatches=8):
    schedule = build_schedule(name, ranks, microbatches)
    return simulate(schedule, StageCosts.uniform(schedule.num_stages))


def as_measured(simulation, delay=lambda _span: 0.0):
    spans = [Span(s.rank, s.action, s.start, s.end + delay(s)) for s in simulation.timeline.spans]
    return Timeline.of(spans, simulation.schedule.num_ranks)


@pytest.mark.parametrize("name", schedules())
def test_a_step_as_foretold_has_only_its_bubble(name):
    prediction = uniform(name)
    found = compare(prediction, as_measured(prediction))
    assert found.error == pytest.approx(0)
    assert found.imbalance == pytest.approx(0, abs=1e-9)
    assert found.communication == pytest.approx(0, abs=1e-9)
    assert found.jitter == pytest.approx(0, abs=1e-9)
    assert found.fill_drain / found.measured == pytest.approx(prediction.bubble)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"])
def test_each_cause_is_found_where_it_was_put(name):
    prediction = uniform(name)
    n = prediction.schedule.num_stages
    slow = (1.0,) * (n - 1) + (1.6,)
    ones, links = (1.0,) * n, (0.3,) * (n - 1)
    uneven = compare(prediction, as_measured(simulate(prediction.schedule, StageCosts(slow, ones, ones))))
    assert uneven.imbalance > 0
    assert uneven.communication == pytest.approx(0, abs=1e-9)
    far = compare(prediction, as_measured(simulate(prediction.schedule, StageCosts(ones, ones, ones, links))))
    assert far.communication == pytest.approx(far.measured - prediction.makespan)
    assert far.imbalance == pytest.approx(0, abs=1e-9)
    assert far.jitter == pytest.approx(0, abs=1e-9)


def test_parts_add_up_to_the_step():
    rng = random.Random(3)
    prediction = uniform("zb-h1")
    spans, clock = [], [0.0] * 4
    for span in sorted(prediction.timeline.spans, key=lambda s: s.start):
        start = max(clock[span.rank], span.start * 1.1)
        clock[span.rank] = start + span.duration * rng.uniform(1.0, 1.3)
        spans.append(Span(span.rank, span.action, start, clock[span.rank]))
    found = compare(prediction, Timeline.of(spans, 4))
    assert found.busy + found.lost == pytest.approx(found.measured)
    assert found.error > 0
    text = found.explain()
    for word in ("fill and drain bubble", "imbalance", "exposed communication", "jitter", "slowest"):
        assert word in text


def test_a_step_of_another_plan_is_refused():
    prediction = uniform()
    spans = list(prediction.timeline.spans)
    with pytest.raises(ConfigError, match=r"rank 3: 3B7 was not recorded"):
        compare(prediction, Timeline.of(spans[:-1], 4))
    extra = Span(2, Action(2, Kind.F, 9), 50.0, 51.0)
    with pytest.raises(ConfigError, match=r"rank 2: 2F9 was not planned"):
        compare(prediction, Timeline.of([*spans, extra], 4))
    with pytest.raises(ConfigError, match="gather the spans of all ranks"):
        compare(prediction, Timeline.of([s for s in spans if s.rank < 2], 2))


def test_communication_spans_do_not_disturb():
    prediction = uniform()
    send = Span(0, Action(0, Kind.SEND_F, 0), 1.0, 1.2)
    found = compare(prediction, Timeline.of([*prediction.timeline.spans, send], 4))
    assert found.fill_drain / found.measured == pytest.approx(3 / 11)


def test_reductions_hide_behind_the_stages_that_finish_later():
    grid = replicate(uniform("1f1b"), 4, 5.0)
    # 1F1B: rank s ends 2 (its backward) earlier than rank s - 1, so stage s hides 2s of its five seconds.
    assert [r.exposed for r in grid.reductions] == [5, 3, 1, 0]
    assert [r.hidden for r in grid.reductions] == [0, 2, 4, 5]
    assert grid.seconds == 38
    assert grid.exposed == 5
    assert "4 pipeline ranks x 4 replicas = 16 processes" in grid.explain()


def test_reductions_of_one_rank_wait_for_each_other():
    grid = replicate(uniform("interleaved-1f1b", 2, 4), 2, 100.0)
    for rank in (0, 1):
        first, second = sorted((r for r in grid.reductions if r.rank == rank), key=lambda r: r.start)
        assert second.start == first.end


def test_one_replica_reduces_nothing():
    grid = replicate(uniform(), 1, 5.0)
    assert grid.seconds == grid.simulation.makespan
    with pytest.raises(ConfigError, match="data_parallel is 0"):
        replicate(uniform(), 0, 1.0)
    with pytest.raises(ConfigError, match="takes 4 times"):
        replicate(uniform(), 2, [1.0])

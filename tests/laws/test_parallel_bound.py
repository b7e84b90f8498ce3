"""The lower bound never exceeds a simulated step, in more than a thousand random cases; and it is reached."""

from __future__ import annotations

import random

from headrace.parallel import StageCosts, build_schedule, schedules, simulate


def random_case(rng: random.Random):
    name = rng.choice(schedules())
    ranks, microbatches = rng.randint(1, 5), rng.randint(1, 9)
    schedule = build_schedule(name, ranks, microbatches)
    n = schedule.num_stages

    def some(low, high, size):
        return tuple(rng.randint(low, high) for _ in range(size))

    costs = StageCosts(
        some(0, 9, n),
        some(0, 9, n),
        some(0, 9, n),
        some(0, 5, n - 1) if rng.random() < 0.5 else (),
        some(1, 4, n - 1) if rng.random() < 0.3 else (),
        some(0, 9, n - 1),
        overlap=rng.choice([0, 0, 0.5, 1]),
    )
    return schedule, costs


def test_bound_never_above_a_simulated_step():
    rng = random.Random(20)
    reached = 0
    for case in range(1500):
        schedule, costs = random_case(rng)
        simulation = simulate(schedule, costs)
        assert simulation.lower_bound <= simulation.makespan * (1 + 1e-12), (case, schedule.name, costs)
        reached += simulation.makespan == simulation.lower_bound
    assert reached > 100, "a bound that is never reached would say nothing"


def test_bound_of_forwards_only():
    rng = random.Random(21)
    for _ in range(200):
        schedule, costs = random_case(rng)
        simulation = simulate(schedule.forward_only(), costs)
        assert simulation.lower_bound <= simulation.makespan * (1 + 1e-12)


def test_bound_is_tight_for_uniform_1f1b_and_zb_h1():
    for ranks in (2, 4, 6):
        for microbatches in (ranks, 2 * ranks, 5 * ranks):
            for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"):
                simulation = simulate(build_schedule(name, ranks, microbatches), StageCosts.uniform(ranks))
                if name == "zb-h2" and microbatches < 2 * ranks - 1:
                    continue
                assert simulation.gap == 0, (name, ranks, microbatches)
    assert simulate(build_schedule("1f1b", 4, 8), StageCosts.uniform(4)).lower_bound == 33
    assert simulate(build_schedule("zb-h1", 4, 8), StageCosts.uniform(4)).lower_bound == 27


def test_every_start_is_explained_by_the_critical_path():
    """The path is a chain without gaps (but for latency) from time zero to the end of the step."""
    rng = random.Random(22)
    for _ in range(200):
        schedule, costs = random_case(rng)
        costs = StageCosts(costs.forward, costs.backward_input, costs.backward_weight)
        simulation = simulate(schedule, costs)
        path = simulation.critical_path
        assert path[-1].end == simulation.makespan
        assert path[0].start == 0
        assert all(a.end == b.start for a, b in zip(path, path[1:], strict=False))

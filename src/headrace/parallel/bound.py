"""A time that no order can beat: how far a schedule could still be improved.

For each rank: it cannot start before the first microbatch has come down to it; before the first gradient comes back it can
only run as many forwards as its memory allows; then it must do all its work; and if it ends with a full backward, the stages
above have yet to finish. The step also cannot be shorter than the way of one microbatch down and up.
"""

from __future__ import annotations

from itertools import accumulate

from headrace.parallel.costs import StageCosts
from headrace.parallel.memory import peak_in_flight
from headrace.parallel.schedule import Schedule


def lower_bound(schedule: Schedule, costs: StageCosts) -> float:
    """Least makespan of any schedule with the placement, the backward split and the activation peaks of this one."""
    stages, m = range(costs.num_stages), schedule.num_microbatches
    split = schedule.splits_backward
    back = costs.backward_input if split else costs.backward
    place = schedule.stage_to_rank
    hop = [costs.hop(i) if place[i] != place[i + 1] else 0 for i in range(costs.num_stages - 1)]
    # down[s]: earliest start of stage s; first[s]: earliest start of a backward on stage s; up[s]: from its end to the last.
    down = [0, *accumulate(f + h for f, h in zip(costs.forward, hop, strict=False))]
    turn = down[-1] + costs.forward[-1]
    returns = [0, *accumulate(b + h for b, h in zip(reversed(back), reversed(hop), strict=False))]
    first = [turn + r for r in reversed(returns)]
    up = [0, *accumulate(b + h for b, h in zip(costs.backward, hop, strict=False))]
    if schedule.is_forward_only:
        return _forward_bound(schedule, costs, down, turn)
    held = peak_in_flight(schedule).stages
    best = first[0] + back[0] + (costs.backward_weight[0] if split else 0)
    for rank in range(schedule.num_ranks):
        mine = [s for s in stages if place[s] == rank]
        if not mine:
            continue
        head = min(down[s] for s in mine)
        ahead = sum(min(held[s], m) * costs.forward[s] for s in mine)
        idle = max(0, min(first[s] for s in mine) - head - ahead)
        tail = 0 if split else min(up[s] for s in mine)
        best = max(best, head + idle + _work(costs, mine, m) + tail)
    return best


def _work(costs: StageCosts, mine: list[int], m: int) -> float:
    """Seconds of work of a rank, with all that overlapping can hide taken off."""
    forward = m * sum(costs.forward[s] for s in mine)
    backward = m * sum(costs.backward[s] for s in mine)
    return forward + backward - costs.overlap * min(forward, backward)


def _forward_bound(schedule: Schedule, costs: StageCosts, down: list[float], turn: float) -> float:
    """The bound for a schedule of forwards only, as evaluation runs."""
    best = turn
    for rank in range(schedule.num_ranks):
        mine = schedule.stages_of(rank)
        work = schedule.num_microbatches * sum(costs.forward[s] for s in mine)
        best = max(best, min((down[s] for s in mine), default=0) + work)
    return best

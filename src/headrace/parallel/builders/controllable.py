"""V-Half and V-Min: half and a third of the activations of ZB-V, for part of its gain.

One microbatch's passes over a V form a building block: forward down and up, input gradient down and up, with a weight gradient
for each. The block is repeated every six passes, so on no rank may two of its passes fall on the same place modulo six. How
fast each of the four legs travels (`slopes`: passes per rank) sets how long an activation lives: the slopes of V-Min sum to 4,
of V-Half to 6. Activations held: V-Half floor((N+2)/2), V-Min floor((N+4)/3). Bubble: about one half and two thirds of 1F1B.

The blocks give the order of forwards and input gradients; weight gradients then go where a rank would wait, or where the
memory cap asks for one. Source of the idea: Qi et al., 2024 (arXiv 2405.15362).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from headrace.errors import InternalError
from headrace.parallel.action import Action, Kind

PERIOD = 6  # passes of one microbatch on one rank: F, I and W of two chunks

Leg = tuple[int, ...]  # the time of one pass on each rank


@dataclass(frozen=True)
class Block:
    """When the four legs of microbatch 0 run on each rank, in passes, and how many activations (of half a rank) live at once."""

    legs: tuple[Leg, Leg, Leg, Leg]  # F0, F1, I1, I0
    peak: int


def v_half(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Rows of V-Half."""
    return _rows(num_ranks, num_microbatches, (2, 1, 2, 1))


def v_min(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Rows of V-Min."""
    return _rows(num_ranks, num_microbatches, (1, 1, 1, 1))


@lru_cache(maxsize=64)
def building_block(num_ranks: int, slopes: tuple[int, int, int, int]) -> Block:
    """The block without collisions that holds least; among these, the one that waits least."""
    best: tuple[int, int, Block] | None = None
    for waits in product(range(PERIOD), repeat=3):
        legs = _legs(num_ranks, slopes, waits)
        if any(len({leg[rank] % PERIOD for leg in legs}) < 4 for rank in range(num_ranks)):
            continue
        peak = max(_peak(legs, rank) for rank in range(num_ranks))
        if best is None or (peak, sum(waits)) < best[:2]:
            best = (peak, sum(waits), Block(legs, peak))
    if best is None:
        raise InternalError(f"no building block of slopes {slopes} fits {num_ranks} ranks")
    return best[2]


def _legs(num_ranks: int, slopes: tuple[int, int, int, int], waits: tuple[int, ...]) -> tuple[Leg, Leg, Leg, Leg]:
    """The four legs end to end, each starting one pass (and a wait) after the one before has ended."""
    ranks = range(num_ranks)
    down = tuple(slopes[0] * r for r in ranks)
    up = tuple(down[-1] + 1 + waits[0] + slopes[1] * (num_ranks - 1 - r) for r in ranks)
    back = tuple(up[0] + 1 + waits[1] + slopes[2] * r for r in ranks)
    home = tuple(back[-1] + 1 + waits[2] + slopes[3] * (num_ranks - 1 - r) for r in ranks)
    return down, up, back, home


def _peak(legs: tuple[Leg, Leg, Leg, Leg], rank: int) -> int:
    """Activations alive on a rank in the steady state, with the weight gradients in the two free places."""
    down, up, back, home = (leg[rank] for leg in legs)
    free = [place for place in range(PERIOD) if place not in {t % PERIOD for t in (down, up, back, home)}]
    peaks: list[int] = []
    for of_back, of_home in (free, free[::-1]):
        lives = [(down, _after(home, of_home)), (up, _after(back, of_back))]
        alive = [sum((t - f) // PERIOD - (t - w - 1) // PERIOD for f, w in lives) for t in range(PERIOD)]
        peaks.append(max(alive))
    return min(peaks)


def _after(time: int, place: int) -> int:
    """The first time after `time` that falls on `place` modulo the period."""
    return time + 1 + (place - time - 1) % PERIOD


def _rows(num_ranks: int, num_microbatches: int, slopes: tuple[int, int, int, int]) -> list[list[Action]]:
    block = building_block(num_ranks, slopes)
    orders: list[list[Action]] = []
    for rank in range(num_ranks):
        stages = (rank, 2 * num_ranks - 1 - rank)
        passes = ((0, Kind.F, stages[0]), (1, Kind.F, stages[1]), (2, Kind.I, stages[1]), (3, Kind.I, stages[0]))
        timed = [
            (block.legs[leg][rank] + PERIOD * mb, Action(stage, kind, mb))
            for mb in range(num_microbatches)
            for leg, kind, stage in passes
        ]
        orders.append([action for _, action in sorted(timed, key=lambda item: item[0])])
    return _Filler(orders, block.peak).rows()


class _Filler:
    """Puts the weight gradients in: unit passes, all ranks in step.

    At each step a rank runs its next pass if the input is there and the cap allows; else a weight gradient that it owes; else it
    waits.
    """

    def __init__(self, orders: list[list[Action]], cap: int) -> None:
        self.orders = orders
        self.cap = cap
        self.last = 2 * len(orders) - 1
        self.position = [0] * len(orders)
        self.owed: list[list[Action]] = [[] for _ in orders]
        self.held = [0] * len(orders)
        self.done: set[tuple[int, Kind, int | None]] = set()
        self.result: list[list[Action]] = [[] for _ in orders]

    def rows(self) -> list[list[Action]]:
        """Step until every rank has run everything."""
        while any(self.position[r] < len(order) or self.owed[r] for r, order in enumerate(self.orders)):
            chosen = [self.choose(rank) for rank in range(len(self.orders))]
            if not any(chosen):
                raise InternalError(f"a building block cannot be filled under a cap of {self.cap} activations")
            for rank, action in enumerate(chosen):
                if action is not None:
                    self.perform(rank, action)
        return self.result

    def choose(self, rank: int) -> Action | None:
        """What a rank runs at this step."""
        if self.position[rank] < len(self.orders[rank]):
            action = self.orders[rank][self.position[rank]]
            room = action.kind is Kind.I or self.held[rank] < self.cap
            needed = self.input_of(action)
            if room and (needed is None or needed in self.done):
                return action
        return self.owed[rank][0] if self.owed[rank] else None

    def input_of(self, action: Action) -> tuple[int, Kind, int | None] | None:
        """The pass whose result an action needs."""
        if action.kind is Kind.F:
            return (action.stage - 1, Kind.F, action.microbatch) if action.stage else None
        if action.stage == self.last:
            return (action.stage, Kind.F, action.microbatch)
        return (action.stage + 1, Kind.I, action.microbatch)

    def perform(self, rank: int, action: Action) -> None:
        """Take note of a pass that ran."""
        self.result[rank].append(action)
        if action.kind is Kind.W:
            self.owed[rank].pop(0)
            self.held[rank] -= 1
            return
        self.position[rank] += 1
        self.done.add((action.stage, action.kind, action.microbatch))
        if action.kind is Kind.F:
            self.held[rank] += 1
        else:
            self.owed[rank].append(Action(action.stage, Kind.W, action.microbatch))

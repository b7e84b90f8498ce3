"""The decision of `num_workers="auto"`, on made-up times: how often load on the machine makes it wrong."""

from __future__ import annotations

import random
from statistics import median_low

import numpy as np
import pytest

from headrace.steps import Pipeline
from headrace.steps.auto import transport
from headrace.steps.evidence import FACTOR, LARGE, LOOKS, Evidence, Verdict

SEEDS = 1000


class Load:
    """A machine on which other programs come and go, for 1 to 12 measurements.

    While they are there, the memory is one to five times as slow for all, and the processor may be kept from a stretch of work, the
    more likely the longer that is: it takes up to 15 times as long, and waits for up to a tenth of a second.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.left, self.crowded = 0, False

    def transport(self, seconds: float) -> float:
        """What is measured of so many seconds of transport, in processor time."""
        rng = self.rng
        if not self.left:
            self.left, self.crowded = rng.randint(1, 12), rng.random() < 0.5
        self.left -= 1
        return seconds * (1.0 + 0.1 * rng.random() + (4 * rng.random() ** 2 if self.crowded else 0.0))

    def work(self, seconds: float) -> float:
        """What is measured of so many seconds of work."""
        rng, measured = self.rng, self.transport(seconds)
        if self.crowded and rng.random() < min(0.5, seconds / 0.004):
            return measured * (1 + 14 * rng.random()) + 0.1 * rng.random() ** 2
        return measured


def decide(work: float, there: float, back: float, seed: int, *, large: bool) -> Verdict:
    """What a pipeline decides whose items and transport really take so many seconds."""
    load = Load(seed)
    evidence = Evidence(large=large)
    stretch = 1 if large else max(1, round(3e-4 / work))
    items, seconds = 0, 0.0
    while not evidence.enough(items, seconds, 1.0):
        seconds += (took := load.work(work * stretch))
        items += stretch
        evidence.work.append(took / stretch)
        if large and len(evidence.there) < LOOKS:
            evidence.there.append(load.transport(there))
            evidence.back.append(load.transport(back))
    if not large:
        evidence.there.append(min(load.transport(there) for _ in range(3)))
        evidence.back.append(min(load.transport(back) for _ in range(3)))
    return evidence.verdict(1.0)


def rate(work: float, transport: float, *, large: bool) -> float:
    """How often it chooses processes."""
    chosen = [decide(work, transport / 2, transport / 2, seed, large=large).processes for seed in range(SEEDS)]
    return sum(chosen) / SEEDS


@pytest.mark.parametrize("work", [0.0003, 0.002, 0.01])
def test_large_items_whose_transport_costs_more_than_the_work_stay_here(work: float) -> None:
    """Doubling an array of 8 MB takes 1.5 ms and sending it there and back 6 ms."""
    assert rate(work, 4 * work, large=True) <= 0.01
    assert rate(work, 2 * work, large=True) <= 0.01
    assert rate(work, work, large=True) <= 0.02


@pytest.mark.parametrize("work", [0.002, 0.01, 0.1])
def test_large_items_with_much_work_go_out(work: float) -> None:
    assert rate(work, work / 10, large=True) == 1.0
    assert rate(work, work / 5, large=True) >= 0.95


@pytest.mark.parametrize("work", [2e-6, 50e-6])
def test_small_items_are_decided_by_the_middle_of_their_work(work: float) -> None:
    assert rate(work, 2 * work, large=False) <= 0.02
    assert rate(work, work / 20, large=False) == 1.0


def by_the_middle(work: list[float], transport: float) -> bool:
    return median_low(work) > FACTOR * transport


def test_the_middle_of_the_work_would_err_often() -> None:
    wrong = 0
    for seed in range(SEEDS):
        load = Load(seed)
        wrong += by_the_middle([load.work(0.002) for _ in range(LOOKS)], load.transport(0.008))
    assert wrong / SEEDS > 0.05


RECORDED = [  # milliseconds, with four programs at work on two cores: stretches of work, the way there, the way back
    ([309.0, 43.5, 42.4, 22.3], [20.4, 21.6, 20.2, 4.4], [18.3, 4.3, 4.9, 4.4]),
    ([64.1, 26.4, 20.3, 62.6], [18.0, 18.7, 3.5, 21.2], [4.4, 4.3, 3.8, 4.2]),
    ([49.5, 40.9, 19.9, 69.4], [18.7, 25.1, 5.2, 22.5], [4.8, 5.6, 5.6, 6.7]),
    ([35.3, 46.3, 2.0, 140.5], [21.0, 19.7, 4.8, 18.6], [5.1, 4.6, 4.9, 4.6]),
    ([81.4, 1.8, 1.9, 39.4], [16.1, 15.0, 4.0, 15.6], [3.2, 3.7, 2.9, 3.4]),
    ([42.2, 1.7, 1.7, 1.8], [3.5, 3.5, 3.5, 4.7], [3.3, 2.9, 3.7, 3.8]),
]
ROOTS = [  # the same of eight square roots, which take twenty times as long
    ([406.0, 430.3, 399.6], [4.9, 3.7, 3.6], [4.0, 5.3, 3.1]),
    (
        [44.3, 47.6, 50.1, 40.6, 40.8, 41.6, 35.5, 31.6, 31.0, 34.6, 34.1, 35.1],
        [4.5, 4.6, 5.3, 4.1],
        [4.0, 6.3, 5.3, 4.0],
    ),
]


@pytest.mark.parametrize(("milliseconds", "processes"), [*((r, False) for r in RECORDED), *((r, True) for r in ROOTS)])
def test_recorded_times_of_arrays_of_8_megabytes(
    milliseconds: tuple[list[float], list[float], list[float]], processes: bool
) -> None:
    work, there, back = ([each / 1e3 for each in row] for row in milliseconds)
    evidence = Evidence(work, there, back, large=True)
    assert evidence.enough(len(work), sum(work), 1.0)
    assert evidence.verdict(1.0).processes == processes


def test_half_of_the_recorded_times_mislead_the_middle() -> None:
    assert sum(by_the_middle(work, min(there) + min(back)) for work, there, back in RECORDED) >= 3


def test_work_that_grows_is_believed_when_sending_has_not_become_as_dear() -> None:
    evidence = Evidence(work=[0.001] * 8, there=[0.002], back=[0.002], large=True)
    assert not evidence.verdict(1.0).processes
    assert evidence.reversed_by(0.03, evidence.transport(1.0))
    evidence.there.append(0.008)
    evidence.back.append(0.006)
    assert not evidence.reversed_by(0.03, evidence.transport(1.0, latest=True))
    assert evidence.transport(1.0) == 0.004
    evidence.reason = "the items cannot be pickled"
    assert not evidence.reversed_by(1e9, 0.0) and not evidence.verdict(1.0).processes


def test_what_is_large_is_seen_in_what_is_sent() -> None:
    assert transport([np.zeros(1 << 18)])[1] > LARGE
    assert transport([{"deep": [np.zeros(1 << 18)[:]]}])[1] > LARGE
    assert transport([{"text": "x" * 100}] * 16)[1] < LARGE


class Unsendable:
    def __reduce__(self) -> str:
        raise TypeError("it stays")


def test_an_output_that_cannot_be_pickled_is_the_reason_to_stay() -> None:
    def wrap(x: int) -> Unsendable:
        return Unsendable()

    pipeline = Pipeline([wrap])
    assert len(list(pipeline.map(range(3000)))) == 3000
    assert "in this process: the items or their outputs cannot be pickled (it stays)" in pipeline.explain()

"""Law: the mixture is exact at every prefix."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from curriculum_data import Numbers, mixtures, weights
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.work import StaticMixtureWorkSource
from headrace.work.interleave import Interleave

ANYWHERE = st.one_of(st.just(0), st.integers(0, 10**5), st.integers(0, 10**9))


def errors(sequence: Interleave, start: int, number: int) -> NDArray[np.float64]:
    """Count minus share x n for each component and each prefix from `start` to `start + number`."""
    k, q = len(sequence.names), sequence.denominator
    order = sequence.order(start, start + number)
    ahead = [
        float(Fraction(c * q - p * start, q)) for c, p in zip(sequence.counts(start), sequence.numerators, strict=True)
    ]
    seen = np.zeros((number + 1, k))
    np.cumsum(order[:, None] == np.arange(k), axis=0, out=seen[1:])
    return np.array(ahead) + seen - np.arange(number + 1)[:, None] * np.array([p / q for p in sequence.numerators])


@settings(max_examples=60, deadline=None)
@given(mixtures(8), ANYWHERE)
def test_no_component_is_a_sample_ahead_or_behind(mixture: dict[str, float], start: int) -> None:
    assert np.abs(errors(Interleave(mixture), start, 2000)).max() < 1


@settings(max_examples=15, deadline=None)
@given(st.lists(weights, min_size=9, max_size=40), ANYWHERE)
def test_nor_among_many(many: list[float], start: int) -> None:
    mixture = {f"n{i:02}": w for i, w in enumerate(many)}
    assert np.abs(errors(Interleave(mixture), start, 9000)).max() < 1


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=9, max_size=40))
@example([1.0] * 8 + [0.5])
def test_many_of_like_weight_keep_a_margin(many: list[float]) -> None:
    mixture = {f"n{i:02}": w for i, w in enumerate(many)}
    bound = 1 - 1 / (2 * len(many) - 2)
    assert np.abs(errors(Interleave(mixture), 0, 9000)).max() <= bound + 1e-6


@settings(deadline=None)
@given(st.floats(1e-9, 1.0), st.floats(1e-9, 1.0), ANYWHERE, st.integers(1, 500))
def test_two_components_are_within_one_in_any_window(one: float, other: float, start: int, window: int) -> None:
    off = errors(Interleave({"a": one, "b": other}), start, 1500)
    assert np.abs(off).max() <= 0.5 + 1e-6
    assert np.abs(off[window:] - off[:-window]).max() <= 1 + 1e-6


@settings(max_examples=30, deadline=None)
@given(mixtures(12), ANYWHERE, st.integers(1, 1500))
def test_any_window_is_within_two(mixture: dict[str, float], start: int, window: int) -> None:
    off = errors(Interleave(mixture), start, 2000)
    assert np.abs(off[window:] - off[:-window]).max() < 2


def orders_within_one(parts: tuple[int, ...], length: int) -> Iterator[list[int]]:
    """Every order of `length` samples in which each window, of any length, is within one of the shares."""
    whole, order = sum(parts), [-1]
    while order:
        order[-1] += 1
        if order[-1] == len(parts):
            order.pop()
            continue
        seen = [0] * len(parts)
        for number, component in enumerate(reversed(order), 1):
            seen[component] += 1
            if any(abs(n * whole - p * number) > whole for n, p in zip(seen, parts, strict=True)):
                break
        else:
            if len(order) == length:
                yield order
            else:
                order.append(-1)


def test_no_order_of_three_components_has_every_window_within_one() -> None:
    assert next(orders_within_one((5, 4, 2), 9))
    assert not list(orders_within_one((5, 4, 2), 10))


@settings(max_examples=30, deadline=None)
@given(mixtures(12))
def test_counts_agree_with_the_weights_as_written(mixture: dict[str, float]) -> None:
    total = sum(mixture.values())
    counts = np.zeros(len(mixture))
    sequence = Interleave(mixture)
    assert list(sequence.names) == sorted(mixture)
    for number, component in enumerate(sequence.order(0, 1000).tolist(), 1):
        counts[component] += 1
        wanted = np.array([mixture[name] / total * number for name in sequence.names])
        assert np.all(np.abs(counts - wanted) < 1)


@settings(max_examples=25, deadline=None)
@given(mixtures(6), st.sampled_from([10, 64, 1000]))
def test_chunks_hold_the_mixture(mixture: dict[str, float], chunk_size: int) -> None:
    datasets = [Numbers(name, [3, 4]) for name in mixture]
    source = StaticMixtureWorkSource(datasets, mixture, chunk_size=chunk_size, exhausted_policy="repeat")
    shares = source.mixture.normalized_for(sorted(mixture))
    lane = source.lane(0, 1)
    seen = np.zeros(len(mixture))
    for number in range(1, 6):
        samples = lane.draw()
        assert samples is not None and len(samples) == chunk_size
        own = np.bincount(samples.ids[:, 3], minlength=len(mixture))
        seen += own
        for name, component in source.component_ids().items():
            assert abs(seen[component] - shares[name] * number * chunk_size) < 1
            assert abs(own[component] - shares[name] * chunk_size) < 2


@pytest.mark.parametrize("k", [2, 5, 30])
def test_components_are_spread_evenly(k: int) -> None:
    sequence = Interleave({f"n{i:02}": 1.0 for i in range(k)})
    order = sequence.order(0, 50 * k)
    for component in range(k):
        gaps = np.diff(np.flatnonzero(order == component))
        assert gaps.min() >= 1 and gaps.max() <= 2 * k

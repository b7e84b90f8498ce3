"""Randomness by position: bijections, ranges, and values that may never change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core import rng

SIZES = st.one_of(st.integers(1, 300), st.integers(1, 5000))


# Known answers: a change here would reorder every run ever made ------------------------------------------


def test_known_keys() -> None:
    assert rng.key(0) == 13267204053203356524
    assert rng.key(42, "shards", "code") == 2926161425951029644
    assert rng.key(-1, b"x", 7) == 6458212337603779705


def test_known_bits() -> None:
    assert rng.bits(1, np.arange(4)).tolist() == [
        5200430547392495227,
        10775924603602694841,
        14867996899188920598,
        5523964910671008776,
    ]
    far = rng.bits(rng.key(42, "a"), [10**12, 2**63 - 1])
    assert far.tolist() == [6109481280670302636, 15265693285485771930]


def test_known_below() -> None:
    assert rng.below(9, np.arange(8), 1000).tolist() == [151, 471, 279, 719, 490, 970, 60, 766]
    assert rng.below(9, np.arange(3), 10**15).tolist() == [151976601862815, 471214840428291, 279770700806058]


def test_known_permutations() -> None:
    assert rng.permute(5, 10, np.arange(10)).tolist() == [5, 2, 0, 7, 6, 1, 3, 8, 9, 4]
    assert rng.permute(5, 20, np.arange(6)).tolist() == [11, 2, 16, 3, 0, 15]
    assert rng.permute(5, 10**12, [0, 1, 10**12 - 1]).tolist() == [591625346524, 49615578226, 529149810735]
    assert rng.permute(5, 3 * 10**17, [0, 12345678901234567]).tolist() == [169924813948545043, 176672627958439106]
    assert rng.shuffled(5, 12).tolist() == [2, 5, 1, 6, 9, 0, 11, 4, 3, 7, 8, 10]


# Keys and bits -------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.one_of(st.text(), st.integers(), st.binary()), max_size=4), st.lists(st.text(), max_size=4))
def test_different_names_give_different_keys(one: list[str], other: list[str]) -> None:
    assert (rng.key(0, *one) == rng.key(0, *other)) == (one == other)


def test_a_name_cannot_imitate_two() -> None:
    assert (
        len({rng.key(0, "a", "b"), rng.key(0, "ab"), rng.key(0, "a1:b"), rng.key(0, "as1:b"), rng.key(0, b"ab")}) == 5
    )
    assert rng.key(1) != rng.key(0, 1) != rng.key(0, "1")


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20))
def test_bits_depend_on_nothing_but_key_and_position(key: int, positions: list[int]) -> None:
    together = rng.bits(key, np.array(positions))
    assert together.tolist() == [int(rng.bits(key, p)) for p in positions]
    assert rng.bits(np.full(len(positions), key, np.uint64), positions).tolist() == together.tolist()


def test_bits_look_random() -> None:
    words = rng.bits(np.arange(64, dtype=np.uint64)[:, None], np.arange(1024)[None, :])
    assert len(np.unique(words)) == words.size
    ones = np.unpackbits(words.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 0.001
    neighbours = np.bitwise_xor(words[:, 1:], words[:, :-1])
    assert abs(np.unpackbits(neighbours.copy().view(np.uint8)).mean() - 0.5) < 0.001


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 2**63 - 1))
def test_below_is_below(key: int, n: int) -> None:
    values = rng.below(key, np.arange(50), n)
    expected = [(int(word) * n) >> 64 for word in rng.bits(key, np.arange(50))]
    assert values.tolist() == expected
    assert values.min() >= 0 and values.max() < n


def test_below_is_even() -> None:
    seen = np.bincount(rng.below(3, np.arange(100_000), 10), minlength=10)
    assert seen.min() > 9_600 and seen.max() < 10_400


# Permutations --------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), SIZES)
def test_permute_is_a_bijection_with_an_inverse(key: int, n: int) -> None:
    image = rng.permute(key, n, np.arange(n))
    assert np.array_equal(np.sort(image), np.arange(n))
    assert np.array_equal(rng.unpermute(key, n, image), np.arange(n))


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 2**62), st.data())
def test_permute_goes_back_at_any_size(key: int, n: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=30, unique=True)))
    image = rng.permute(key, n, positions)
    assert image.min() >= 0 and image.max() < n
    assert len(np.unique(image)) == len(positions)
    assert np.array_equal(rng.unpermute(key, n, image), positions)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 500)), min_size=1, max_size=8))
def test_many_permutations_in_one_call(pairs: list[tuple[int, int]]) -> None:
    keys = np.concatenate([np.full(n, k, np.uint64) for k, n in pairs])
    sizes = np.concatenate([np.full(n, n) for _, n in pairs])
    positions = np.concatenate([np.arange(n) for _, n in pairs])
    alone = np.concatenate([rng.permute(k, n, np.arange(n)) for k, n in pairs])
    assert np.array_equal(rng.permute(keys, sizes, positions), alone)


def test_shapes_are_kept() -> None:
    assert rng.permute(1, 10, 3).shape == ()
    assert rng.permute(1, 10, np.arange(6).reshape(2, 3)).shape == (2, 3)
    assert rng.permute(1, 10, np.empty(0, np.int64)).shape == (0,)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_small_permutations_are_all_reached_alike(n: int) -> None:
    keys = rng.bits(5, np.arange(24_000))[:, None]
    images = rng.permute(keys, n, np.tile(np.arange(n), (24_000, 1)))
    _, seen = np.unique(images @ (n ** np.arange(n)), return_counts=True)
    expected = 24_000 / len(seen)
    assert len(seen) == [0, 1, 2, 6, 24][n]
    assert np.all(np.abs(seen - expected) < 5 * expected**0.5)


@pytest.mark.parametrize("n", [1000, 10**12])
def test_a_permutation_mixes(n: int) -> None:
    positions = np.arange(1000)
    image = rng.permute(11, n, positions)
    assert abs(np.corrcoef(positions, image)[0, 1]) < 0.15
    assert abs(image.mean() / n - 0.5) < 0.05


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 300))
def test_shuffled_is_a_permutation(key: int, n: int) -> None:
    assert sorted(rng.shuffled(key, n).tolist()) == list(range(n))

"""The mixture sequence and its parts."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CurriculumError
from headrace.work import MixtureSpec
from headrace.work.beatty import Beatty, floor_line
from headrace.work.deadlines import earliest_deadline_first
from headrace.work.interleave import Interleave
from headrace.work.mixture import FINEST, exact_shares
from headrace.work.tree import best_tree

# Shares --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ({"a": 0.25, "b": 0.75}, ({"a": 1, "b": 3}, 4)),
        ({"b": 1, "a": 1, "c": 1}, ({"a": 1, "b": 1, "c": 1}, 3)),
        ({"a": 0.1 + 0.2, "b": 0.7}, ({"a": 3, "b": 7}, 10)),
        ({"a": 0, "b": 5.0}, ({"b": 1}, 1)),
        ({"a": 1e-3, "b": 0.999}, ({"a": 1, "b": 999}, 1000)),
        ({"a": 20, "b": 60}, ({"a": 1, "b": 3}, 4)),
    ],
)
def test_shares_are_the_fractions_that_were_meant(
    weights: dict[str, float], shares: tuple[dict[str, int], int]
) -> None:
    assert exact_shares(weights) == shares


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=3), st.floats(1e-12, 1e6), min_size=1, max_size=12))
def test_shares_are_close_and_complete(weights: dict[str, float]) -> None:
    numerators, q = exact_shares(weights)
    assert sum(numerators.values()) == q <= FINEST
    assert list(numerators) == sorted(weights)
    total = sum(map(Fraction, weights.values()))
    for name, p in numerators.items():
        assert p >= 1
        assert abs(Fraction(p, q) - Fraction(weights[name]) / total) <= Fraction(len(weights) + 1, FINEST)


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "1", None, True])
def test_bad_weights_are_refused_and_printed(bad: object) -> None:
    with pytest.raises(CurriculumError, match=r"'web'.*weights: \{'code': 0.5, 'web': "):
        MixtureSpec({"code": 0.5, "web": bad})  # type: ignore[dict-item]


def test_all_zero_and_empty_weights_are_refused() -> None:
    with pytest.raises(CurriculumError, match=r"at least one positive weight, found \{'a': 0.0, 'b': 0.0\}"):
        MixtureSpec({"a": 0, "b": 0})
    with pytest.raises(CurriculumError, match="at least one positive weight"):
        MixtureSpec({})


def test_a_mixture_is_checked_against_names() -> None:
    spec = MixtureSpec({"a": 1, "b": 3})
    assert spec.normalized_for(["b", "a"]) == {"b": 0.75, "a": 0.25}
    with pytest.raises(CurriculumError, match=r"no weight for 'c'; no dataset named 'b'"):
        spec.validate_for(["a", "c"])


# Closed forms --------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(-(2**90), 2**90), st.integers(0, 2**90), st.integers(1, 2**61), st.integers(0, 50))
def test_floor_line_is_exact(a: int, b: int, c: int, length: int) -> None:
    if abs((a + b * max(length, 1)) // c) < 2**60 and abs(a // c) < 2**60:
        assert floor_line(a, b, c, length).tolist() == [(a + b * i) // c for i in range(length)]


@settings(deadline=None)
@given(
    st.integers(1, FINEST), st.integers(1, FINEST), st.integers(0, 2**50), st.lists(st.integers(0, 2**40), max_size=20)
)
def test_a_split_counts_and_finds(p: int, q: int, start: int, steps: list[int]) -> None:
    p, q = min(p, q), max(p, q)
    if p == q:
        return
    for part in (Beatty.split(p, q), Beatty.split(p, q).rest):
        assert abs(Fraction(part.count(start)) - Fraction(part.p * start, part.q)) <= Fraction(1, 2)
        assert part.count(part.select(start)) == start
        assert part.count(part.select(start) + 1) == start + 1
        expected = [part.count(start + step) - part.count(start) for step in steps]
        assert part.counts_at(start, np.array(steps, np.int64)).tolist() == expected
        assert part.counts(start, 9).tolist() == [part.count(start + i) - part.count(start) for i in range(10)]
    assert Beatty.split(p, q).count(start) + Beatty.split(p, q).rest.count(start) == start


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=6), st.booleans())
def test_a_tree_keeps_every_load_below_one(weights: list[int], exact: bool) -> None:
    tree = best_tree(weights, exact)
    if tree is None:
        assert len(weights) > 4 or not exact
        return
    leaves: list[int] = []

    def check(node: object, above: list[int], root: bool) -> int:
        if isinstance(node, int):
            leaves.append(node)
            assert sum(weights[node] / w for w in above) < 1
            return weights[node]
        total = sum(weights[leaf] for leaf in flat(node))
        return sum(check(side, above if root and exact else [*above, total], False) for side in node)  # type: ignore[union-attr]

    def flat(node: object) -> list[int]:
        return [node] if isinstance(node, int) else [leaf for side in node for leaf in flat(side)]  # type: ignore[union-attr]

    check(tree, [], True)
    assert sorted(leaves) == list(range(len(weights)))


# Deadlines -----------------------------------------------------------------------------------------------


def by_hand(releases: list[int]) -> list[int]:
    """Each sample, in order, takes the first free place from its release on."""
    taken: set[int] = set()
    out = []
    for place in releases:
        while place in taken:
            place += 1
        taken.add(place)
        out.append(place)
    return out


@settings(deadline=None)
@given(st.sampled_from([1, 2, 8, 64, 128, 256]), st.integers(1, 3), st.data())
def test_earliest_deadline_first_is_what_a_walk_would_do(length: int, blocks: int, data: st.DataObject) -> None:
    expected: list[int] = []
    releases: list[int] = []
    for block in range(blocks):
        places = data.draw(st.permutations(range(length)))
        early = data.draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))
        own = [block * length + max(0, place - lead) for place, lead in zip(places, early, strict=True)]
        walked = by_hand(own)
        if max(walked) >= (block + 1) * length:
            own = walked = [block * length + place for place in places]
        releases += own
        expected += walked
    assert earliest_deadline_first(np.array(releases), length).tolist() == expected


# The sequence --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "letters"),
    [
        ({"a": 0.25, "b": 0.75}, "babbbabbbabb"),
        ({"a": 0.5, "b": 0.3, "c": 0.2}, "abacabacababacabacab"),
        (dict(zip("abcdefghij", [5, 4, 3, 3, 2, 2, 2, 1, 1, 1], strict=True)), "abcdeabfgacdbhaijcbadefg"),
    ],
)
def test_known_sequences(weights: dict[str, float], letters: str) -> None:
    order = Interleave(weights).order(0, len(letters))
    assert "".join("abcdefghij"[c] for c in order) == letters


def test_names_decide_not_listing() -> None:
    one = Interleave({"a": 0.2, "b": 0.3, "c": 0.5})
    other = Interleave({"c": 0.5, "a": 0.2, "b": 0.3})
    assert np.array_equal(one.order(0, 1000), other.order(0, 1000))
    assert one.names == other.names == ("a", "b", "c")


@pytest.mark.parametrize("k", [1, 2, 5, 12, 40])
def test_the_sequence_is_a_function_of_position(k: int) -> None:
    sequence = Interleave({f"n{i:02}": 1 + (i * 7) % 5 + i / 100 for i in range(k)})
    whole = sequence.order(0, 20_000)
    fresh = pickle.loads(pickle.dumps(Interleave({f"n{i:02}": 1 + (i * 7) % 5 + i / 100 for i in range(k)})))
    for start, stop in [(0, 0), (5, 6), (4095, 4097), (8192, 12288), (777, 19_999)]:
        assert np.array_equal(fresh.order(start, stop), whole[start:stop])
        assert fresh.counts(stop) == np.bincount(whole[:stop], minlength=k).tolist()


@pytest.mark.parametrize("k", [2, 4, 7, 20])
def test_select_finds_each_sample(k: int) -> None:
    sequence = Interleave({f"n{i:02}": 1 + i for i in range(k)})
    order = sequence.order(0, 9000)
    for component in range(k):
        places = np.flatnonzero(order == component)
        for item in {0, 1, len(places) // 2, len(places) - 1}:
            assert sequence.select(component, item) == places[item]
            assert sequence.earliest(component, item) <= places[item] < sequence.latest(component, item + 1)


def test_far_away_costs_no_walk() -> None:
    sequence = Interleave({f"n{i:02}": 1 + i / 7 for i in range(30)})
    far = 10**15 + 12345
    counts = np.array(sequence.counts(far + 5000)) - np.array(sequence.counts(far))
    assert counts.tolist() == np.bincount(sequence.order(far, far + 5000), minlength=30).tolist()

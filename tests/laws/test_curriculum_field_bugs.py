"""Faults that other loaders had with mixtures; the identifiers are those of the field-bug list."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from curriculum_data import Numbers, drawn, whole

from headrace.errors import CurriculumError
from headrace.work import StaticMixtureWorkSource

# B043: the stop rule of a mixture is what its name says ----------------------------------------------------

THREE = [Numbers("a", [3]), Numbers("b", [4]), Numbers("c", [3])]


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("shuffle", [None, "global"])
@pytest.mark.parametrize(
    ("mixture", "rule", "counts"),
    [
        ((1, 1, 1), {"exhausted_policy": "stop"}, (3, 4, 3)),
        ((1, 1, 1), {"exhausted_policy": "redistribute"}, (3, 4, 3)),
        ((1, 1, 1), {}, (4, 4, 4)),
        ((1, 1, 1), {"stop_after_passes": 3}, (12, 12, 12)),
        ((1, 2, 1), {"exhausted_policy": "stop"}, (3, 4, 2)),
        ((1, 2, 1), {"exhausted_policy": "redistribute"}, (3, 4, 3)),
        ((1, 2, 1), {}, (3, 6, 3)),
        ((1, 2, 1), {"max_repeats": 1}, (5, 8, 4)),
    ],
    ids=str,
)
def test_b043_each_rule_gives_its_documented_multiset(
    mixture: tuple[int, int, int], rule: dict[str, Any], counts: tuple[int, int, int], shuffle: Any, lanes: int
) -> None:
    source = StaticMixtureWorkSource(
        THREE, dict(zip("abc", mixture, strict=True)), chunk_size=2, shuffle_block_size=shuffle, **rule
    )
    ids = np.concatenate([drawn(source.lane(lane, lanes)) for lane in range(lanes)])
    found = Counter(map(tuple, ids[:, [0, 2]].tolist()))
    for number, (dataset, count) in enumerate(zip(THREE, counts, strict=True)):
        size = int(dataset.counts().sum())
        own = [found[number, row] for row in range(size)]
        assert sum(own) == count and max(own) - min(own) <= 1
        assert source.statistics().components[number].passes == count / size


# B045: extreme weights never run past the end of a source --------------------------------------------------


@pytest.mark.parametrize("rare", [1e-3, 1e-9])
@pytest.mark.parametrize("size", [1, 10**6])
def test_b045_extreme_weights(rare: float, size: int) -> None:
    source = StaticMixtureWorkSource(
        [Numbers("rare", [size]), Numbers("often", [size])], {"rare": rare, "often": 1 - rare}, stop_after_passes=3
    )
    statistics = source.statistics()
    assert [c.name for c in statistics.components] == ["often", "rare"]
    assert statistics.components[1].passes == 3.0
    assert len(source) == pytest.approx(3 * size / rare, rel=1e-6)
    lane = source.lane(0, 1)
    end = {**lane.state(), "draws": (len(source) - 1) // 16384}
    lane.load(end)
    last = lane.draw()
    assert last is not None and len(last) == (len(source) - 1) % 16384 + 1 and lane.draw() is None
    assert last.ids[:, 2].max() < size


def test_b045_sources_too_rare_to_appear_are_no_error() -> None:
    source = StaticMixtureWorkSource(
        [Numbers("rare", [5]), Numbers("often", [100])], {"rare": 1e-9, "often": 1}, exhausted_policy="stop"
    )
    assert np.bincount(whole(source)[:, 0], minlength=2).tolist() == [100, 0]
    assert source.statistics().components[1].samples == 0


# B046: weights count samples, and the share reached is reported ---------------------------------------------


@pytest.mark.parametrize("mixture", [(1, 1), (0.9, 0.1)])
def test_b046_shares_are_reported_and_bounded_at_every_prefix(mixture: tuple[float, float]) -> None:
    source = StaticMixtureWorkSource(
        [Numbers("short", [10]), Numbers("long", [30])], dict(zip(("short", "long"), mixture, strict=True))
    )
    stream = whole(source)
    for samples in range(1, len(stream) + 1):
        for component in source.statistics(samples).components:
            own = int((stream[:samples, 0] == source.dataset_ids[component.name]).sum())
            assert component.samples == own and component.share == own / samples
            assert abs(own - component.weight * samples) < 1


def test_b046_there_is_no_default_mixture_to_guess_at() -> None:
    with pytest.raises(TypeError, match="mixture"):
        StaticMixtureWorkSource([Numbers("a", [10]), Numbers("b", [30])])  # type: ignore[call-arg]


# B047: zero, all-zero, negative or non-normalised weights ---------------------------------------------------

RULES: list[dict[str, Any]] = [
    {"exhausted_policy": "stop"},
    {"exhausted_policy": "redistribute"},
    {"exhausted_policy": "repeat"},
    {"max_repeats": 1},
    {},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("mixture", [(0, 0), (-1, 2), (float("nan"), 1), (float("inf"), 1)])
def test_b047_bad_lists_are_refused_and_printed(mixture: tuple[float, float], rule: dict[str, Any]) -> None:
    with pytest.raises(CurriculumError, match=r"\{'a': .*, 'b': .*\}"):
        StaticMixtureWorkSource(THREE[:2], dict(zip("ab", mixture, strict=True)), **rule)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_b047_a_source_of_weight_zero_is_off(rule: dict[str, Any]) -> None:
    source = StaticMixtureWorkSource(THREE[:2], {"a": 1, "b": 0}, **rule)
    stream = drawn(source.lane(0, 1), most=3)
    assert set(stream[:, 0].tolist()) == {0}
    if rule != {"exhausted_policy": "repeat"}:
        assert len(source) == len(stream) == (6 if "max_repeats" in rule else 3)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_b047_weights_need_not_add_up_to_one(rule: dict[str, Any]) -> None:
    quarter = StaticMixtureWorkSource(THREE[:2], {"a": 0.25, "b": 0.25}, **rule).lane(0, 1)
    whole_ = StaticMixtureWorkSource(THREE[:2], {"a": 7, "b": 7}, **rule).lane(0, 1)
    assert np.array_equal(drawn(quarter, most=2), drawn(whole_, most=2))


# B048: weights changed mid-run ------------------------------------------------------------------------------


def blend(a: float, b: float, **settings: Any) -> StaticMixtureWorkSource:
    datasets = [Numbers("a", [40, 60]), Numbers("b", [70, 30])]
    return StaticMixtureWorkSource(datasets, {"a": a, "b": b}, chunk_size=10, **settings)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("rule", [{"exhausted_policy": "stop"}, {"exhausted_policy": "redistribute"}, {}], ids=str)
def test_b048_each_source_keeps_its_own_position(rule: dict[str, Any], lanes: int) -> None:
    rounds = 2
    old = [blend(1, 1, **rule).lane(lane, lanes) for lane in range(lanes)]
    before = [drawn(lane, most=rounds) for lane in old]
    after = []
    for number, lane in enumerate(old):
        new = blend(2, 1, **rule).lane(number, lanes)
        new.load(new.continued(lane.state(), rounds, {}))
        after.append(new)
    first = np.concatenate([drawn(lane, most=1) for lane in after])
    assert np.all(np.abs(np.bincount(first[:, 0]) - np.array([20, 10]) * lanes / 3) < 1)
    rest = np.concatenate([first, *(drawn(lane) for lane in after)])
    for number in (0, 1):
        past = [tuple(r) for ids in before for r in ids[ids[:, 0] == number, 1:3].tolist()]
        coming = [tuple(r) for r in rest[rest[:, 0] == number, 1:3].tolist()]
        seen = Counter(past + coming)
        if rule:
            assert set(seen.values()) == {1}
        else:
            assert len(seen) == 100 and max(seen.values()) - min(seen.values()) <= 1
    if rule.get("exhausted_policy") == "redistribute":
        assert sum(map(len, before)) + len(rest) == 200


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_b048_a_change_is_crossed_by_a_resume_anywhere(stop: int) -> None:
    change = 3

    def changed(draws: int) -> Any:
        lane = blend(1, 1).lane(0, 1)
        drawn(lane, most=draws)
        new = blend(2, 1).lane(0, 1)
        new.load(new.continued(lane.state(), change, {}))
        return new

    expected = drawn(changed(change))
    lane = changed(min(stop, change))
    drawn(lane, most=max(0, stop - change))
    again = blend(2, 1).lane(0, 1)
    again.load(lane.state())
    rest = drawn(again)
    assert np.array_equal(rest[10 * max(0, change - stop) :], expected[10 * max(0, stop - change) :])
    assert again.state()["eras"] == [[0, {"a": 1.0, "b": 1.0}], [change, {"a": 2.0, "b": 1.0}]]


# B049: a source too small for lanes, workers or batches -----------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 21])
def test_b049_small_sources_on_many_lanes(size: int) -> None:
    small = Numbers("small", [size])
    once = StaticMixtureWorkSource([small], {"small": 1}, chunk_size=2, exhausted_policy="stop")
    ids = np.concatenate([drawn(once.lane(lane, 64)) for lane in range(64)])
    assert sorted(ids[:, 2].tolist()) == list(range(size))
    mixed = StaticMixtureWorkSource([small, Numbers("large", [300])], {"small": 1, "large": 2}, chunk_size=4)
    ids = np.concatenate([drawn(mixed.lane(lane, 64)) for lane in range(64)])
    seen = np.bincount(ids[ids[:, 0] == mixed.dataset_ids["small"], 2])
    assert len(seen) == size and seen.max() - seen.min() <= 1
    assert mixed.statistics().components[1].passes == 150 / size


# B050: no partial chunk but the last ------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [{"exhausted_policy": "stop"}, {"exhausted_policy": "redistribute"}, {}], ids=str)
def test_b050_only_the_last_chunk_is_short(rule: dict[str, Any]) -> None:
    source = blend(3, 1, **rule)
    lane = source.lane(0, 1)
    lengths = [len(samples) for samples in iter(lane.draw, None)]
    assert lengths[:-1] == [10] * (len(lengths) - 1) and 0 < lengths[-1] <= 10
    assert sum(lengths) == len(source)

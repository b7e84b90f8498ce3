"""StaticMixtureWorkSource: policies, lengths, errors, and the API with one object per sample."""

from __future__ import annotations

import copy
import math
import pickle
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from work_data import Numbers, by_name, everything, stream

from headrace.errors import CheckpointError, CheckpointMismatch, ConfigError, CurriculumError, UnknownOptionError
from headrace.work import MixtureSpec, StaticMixtureWorkSource

TWO = [Numbers("code", [60, 60]), Numbers("web", [40, 40, 40])]
WEIGHTS = {"code": 0.75, "web": 0.25}


def two(**settings: Any) -> StaticMixtureWorkSource:
    return StaticMixtureWorkSource(TWO, MixtureSpec(WEIGHTS), **settings)


# Policies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 16, 50, 16384])
@pytest.mark.parametrize(
    ("settings", "code", "web"),
    [
        ({}, 360, 120),
        ({"stop_after_passes": 2}, 720, 240),
        ({"exhausted_policy": "stop"}, 120, 40),
        ({"exhausted_policy": "redistribute"}, 120, 120),
        ({"max_repeats": 0}, 120, 40),
        ({"max_repeats": 1}, 240, 80),
        ({"exhausted_policy": "repeat", "max_repeats": {"code": 2}}, 360, 120),
        ({"exhausted_policy": {"code": "repeat", "web": "stop"}}, 362, 120),
        ({"exhausted_policy": {"code": "redistribute", "web": "stop"}}, 120, 120),
    ],
    ids=str,
)
def test_how_much_each_policy_gives(settings: dict[str, Any], code: int, web: int, chunk_size: int) -> None:
    source = two(chunk_size=chunk_size, **settings)
    rows = by_name(source, stream(source))
    assert (len(rows["code"]), len(rows["web"])) == (code, web)
    assert len(source) == source.total_samples == code + web
    for dataset in TWO:
        every = [(int(s), r) for s, n in zip(dataset.ids(), dataset.counts(), strict=True) for r in range(n)]
        seen = Counter(rows[dataset.name])
        passes, rest = divmod(len(rows[dataset.name]), len(every))
        assert set(seen.values()) <= {passes, passes + 1}
        assert sum(count == passes + 1 for count in seen.values()) == rest


def test_endless_streams_say_so() -> None:
    for source in (two(exhausted_policy="repeat"), two(stop_after_passes=None)):
        assert source.total_samples == math.inf
        with pytest.raises(TypeError, match="never ends"):
            len(source)
        assert source
        assert len(everything(source.lane(0, 1), most=3)) == 3 * 16384


def test_leaving_is_announced() -> None:
    source = two(exhausted_policy="redistribute", chunk_size=20)
    assert source.continues_after_exhaustion() == {"code", "web"}
    lane = source.lane(0, 1)
    announced = []
    while (samples := lane.draw()) is not None:
        announced.append(samples.exhausted)
    assert announced[0] == frozenset() and announced[-2] == {"code"}
    assert announced == sorted(announced, key=len)


def test_default_chunk_size_works_for_tiny_data() -> None:
    source = StaticMixtureWorkSource([Numbers("a", [1]), Numbers("b", [0, 2])], {"a": 0.9, "b": 0.1})
    rows = by_name(source, stream(source))
    assert Counter(rows["b"]) == {(1, 0): 1, (1, 1): 1}
    assert rows["a"] == [(0, 0)] * 18


# Settings that cannot work -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_size": 0}, "chunk_size must be at least 1, found 0"),
        ({"chunk_size": 1.5}, "chunk_size must be a whole number, found 1.5"),
        ({"seed": "x"}, "seed must be a whole number, found 'x'"),
        ({"lane_assignment": "random"}, "lane_assignment must be 'permute' or 'modulo', found 'random'"),
        (
            {"exhausted_policy": "loop"},
            "exhausted_policy of 'code' must be one of stop, repeat, redistribute, found 'loop'",
        ),
        ({"max_repeats": -1}, "max_repeats of 'code' .None is no limit. must be at least 0"),
        ({"reshuffle_on_repeat": "no"}, "reshuffle_on_repeat of 'code' must be True or False"),
        ({"stop_after_passes": 0}, "stop_after_passes .None is no limit. must be at least 1"),
        ({"stop_after_passes": 1, "max_repeats": 1}, "stop_after_passes and max_repeats both say when to end"),
        (
            {"stop_after_passes": 1, "exhausted_policy": "stop"},
            "needs every dataset to repeat, but 'code' is set to 'stop'",
        ),
        ({"stop_after_passes": 1, "exhausted_policy": {"web": "redistribute"}}, "but 'web' is set to 'redistribute'"),
        ({"token_estimation": 0.25}, "token_estimation=0.25: weights count samples"),
        ({"shuffle_block_size": 0}, "shuffle_block_size .* must be at least 1"),
        ({"shuffle_shards": "no"}, "shuffle_shards must be True or False, found 'no'"),
        ({"shuffle_within_shard": 1}, "shuffle_within_shard must be True or False, found 1"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        two(**settings)


WEB = Numbers("web", [3])


@pytest.mark.parametrize(
    ("datasets", "mixture", "message"),
    [
        (WEB, {"web": 1}, r"datasets= takes a list of datasets, found a Numbers .*; write \[dataset\]"),
        ("web", {"web": 1}, "datasets= takes a list of datasets, found a str"),
        ({"web": WEB}, {"web": 1}, "datasets= takes a list of datasets, found a dict"),
        (None, {"web": 1}, "datasets= takes a list of datasets, found a NoneType"),
        (["/data/web"], {"web": 1}, "datasets= holds a str .'/data/web'., which is no dataset; make one with"),
        ([WEB, None], {"web": 1}, "datasets= holds a NoneType"),
        ([WEB], [1.0], r"a mixture is a dict of weights by dataset name.*found \[1.0\]"),
        ([WEB], None, "a mixture is a dict of weights by dataset name"),
        ([WEB], 1.0, "a mixture is a dict of weights by dataset name"),
    ],
)
def test_what_is_no_list_of_datasets_or_no_mixture(datasets: Any, mixture: Any, message: str) -> None:
    with pytest.raises(CurriculumError, match=message):
        StaticMixtureWorkSource(datasets, mixture)


def test_it_says_what_it_is() -> None:
    assert repr(two()) == "StaticMixtureWorkSource(code 0.75, web 0.25; 480 samples)"
    endless = StaticMixtureWorkSource([WEB], {"web": 2}, stop_after_passes=None)
    assert repr(endless) == "StaticMixtureWorkSource(web 1; endless)"


def test_numpy_integers_are_integers() -> None:
    numbers = {
        "seed": np.int64(7),
        "chunk_size": np.int32(5),
        "shuffle_block_size": np.int64(2),
        "max_repeats": np.int8(1),
    }
    source = StaticMixtureWorkSource([WEB], {"web": 1}, exhausted_policy="repeat", **numbers)
    plain = StaticMixtureWorkSource(
        [WEB], {"web": 1}, exhausted_policy="repeat", **{name: int(value) for name, value in numbers.items()}
    )
    assert source.recipe() == plain.recipe() and np.array_equal(stream(source), stream(plain))
    msgspec.msgpack.encode(source.recipe())


@pytest.mark.parametrize("option", ["exhausted_policy", "max_repeats", "reshuffle_on_repeat"])
def test_unknown_dataset_names(option: str) -> None:
    with pytest.raises(UnknownOptionError, match=f"unknown dataset in {option} 'cod'; did you mean 'code'"):
        two(**{option: {"cod": None}})


@pytest.mark.parametrize("settings", [{"max_repeats": {"web": 1}}, {"reshuffle_on_repeat": {"web": False}}], ids=str)
def test_settings_without_effect_warn(settings: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="has no effect on 'web'"):
        two(exhausted_policy={"code": "repeat", "web": "stop"}, **settings)


def test_datasets_that_cannot_be_dealt() -> None:
    empty = Numbers("web", [0, 0])
    with pytest.raises(CurriculumError, match=r"'web' has no rows \(2 shards\) but weight 0.25"):
        StaticMixtureWorkSource([TWO[0], empty], WEIGHTS)
    assert len(StaticMixtureWorkSource([TWO[0], empty], {"code": 1, "web": 0})) == 120
    with pytest.raises(CurriculumError, match="at least one dataset"):
        StaticMixtureWorkSource([], WEIGHTS)
    with pytest.raises(CurriculumError, match="no dataset named 'web'"):
        StaticMixtureWorkSource(TWO[:1], WEIGHTS)


# What it says of itself ----------------------------------------------------------------------------------


def test_ids_follow_names() -> None:
    source = StaticMixtureWorkSource(TWO[::-1], WEIGHTS)
    assert source.dataset_ids == source.component_ids() == {"code": 0, "web": 1}
    assert source.datasets_by_id == {0: TWO[0], 1: TWO[1]}
    assert source.chunk_size_hint() == 16384
    assert not source.supports_indexing() and not source.requires_token_priming
    with pytest.raises(NotImplementedError, match="cannot look up sample 3"):
        source.sample_id_at(3)


def test_the_recipe_names_every_difference() -> None:
    base = two().recipe()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(base)) == base
    other = StaticMixtureWorkSource([Numbers("code", [60, 61]), TWO[1]], {"code": 0.5, "web": 0.25}, seed=1).recipe()
    assert {k for k in base if base[k] != other[k]} == {"seed", "weight/code", "rows/code", "dataset/code"}
    assert two(shuffle_block_size="global").recipe()["shuffle_block/web"] == 120


def test_statistics_report_shares_and_passes() -> None:
    end = two().statistics()
    code, web = end.components
    assert (end.samples, code.samples, web.samples) == (480, 360, 120)
    assert (code.share, code.weight, code.rows, code.passes) == (0.75, 0.75, 120, 3.0)
    early = two(exhausted_policy="repeat").statistics(10**12 + 2)
    assert early.samples == 10**12 + 2
    assert abs(early.components[1].samples - early.samples * 0.25) < 1
    assert early.components[1].passes == early.components[1].samples / 120


def test_sources_travel() -> None:
    source = two(chunk_size=16)
    lane = source.lane(1, 3)
    lane.draw()
    twin = pickle.loads(pickle.dumps(lane))
    assert np.array_equal(twin.draw().ids, lane.draw().ids) and twin.state() == lane.state()
    assert len(copy.deepcopy(source)) == len(pickle.loads(pickle.dumps(source))) == 480


# Lanes and states ----------------------------------------------------------------------------------------


def test_a_lane_state_is_a_few_numbers() -> None:
    lane = two(chunk_size=16).lane(2, 3)
    lane.draw()
    assert lane.state() == {"lane": 2, "lanes": 3, "draws": 1, "eras": [[0, {"code": 0.75, "web": 0.25}]]}
    assert len(msgspec.msgpack.encode(lane.state())) < 100


def test_an_ended_lane_stays_ended() -> None:
    lane = two(chunk_size=400).lane(0, 1)
    assert [len(lane.draw() or ()) for _ in range(4)] == [400, 80, 0, 0]
    assert lane.state()["draws"] == 2


def test_lanes_out_of_range() -> None:
    with pytest.raises(CurriculumError, match=r"lane 3 of 3: lanes are numbered from 0 to 2"):
        two().lane(3, 3)


def test_states_of_other_lanes_are_refused() -> None:
    state = two().lane(0, 2).state()
    with pytest.raises(CheckpointMismatch, match="lane 0 of 2 is now lane 0 of 4"):
        two().lane(0, 4).load(state)


def test_modulo_deals_in_turn() -> None:
    whole = stream(two(chunk_size=16))
    source = two(chunk_size=16, lane_assignment="modulo")
    for lane in range(4):
        expected = [whole[at : at + 16] for at in range(16 * lane, len(whole), 64)]
        assert np.array_equal(everything(source.lane(lane, 4)), np.concatenate(expected))


# One object per sample -----------------------------------------------------------------------------------


def test_chunks_of_objects_are_the_same_samples() -> None:
    source = two(chunk_size=50)
    columns = source.lane(1, 2)
    objects = source.clone_for_lane(1, 2)
    while (samples := columns.draw()) is not None:
        chunk = objects.next_chunk()
        assert chunk is not None and len(chunk) == len(samples)
        assert [(*sample, source.component_ids()[name]) for sample, name in chunk] == list(
            map(tuple, samples.ids.tolist())
        )
        assert chunk.mixture == WEIGHTS
    assert objects.next_chunk() is None


def test_a_source_without_a_lane_is_the_only_one() -> None:
    source = two(chunk_size=100)
    chunk = source.next_chunk()
    assert chunk is not None and {name: len(ids) for name, ids in chunk.components.items()} == {"code": 75, "web": 25}


def test_state_dict_continues() -> None:
    source = two(chunk_size=50).clone_for_lane(0, 2)
    source.next_chunk()
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(source.state_dict()))
    other = two(chunk_size=50).clone_for_lane(0, 2)
    other.load_state_dict(state)
    expected, found = source.next_chunk(), other.next_chunk()
    assert expected is not None and found is not None and list(expected) == list(found)
    fresh = two(chunk_size=50)
    fresh.load_state_dict(state)
    assert fresh.state_dict()["lane"]["lanes"] == 2
    with pytest.raises(CheckpointMismatch, match=r"chunk_size: 50 -> 60\n.*weight|chunk_size: 50 -> 60"):
        two(chunk_size=60).load_state_dict(state)


def test_weights_of_another_time_are_refused_and_what_was_drawn_from_stays() -> None:
    lane = two(chunk_size=16).lane(0, 1)
    for _ in range(3):
        lane.draw()
    other = StaticMixtureWorkSource(TWO, {"code": 0.5, "web": 0.5}, chunk_size=16).lane(0, 1)
    with pytest.raises(CheckpointMismatch, match=r"weight/code: 0.75 -> 0.5"):
        other.load(lane.state())
    less = StaticMixtureWorkSource(TWO[:1], {"code": 1}, chunk_size=16).lane(0, 1)
    with pytest.raises(CheckpointError, match="drawn from 'web', which the curriculum no longer lists"):
        less.continued(lane.state(), 3, {})

"""Laws of the stream: every row of every pass once, lanes deal it out whole, and any position can be returned to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from curriculum_data import Numbers, curricula, drawn, replayed, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.work import StaticMixtureWorkSource

FEW = settings(max_examples=40, deadline=None)


@FEW
@given(curricula())
def test_length_is_exact_and_rows_come_once_a_pass(recipe: dict[str, Any]) -> None:
    source = StaticMixtureWorkSource(**recipe)
    stream = whole(source)
    assert len(stream) == len(source) == source.statistics().samples
    for number, dataset in source.datasets_by_id.items():
        rows = list(map(tuple, stream[stream[:, 0] == number, 1:3].tolist()))
        every = {(s, r) for s, n in enumerate(dataset.counts().tolist()) for r in range(n)}
        for begin in range(0, len(rows), len(every)):
            one_pass = rows[begin : begin + len(every)]
            assert len(set(one_pass)) == len(one_pass) and set(one_pass) <= every
        assert source.statistics().components[number].samples == len(rows)


@FEW
@given(curricula())
def test_each_policy_gives_what_it_says(recipe: dict[str, Any]) -> None:
    source = StaticMixtureWorkSource(**recipe)
    stream = whole(source)
    counts = {d.name: int((stream[:, 0] == i).sum()) for i, d in source.datasets_by_id.items()}
    sizes = {d.name: int(d.counts().sum()) for d in source.datasets_by_id.values()}
    policy, repeats = recipe.get("exhausted_policy"), recipe.get("max_repeats")
    per = policy if isinstance(policy, dict) else dict.fromkeys(counts, policy or "repeat")
    extra = repeats if isinstance(repeats, dict) else dict.fromkeys(counts, repeats)
    if policy is None and repeats is None:
        passes = recipe.get("stop_after_passes", 1)
        assert all(counts[n] >= passes * sizes[n] for n in counts)
        slowest = max(sizes[n] / w for n, w in recipe["mixture"].items())
        assert len(source) <= passes * slowest * sum(recipe["mixture"].values()) + 1
        return
    full = [n for n in counts if counts[n] == sizes[n] * (1 + (extra.get(n) or 0))]
    for name in counts:
        kind = per.get(name, "repeat")
        if kind != "repeat" or extra.get(name) is not None:
            assert counts[name] <= sizes[name] * (1 + (extra.get(name) or 0))
    enders = [
        n
        for n in counts
        if per.get(n, "repeat") == "stop" or (per.get(n, "repeat") == "repeat" and extra.get(n) is not None)
    ]
    assert any(name in full for name in enders) if enders else set(full) == set(counts)


@FEW
@given(curricula(), st.integers(1, 7))
def test_lanes_deal_out_the_whole_stream(recipe: dict[str, Any], lanes: int) -> None:
    source = StaticMixtureWorkSource(**recipe)
    stream, size = whole(source), recipe["chunk_size"]
    chunks = [stream[at : at + size].tobytes() for at in range(0, len(stream), size)]
    dealt = []
    for lane in range(lanes):
        own = source.lane(lane, lanes)
        dealt.append([samples.ids.tobytes() for samples in iter(own.draw, None)])
    for number in range(0, len(chunks), lanes):
        round_ = [lane[number // lanes] for lane in dealt if len(lane) > number // lanes]
        assert Counter(round_) == Counter(chunks[number : number + lanes])
    assert sum(map(len, dealt)) == len(chunks)


@FEW
@given(curricula(), st.integers(1, 4), st.data())
def test_any_chain_of_stops_changes_nothing(recipe: dict[str, Any], lanes: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, lanes - 1))
    expected = drawn(StaticMixtureWorkSource(**recipe).lane(number, lanes))
    lane = StaticMixtureWorkSource(**recipe).lane(number, lanes)
    parts = [np.empty((0, 4), np.int64)]
    for draws in data.draw(st.lists(st.integers(0, 5), max_size=4)):
        parts.append(drawn(lane, most=draws))
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(lane.state()))
        lane = StaticMixtureWorkSource(**recipe).lane(number, lanes)
        lane.load(state)
        assert lane.state() == state
    assert np.array_equal(np.concatenate([*parts, drawn(lane)]), expected)


@FEW
@given(curricula(), st.integers(0, 5))
def test_states_are_functions_of_recipe_and_draws(recipe: dict[str, Any], draws: int) -> None:
    one, other = (StaticMixtureWorkSource(**recipe).lane(0, 2) for _ in range(2))
    drawn(one, most=draws)
    for _ in range(draws):
        other = replayed(other, StaticMixtureWorkSource(**recipe).lane(0, 2))
        other.draw()
    assert msgspec.msgpack.encode(one.state()) == msgspec.msgpack.encode(other.state())


@FEW
@given(curricula(), st.randoms(use_true_random=False))
def test_the_order_of_listing_never_matters(recipe: dict[str, Any], random: Any) -> None:
    shuffled = dict(recipe, datasets=random.sample(recipe["datasets"], len(recipe["datasets"])))
    one, other = StaticMixtureWorkSource(**recipe), StaticMixtureWorkSource(**shuffled)
    assert np.array_equal(whole(one), whole(other))
    assert one.recipe() == other.recipe()


@FEW
@given(curricula())
def test_chunk_size_does_not_change_the_stream(recipe: dict[str, Any]) -> None:
    one = whole(StaticMixtureWorkSource(**dict(recipe, chunk_size=7)))
    assert np.array_equal(one, whole(StaticMixtureWorkSource(**recipe)))


@FEW
@given(curricula())
def test_other_datasets_do_not_change_a_datasets_order(recipe: dict[str, Any]) -> None:
    source = StaticMixtureWorkSource(**recipe)
    stream, name = whole(source), recipe["datasets"][0].name
    settings_ = {k: recipe[k] for k in ("seed", "shuffle_shards", "shuffle_within_shard", "shuffle_block_size")}
    others = [Numbers("zz", [50]), Numbers("aa", [2, 2])]
    wider = StaticMixtureWorkSource(
        [others[0], recipe["datasets"][0], others[1]],
        {name: 3, "zz": 1, "aa": 1},
        exhausted_policy="repeat",
        **settings_,
    )
    number = wider.dataset_ids[name]
    own = stream[stream[:, 0] == source.dataset_ids[name], 1:3]
    many = drawn(wider.lane(0, 1), most=2)
    again = many[many[:, 0] == number, 1:3]
    least = min(len(own), len(again))
    assert least and np.array_equal(own[:least], again[:least])


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([None, 1000, "auto", "global"]), st.booleans(), st.integers(0, 10**6))
def test_a_trillion_rows_cost_no_more_than_their_chunks(block: Any, within: bool, draws: int) -> None:
    source = StaticMixtureWorkSource(
        [Numbers("code", [10**9] * 250), Numbers("web", [10**9] * 1000)],
        {"code": 0.25, "web": 0.75},
        chunk_size=1000,
        shuffle_block_size=block,
        shuffle_within_shard=within,
    )
    assert len(source) == 4 * 10**12 // 3 + 1
    lane = source.lane(5, 64)
    lane.load({**lane.state(), "draws": draws})
    samples = lane.draw()
    assert samples is not None and len(np.unique(samples.ids[:, :3], axis=0)) == 1000
    assert samples.ids[:, 2].max() < 10**9 and np.bincount(samples.ids[:, 0]).tolist() in (
        [250, 750],
        [249, 751],
        [251, 749],
    )


@pytest.mark.parametrize("lanes", [1, 4])
def test_lanes_can_be_drawn_from_threads(lanes: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    datasets = [Numbers(f"n{i:02}", [7, 5, i + 1]) for i in range(12)]
    mixture = {d.name: 1 + i / 3 for i, d in enumerate(datasets)}
    source = StaticMixtureWorkSource(datasets, mixture, chunk_size=64, exhausted_policy="repeat", shuffle_block_size=9)
    alone = [drawn(source.lane(lane, lanes), most=30) for lane in range(lanes)]
    with ThreadPoolExecutor(lanes) as pool:
        together = list(pool.map(lambda lane: drawn(source.lane(lane, lanes), most=30), range(lanes)))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))

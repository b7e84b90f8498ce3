"""The end of finite data: every group ends at the same step, which is the same on every topology, and nothing goes uncounted."""

from __future__ import annotations

import math
import tempfile
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pipeline_recipes import Recipe, recipes, seen

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.core.lanes import Topology, Turn
from headrace.core.uneven import Standing, Steps, standing_of, together
from headrace.errors import ConfigError, DataError, WorkerDied
from headrace.observe.summary import LEFT_OVER
from headrace.run.board import FolderBoard
from headrace.run.uneven_board import BoardAgreement
from headrace.run.uneven_plan import Run, lane_lengths

LAW = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
QUIET: dict[str, Any] = {"runner": "inline", "auto_validation": "off"}
HANG = 60


def batched(recipe: Recipe) -> Recipe:
    """The same recipe with batches, so that a step is one."""
    return replace(recipe, batch=recipe.batch or {"microbatch_size": 2})


def plain(recipe: Recipe) -> Recipe:
    """The same recipe without what makes or drops rows: lengths of lanes follow from the curriculum."""
    batch = recipe.batch or {"microbatch_size": 2}
    kept = {"shuffle": recipe.shuffle, "batch": batch, "lanes": recipe.lanes, "flush": recipe.flush}
    return Recipe(recipe.shards, recipe.weights, recipe.source, **kept)


def groups_of(recipe: Recipe, groups: int, build: Callable[..., Pipeline], **options: Any) -> list[Pipeline]:
    """A pipeline for each group, run to its end at the same time as the others; what each delivered is its `got`."""
    pipelines = [build(recipe, dp_degree=groups, dp_group_id=g, **QUIET, **options) for g in range(groups)]
    failures: list[BaseException] = []

    def run(pipeline: Any) -> None:
        try:
            pipeline.got = [None if batch.is_masked else seen(batch) for batch in pipeline]
        except BaseException as error:  # noqa: BLE001  raised on the test's thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(pipeline,)) for pipeline in pipelines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive(), "a group hangs"
    if failures:
        raise failures[0]
    return pipelines


def without_tokens(recipe: Recipe, **options: Any) -> Pipeline:
    """A chain of which every lane's length is known beforehand."""
    datasets = [
        Dataset.from_dict(
            name, {i: InMemoryShard([{"n": 1000 * i + r} for r in range(k)]) for i, k in enumerate(counts)}
        )
        for name, counts in recipe.shards.items()
    ]
    source = StaticMixtureWorkSource(datasets=datasets, mixture=MixtureSpec(recipe.weights), **recipe.source)
    pipeline = Pipeline(source).options(canonical_replicas=recipe.lanes, **options)
    pipeline.map_transform(_document, drop_none=False)
    if recipe.shuffle is not None:
        pipeline.shuffle(recipe.shuffle)
    assert recipe.batch is not None
    return pipeline.batch(**recipe.batch)


def _document(payload: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [payload["n"]] * 5}


def global_stream(pipelines: list[Any]) -> list[Any]:
    """What all groups delivered, in global order."""
    lengths = {len(pipeline.got) for pipeline in pipelines}
    assert len(lengths) == 1, f"the groups end at different steps: {lengths}"
    return [batch for step in zip(*(pipeline.got for pipeline in pipelines), strict=True) for batch in step]


def lanes_of(recipe: Recipe, build: Callable[..., Pipeline]) -> list[list[Any]]:
    """Every lane's batches, from a run of one group that delivers everything."""
    lanes: list[list[Any]] = [[] for _ in range(recipe.lanes)]
    for batch in build(recipe, **QUIET):
        lanes[batch.lane_ids[0]].append(seen(batch))
    return lanes


def dense(lanes: list[list[Any]]) -> list[Any]:
    """Global batches before the first that is missing."""
    first = min(len(batches) * len(lanes) + lane for lane, batches in enumerate(lanes))
    return [lanes[j % len(lanes)][j // len(lanes)] for j in range(first)]


def with_tokens(recipe: Recipe, **options: Any) -> Pipeline:
    """The whole chain."""
    return recipe.build(**options)


@LAW
@given(recipes(max_lanes=6).map(plain), st.integers(1, 5), st.integers(1, 3))
def test_lengths_by_arithmetic_end_every_group_at_the_same_step(recipe: Recipe, groups: int, accumulated: int) -> None:
    lanes, step = lanes_of(recipe, without_tokens), groups * accumulated
    expected = dense(lanes)
    pipelines = groups_of(recipe, groups, without_tokens, uneven="drop", batches_per_step=step)
    assert global_stream(pipelines) == expected[: len(expected) // step * step]
    left_over = sum(pipeline.metrics_snapshot().left_over for pipeline in pipelines)
    assert left_over == sum(map(len, lanes)) - len(expected) // step * step
    run = Run(pipelines[0].plan(), pipelines[0]._options, Topology(recipe.lanes), pipelines[0].work_source, 0)
    assert lane_lengths(run) == {lane: len(batches) for lane, batches in enumerate(lanes)}


@LAW
@given(recipes(max_lanes=6).map(plain), st.integers(1, 5))
def test_padding_delivers_every_batch_in_its_place_on_every_topology(recipe: Recipe, groups: int) -> None:
    lanes = lanes_of(recipe, without_tokens)
    last = max((len(b) - 1) * recipe.lanes + lane for lane, b in enumerate(lanes) if b) + 1 if any(lanes) else 0
    expected = [lanes[j % recipe.lanes][j // recipe.lanes : j // recipe.lanes + 1] or [None] for j in range(last)]
    expected += [[None]] * (-last % groups)
    try:
        pipelines = groups_of(recipe, groups, without_tokens, uneven="pad")
    except DataError as error:
        assert "holds not a single batch" in str(error) and not all(lanes)
        return
    assert global_stream(pipelines) == [batch for (batch,) in expected]
    assert sum(p.metrics_snapshot().padded for p in pipelines) == sum(batch == [None] for batch in expected)
    assert not any(p.metrics_snapshot().left_over for p in pipelines)


@settings(LAW, max_examples=25)
@given(recipes(max_lanes=4).map(batched), st.integers(2, 4), st.sampled_from(["drop", "pad"]), st.integers(1, 2))
def test_groups_agree_over_a_board_where_only_running_tells(
    recipe: Recipe, groups: int, rule: str, accumulated: int
) -> None:
    lanes, step = lanes_of(recipe, with_tokens), groups * accumulated
    with tempfile.TemporaryDirectory() as folder:
        options = {"uneven": rule, "aggregate_dir": folder, "batches_per_step": step, "aggregate_timeout_s": 30.0}
        options["run_id"] = uuid.uuid4().hex  # members of a process count its iterations, and not every example has all
        try:
            pipelines = groups_of(recipe, groups, with_tokens, **options)
        except (DataError, WorkerDied) as error:  # the group without a batch, or one that it left behind
            assert "left the run before" in str(error) or "holds not a single batch" in str(error)
            assert not all(lanes)
            return
    stream = global_stream(pipelines)
    assert len(stream) % step == 0
    if rule == "drop":
        assert stream == dense(lanes)[: len(stream)]
        assert len(dense(lanes)) - len(stream) < step
        for name, handed, delivered, dropped in _counted(pipelines, recipe.lanes % groups == 0):
            assert handed == delivered + dropped, name
    else:
        assert sorted(map(str, filter(None, stream))) == sorted(str(b) for batches in lanes for b in batches)


def _counted(pipelines: list[Any], counted_once: bool) -> list[tuple[str, int, int, int]]:
    if not counted_once:  # lanes that several groups compute are handed out in each of them
        return []
    summaries = [d for p in pipelines for d in p.metrics_snapshot().datasets]
    return [(d.name, d.handed_out, d.delivered, sum(d.dropped.values())) for d in summaries]


def test_a_single_group_delivers_everything_unless_it_is_asked_to_end_evenly() -> None:
    recipe = Recipe({"a": (21,)}, {"a": 1.0}, {"chunk_size": 4}, batch={"microbatch_size": 2}, lanes=3)
    lanes = lanes_of(recipe, without_tokens)
    assert sorted(map(len, lanes)) == [2, 4, 4]
    (alone,) = groups_of(recipe, 1, without_tokens)
    (even,) = groups_of(recipe, 1, without_tokens, uneven="drop")
    assert len(alone.got) == 10 and even.got == dense(lanes)
    (dataset,) = even.metrics_snapshot().datasets
    rest = 2 * (10 - len(even.got))
    assert dataset.dropped == {LEFT_OVER: rest, "batch: last partial batch": 1}
    assert dataset.delivered + rest + 1 == dataset.handed_out == 21


@LAW
@given(
    recipes(max_lanes=4).map(plain),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 6),
    st.sampled_from(["drop", "pad"]),
)
def test_the_end_does_not_move_when_a_run_is_resumed(
    recipe: Recipe, groups: int, later: int, steps: int, rule: str
) -> None:
    lanes = lanes_of(recipe, without_tokens)
    if not all(lanes):
        return
    common = groups * later
    whole = groups_of(recipe, later, without_tokens, uneven=rule, batches_per_step=common)
    states, first = [], []
    for group in range(groups):
        pipeline = without_tokens(
            recipe, dp_degree=groups, dp_group_id=group, uneven=rule, batches_per_step=common, **QUIET
        )
        iterator = iter(pipeline)
        taken = [batch for _, batch in zip(range(steps * later // math.gcd(groups, later)), iterator, strict=False)]
        first.append([None if batch.is_masked else seen(batch) for batch in taken])
        states.append(pipeline.checkpoint())
        iterator.close()

    def resumed(recipe: Recipe, **options: Any) -> Pipeline:
        pipeline = without_tokens(recipe, **options)
        pipeline.restore(states)
        return pipeline

    rest = groups_of(recipe, later, resumed, uneven=rule, batches_per_step=common)
    begun = [batch for step in zip(*first, strict=True) for batch in step]
    assert begun + global_stream(rest) == global_stream(whole)


ENDS_APART = Recipe(
    {"b": (54,), "c": (42,)},
    {"b": 0.5, "c": 0.5},
    {"chunk_size": 27, "exhausted_policy": "redistribute"},
    batch={"microbatch_size": 3},
    lanes=2,
)
"""Lanes of 14 and 18 batches: with four groups, some have one lane alone, which ends two of their turns before the last step."""


@LAW
@given(
    recipes(max_lanes=5).map(plain),
    st.integers(1, 4),
    st.sampled_from(["drop", "pad", "keep"]),
    st.sampled_from([1, 9]),
)
@example(ENDS_APART, 4, "pad", 1)
def test_between_all_batches_to_the_end_checkpoints_are_those_of_one_group(
    recipe: Recipe, groups: int, rule: str, cut: int
) -> None:
    lanes = lanes_of(recipe, without_tokens)
    if not all(lanes):
        return

    def checkpoints(**options: Any) -> list[dict[str, Any]]:
        pipeline = without_tokens(recipe, uneven=rule, cut_every=cut, **options, **QUIET)
        return [pipeline.checkpoint(), *(pipeline.checkpoint() for _ in pipeline), pipeline.checkpoint()]

    step = {} if rule == "keep" else {"batches_per_step": groups}
    alone = checkpoints(**step)
    for group in range(groups):
        states = checkpoints(dp_degree=groups, dp_group_id=group, **step)
        for number, state in enumerate(states[:-1]):
            if rule != "keep" or number * groups <= len(dense(lanes)):
                assert state["position"] == alone[number * groups]["position"]
                assert all(held == alone[number * groups]["lanes"][lane] for lane, held in state["lanes"].items())
        assert states[-1] == states[-2]


def test_without_a_place_to_agree_the_run_does_not_begin() -> None:
    recipe = Recipe({"a": (40,)}, {"a": 1.0}, {"chunk_size": 4}, batch={"microbatch_size": 2}, lanes=2, keep=3)
    with pytest.raises(ConfigError, match=r"group 1 of 2 cannot know .*aggregate_dir"):
        iter(recipe.build(dp_degree=2, dp_group_id=1, **QUIET))
    uneven = groups_of(recipe, 2, with_tokens, uneven="keep")
    assert sorted(str(b) for p in uneven for b in p.got) == sorted(
        str(b) for x in lanes_of(recipe, with_tokens) for b in x
    )
    with pytest.raises(ConfigError, match="batches_per_step=3 with 2 groups"):
        iter(recipe.build(dp_degree=2, dp_group_id=1, batches_per_step=3, **QUIET))
    with pytest.raises(ConfigError, match="uneven='pad' with map_batch"):
        iter(recipe.build(uneven="pad", **QUIET).map_batch(len))


def test_a_run_that_can_fill_no_step_says_why(caplog: pytest.LogCaptureFixture) -> None:
    recipe = Recipe({"a": (50,)}, {"a": 1.0}, {"chunk_size": 100}, batch={"microbatch_size": 2}, lanes=2)
    for group in range(2):
        caplog.clear()
        pipeline = without_tokens(recipe, dp_degree=2, dp_group_id=group, **QUIET)
        assert list(pipeline) == []
        assert "nothing is delivered" in caplog.text and "chunk_size" in caplog.text
        left = pipeline.metrics_snapshot().left_over
        assert left in (0, 25)
    caplog.clear()
    smaller = Recipe({"a": (50,)}, {"a": 1.0}, {"chunk_size": 5}, batch={"microbatch_size": 2}, lanes=2)
    assert list(without_tokens(smaller, dp_degree=2, dp_group_id=0, **QUIET)) and not caplog.text


@pytest.mark.parametrize("packed", [True, False])
def test_a_masked_batch_has_its_shape_and_no_label(packed: bool) -> None:
    pack = {"max_length": 8, "algorithm": "wrap", "pad_token_id": 0} if packed else None
    recipe = Recipe({"a": (50,)}, {"a": 1.0}, {"chunk_size": 7}, pack=pack, batch={"microbatch_size": 2}, lanes=3)
    build = with_tokens if packed else without_tokens
    batches = list(build(recipe, uneven="pad", **QUIET))
    masked = [batch for batch in batches if batch.is_masked]
    assert masked and not batches[0].is_masked
    for batch in masked:
        out = batch.to_training(return_labels=True, return_num_valid_tokens=True, return_padding_mask=True)
        assert len(batch) == 2 and int(out["num_valid_tokens"]) == 0
        assert (np.asarray(out["labels"]) == -100).all()
        if packed:
            assert np.asarray(out["input_ids"]).shape == (2, 7)
        assert not batch.block.origin.ids.size and len(batch.records) == 2


# -- the parts ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 3))
def test_what_members_know_adds_up_to_what_one_would_know(lengths: list[int], groups: int, size: int) -> None:
    lanes = dict(enumerate(lengths))
    whole = standing_of(lanes, Topology(len(lengths)))
    parts = []
    for group in range(groups):
        topology = Topology(len(lengths), groups, group)
        parts.append(standing_of({lane: lanes[lane] for lane in topology.computed}, topology))
    assert together(parts) == whole
    steps = Steps(size)
    for place in range(70):
        end = steps.end(place)
        assert steps.begin(place) <= place < end == steps.begin(place) + size
        filled = all(j // len(lengths) < lanes[j % len(lengths)] for j in range(end))
        assert whole.can_fill(end) is filled
        assert whole.goes_on(place) is any(n and (n - 1) * len(lengths) + lane >= place for lane, n in lanes.items())
    assert Standing(3, reach=3).can_fill(4) is None and Standing(3, reach=3).goes_on(3) is None


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 6), st.data())
def test_what_members_know_before_the_end_is_never_wrong(lengths: list[int], groups: int, data: st.DataObject) -> None:
    whole = standing_of(dict(enumerate(lengths)), Topology(len(lengths)))
    parts = []
    for group in range(groups):
        looked = data.draw(st.integers(0, 70))
        mine = Topology(len(lengths), groups, group).computed
        places = [place for place in range(looked) if place % len(lengths) in mine]
        empty = [place for place in places if place // len(lengths) >= lengths[place % len(lengths)]]
        reach = max((place + 1 for place in places if place not in empty), default=0)
        ended = {place % len(lengths) for place in empty} == set(mine)
        parts.append(Standing(looked, min(empty, default=None), reach, ended))
    known = together(parts)
    for place in range(70):
        assert known.can_fill(place) in (None, whole.can_fill(place))
        assert known.goes_on(place) in (None, whole.goes_on(place))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 40))
def test_places_are_the_order_of_delivery(groups: int, block: int, steps: int) -> None:
    for mapping in ("interleaved", "contiguous"):
        seen_places = []
        for group in range(groups):
            topology = Topology(groups * block, groups, group, mapping)
            turns = [turn for turn, _ in zip(topology.turns(0), range(steps), strict=False)]
            assert [topology.place(turn) for turn in turns] == [group + k * groups for k in range(steps)]
            assert all(
                topology.next_place(topology.place(a)) == topology.place(b)
                for a, b in zip(turns, turns[1:], strict=False)
            )
            assert all(topology.after(k * groups, turn) == (k + 1) * groups for k, turn in enumerate(turns))
            seen_places += turns
        assert len({(turn.lane, turn.number) for turn in seen_places}) == groups * steps
        assert Topology(groups * block, groups, 0, mapping).place(Turn(0, 0, True)) == 0


def agreement(folder: str, member: int, members: int = 2, timeout_s: float = 1.0) -> BoardAgreement:
    return BoardAgreement(FolderBoard(folder), "end-0", member, members, timeout_s, "rank {}".format)


def test_a_silent_rank_is_named_and_one_that_left_too(tmp_path: Any) -> None:
    alone = agreement(str(tmp_path), 0, 3)
    alone.start()
    with pytest.raises(WorkerDied, match="nothing was heard of rank 1, rank 2"):
        alone.wait(lambda known: known.can_fill(1))
    alone.close()
    late = agreement(str(tmp_path / "elsewhere"), 1, 3)
    late.start()
    with pytest.raises(WorkerDied, match="nothing was heard of rank 0"):
        late.wait(lambda known: known.can_fill(1))
    late.close()


def test_what_an_earlier_run_left_is_not_believed(tmp_path: Any) -> None:
    old = [agreement(str(tmp_path), member) for member in range(2)]
    for one in old:
        one.start()
        one.publish(Standing(100, gap=100, reach=100, ended=True))
    assert all(one.wait(lambda known: known.can_fill(100)) for one in old)
    for one in reversed(old):
        one.close()
    new = [agreement(str(tmp_path), member, timeout_s=HANG) for member in range(2)]
    for one in new:
        one.start()
        one.publish(Standing(3, gap=3, reach=3, ended=True))
    assert [one.wait(lambda known: known.can_fill(4)) for one in new] == [False, False]
    new[0].close()
    assert new[1].wait(lambda known: known.can_fill(3))
    assert new[1].wait(lambda known: known.goes_on(3)) is False
    new[1].close()


@pytest.mark.parametrize("early", [0, 1])
def test_a_member_that_is_done_before_the_others_begin_is_heard(tmp_path: Any, early: int) -> None:
    pair = [agreement(str(tmp_path), member, timeout_s=HANG) for member in range(2)]
    pair[early].start()
    pair[early].publish(Standing(0, gap=0, ended=True))
    pair[early].close()
    other = pair[1 - early]
    other.start()
    other.publish(Standing(8, reach=8))
    assert other.wait(lambda known: known.can_fill(1)) is False
    other.close()


def test_a_rank_that_left_early_ends_the_others_wait(tmp_path: Any) -> None:
    pair = [agreement(str(tmp_path), member, timeout_s=HANG) for member in range(2)]
    for one in pair:
        one.start()
        one.publish(Standing(4, reach=4))
    assert all(one.wait(lambda known: known.can_fill(4)) for one in pair)
    pair[1].close()
    with pytest.raises(WorkerDied, match="rank 1 left the run before its data ended"):
        pair[0].wait(lambda known: known.can_fill(5))
    pair[0].close()

"""Differences by kind, and what is refused whatever is accepted."""

from __future__ import annotations

import ast
import pickle
import re
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.core.accept import find_differences
from headrace.core.checkpoint import CAUGHT_UP
from headrace.core.entries import to_entries
from headrace.errors import CheckpointError, CheckpointMismatch, ConfigError, UnknownOptionError


def dataset(name: str, *counts: int) -> Dataset:
    return Dataset.from_dict(
        name, {i: InMemoryShard([{"n": 100 * i + r} for r in range(c)]) for i, c in enumerate(counts)}
    )


def tokens(payload: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": np.arange(payload["n"] % 7 + 1, dtype=np.int32)}


def odd(payload: dict[str, Any]) -> bool:
    return payload["n"] % 2 == 1


def small(payload: dict[str, Any]) -> bool:
    return payload["n"] < 50


def anything(payload: dict[str, Any]) -> bool:
    return payload["n"] >= 0


def build(
    datasets: list[Dataset] | None = None,
    weights: dict[str, float] | None = None,
    keep: Any = odd,
    size: int = 4,
    lanes: int = 2,
    options: dict[str, Any] | None = None,
    **source: Any,
) -> Pipeline:
    datasets = datasets or [dataset("b", 60, 60), dataset("c", 60)]
    settings = {"chunk_size": 16, "exhausted_policy": "redistribute", **source}
    mixture = MixtureSpec(weights or {d.name: 1.0 for d in datasets})
    pipeline = Pipeline(StaticMixtureWorkSource(datasets=datasets, mixture=mixture, **settings))
    running = {"runner": "inline", "uneven": "keep", **(options or {})}
    pipeline.options(canonical_replicas=lanes, auto_validation="off", **running)
    return pipeline.filter(keep).map_transform(tokens).shuffle(buffer_size=10).batch(size)


MORE = [dataset("a", 5), dataset("b", 60, 60), dataset("c", 60)]


def after(batches: int, pipeline: Pipeline) -> Any:
    iterator = iter(pipeline)
    for _ in islice(iterator, batches):
        pass
    state = pipeline.checkpoint()
    iterator.close()
    return state


def kinds(one: Pipeline, other: Pipeline) -> set[str]:
    return {difference.kind for difference in find_differences(one.recipe(), other.recipe())}


def test_every_difference_has_its_kind() -> None:
    more = [dataset("a", 5), dataset("b", 60, 60, 8), dataset("c", 60)]
    assert kinds(build(), build(weights={"b": 1.0, "c": 2.0})) == {"mixture"}
    assert kinds(build(), build([dataset("a", 5), dataset("b", 60, 60), dataset("c", 60)])) == {"datasets"}
    assert kinds(build(), build([dataset("b", 60, 60)])) == {"datasets"}
    assert kinds(build(), build(more)) == {"datasets", "shards"}
    assert kinds(build(), build(seed=1)) == {"curriculum"}
    assert kinds(build(), build(keep=small, size=5)) == {"filter", "batch"}
    assert kinds(build(), build(options={"flush_every_k_chunks": 1})) == {"flush"}
    assert kinds(build(), build()) == set()


def test_what_is_not_accepted_is_listed_alone() -> None:
    state, other = after(3, build()), build(weights={"b": 1.0, "c": 2.0}, size=5)
    with pytest.raises(CheckpointMismatch) as caught:
        other.restore(state, accept={"mixture"})
    assert caught.value.differences == ["operators.3.batch.microbatch_size: 4 -> 5"]
    assert str(caught.value).endswith("take the differences on purpose: restore(..., accept={'batch', 'mixture'}).")
    other.restore(state, accept=["mixture", "batch"])


def other_chain() -> Pipeline:
    """One operator fewer."""
    pipeline = build()
    return Pipeline(pipeline.work_source).options(canonical_replicas=2).filter(odd).map_transform(tokens).batch(4)


def through_a_state(size: int) -> Pipeline:
    pipeline = build()
    pipeline._nodes.clear()
    return pipeline.stateful_transform("all", init_state=int, push=lambda state, records: (state, records)).batch(size)


NEVER: dict[str, tuple[Any, Any, str]] = {
    "operators": (
        build,
        other_chain,
        r"operators were added, removed or moved.*\. Only parameters can change.*build the chain as",
    ),
    "seed": (build, lambda: build(seed=1, size=5), r"seed: 0 -> 1: seed decides the order of rows"),
    "drawn from": (build, lambda: build([dataset("b", 60, 60)]), "keep the dataset and give it weight 0"),
    "shards": (
        build,
        lambda: build([dataset("b", 61, 60), dataset("c", 60)]),
        "New shards must sort behind the old ones",
    ),
    "state": (lambda: through_a_state(4), lambda: through_a_state(3), "with a stateful_transform"),
}


@pytest.mark.parametrize("why", NEVER)
def test_what_cannot_be_taken_is_no_hint(why: str) -> None:
    """The refusal says why, and accepting every difference would be refused for the same reason."""
    before, other, message = NEVER[why]
    state = after(3, before())
    with pytest.raises(
        CheckpointMismatch, match=f"(?s)These differences cannot be taken on purpose: .*{message}"
    ) as caught:
        other().restore(state)
    assert caught.value.differences and "accept={" not in str(caught.value)
    every = {difference.kind for difference in find_differences(state["recipe"], other().recipe())}
    with pytest.raises(CheckpointError, match=f"(?s){message}") as never:
        other().restore(state, accept=every)
    assert not isinstance(never.value, CheckpointMismatch)


def test_a_hint_can_be_followed() -> None:
    often: dict[str, Any] = {"options": {"cut_every": 8}}
    state = after(3, build(**often))
    for changes in ({"size": 5}, {"weights": {"b": 1.0, "c": 2.0}, "keep": anything, "size": 5}, {"datasets": MORE}):
        with pytest.raises(CheckpointMismatch) as caught:
            build(**changes, **often).restore(state, accept={"mixture"})
        (hint,) = re.findall(r"accept=(\{.*?\})", str(caught.value))
        other = build(**changes, **often)
        other.restore(state, accept=ast.literal_eval(hint))
        assert len(list(other)) > 0


def test_a_rank_alone_is_told_that_all_are_needed() -> None:
    states = [after(3, build(options={"dp_degree": 2, "dp_group_id": group})) for group in range(2)]
    other = build(weights={"b": 1.0, "c": 3.0}, options={"dp_degree": 2, "dp_group_id": 0})
    with pytest.raises(CheckpointMismatch, match=r"cannot be taken on purpose: .* the states of all ranks are needed"):
        other.restore(states[0])
    with pytest.raises(CheckpointMismatch, match=re.escape("accept={'mixture'}")):
        other.restore(states)


def test_the_number_of_lanes_is_no_difference_to_accept() -> None:
    state = after(3, build(lanes=2))
    with pytest.raises(
        CheckpointMismatch, match=r"canonical_replicas: 2 -> 3\n.*options\(canonical_replicas=2\)"
    ) as caught:
        build(lanes=3).restore(state, accept={"batch"})
    assert "accept" not in str(caught.value)


def test_a_source_of_ones_own_that_refuses_a_state_is_quoted() -> None:
    class Stubborn(StaticMixtureWorkSource):
        def taken_over(self, old: Any, first_round: int) -> Any:
            raise ZeroDivisionError("not this one")

    def stubborn(size: int, weight: float) -> Pipeline:
        datasets = [dataset("b", 60), dataset("c", 60)]
        return Pipeline(Stubborn(datasets, {"b": 1.0, "c": weight}, chunk_size=16)).batch(size)

    state = after(2, stubborn(4, 1.0))
    with pytest.raises(CheckpointMismatch, match="the work source raised ZeroDivisionError: not this one"):
        stubborn(4, 2.0).restore(state)
    with pytest.raises(CheckpointMismatch, match=re.escape("accept={'batch'}")):
        stubborn(5, 1.0).restore(state)


def test_a_mismatch_crosses_to_another_process_whole() -> None:
    error = CheckpointMismatch(["a: 1 -> 2", "b: 3 -> 4"], "Do this.")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.differences) == (str(error), ["a: 1 -> 2", "b: 3 -> 4"])


@pytest.mark.parametrize(
    ("accept", "message"),
    [
        ({3}, r"named by strings, as in accept=.*; found a int \(3\)"),
        (["mixture", None], "named by strings"),
        ([b"mixture"], r"found a bytes \(b'mixture'\)"),
        (b"mixture", "give a set of names"),
        (3, r"give a set of names, as in accept=\{'mixture', 'batch'\}; found a int \(3\)"),
        (None, "give a set of names"),
        (True, "give a set of names"),
        ({"mixture": False}, "give a set of names"),
        ([["mixture"]], "named by strings"),
    ],
)
def test_what_names_no_difference_is_an_error(accept: Any, message: str) -> None:
    state = after(3, build())
    for pipeline in (build(), build(size=5)):
        with pytest.raises(ConfigError, match=message):
            pipeline.restore(state, accept=accept)
        with pytest.raises(ConfigError, match=message):
            pipeline.load_state_dict(to_entries(state), accept=accept)


def test_a_misspelt_kind_is_an_error() -> None:
    state = after(3, build())
    with pytest.raises(UnknownOptionError, match="'mixtures'; did you mean 'mixture'"):
        build(weights={"b": 2.0, "c": 1.0}).restore(state, accept={"mixtures"})
    build(weights={"b": 2.0, "c": 1.0}).restore(state, accept="mixture")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("seed", 3),
        ("shuffle_shards", False),
        ("shuffle_within_shard", True),
        ("shuffle_block_size", 9),
        ("chunk_size", 20),
        ("lane_assignment", "modulo"),
        ("exhausted_policy", "stop"),
        ("stop_after_passes", 2),
    ],
)
def test_what_has_no_meaning_is_refused_even_if_accepted(setting: str, value: Any) -> None:
    state = after(3, build())
    changed = {"exhausted_policy": None, setting: value} if setting == "stop_after_passes" else {setting: value}
    with pytest.raises(CheckpointError, match="cannot go on with these differences, accepted or not") as caught:
        build(**changed).restore(state, accept={"curriculum", "shards"})
    assert f"{setting} decides" in str(caught.value) or "shuffle_block decides" in str(caught.value)


def test_a_dataset_that_was_drawn_from_stays_listed() -> None:
    state = after(3, build())
    with pytest.raises(CheckpointError, match="keep the dataset and give it weight 0"):
        build([dataset("b", 60, 60)]).restore(state, accept={"datasets"})
    build(weights={"b": 1.0, "c": 0.0}).restore(state, accept={"mixture"})
    never = after(3, build(weights={"b": 1.0, "c": 0.0}))
    gone = build([dataset("b", 60, 60)])
    gone.restore(never, accept={"datasets"})
    assert len(list(gone)) > 0


@pytest.mark.parametrize("counts", [(60,), (61, 60), (60, 60, 5)[::-1]])
def test_shards_only_join_at_the_end(counts: tuple[int, ...]) -> None:
    state = after(3, build())
    with pytest.raises(CheckpointError, match="dataset 'b': the shards of the checkpoint are not the first ones"):
        build([dataset("b", *counts), dataset("c", 60)]).restore(state, accept={"shards"})


def test_operators_may_not_come_and_go() -> None:
    state = after(3, build())
    datasets = [dataset("b", 60, 60), dataset("c", 60)]
    source = StaticMixtureWorkSource(
        datasets=datasets, mixture=MixtureSpec({"b": 1.0, "c": 1.0}), chunk_size=16, exhausted_policy="redistribute"
    )
    other = Pipeline(source).options(canonical_replicas=2).filter(odd).map_transform(tokens).batch(4)
    with pytest.raises(CheckpointError, match=r"operators were added, removed or moved.*2.shuffle, 3.batch"):
        other.restore(state, accept={"shuffle", "batch", "flush"})


def test_another_curriculum_needs_every_lane() -> None:
    states = [after(3, build(options={"dp_degree": 2, "dp_group_id": group})) for group in range(2)]
    other = build(weights={"b": 1.0, "c": 3.0}, options={"dp_degree": 2, "dp_group_id": 0})
    with pytest.raises(CheckpointError, match="the states of all ranks are needed, as a list; lanes 1 are in none"):
        other.restore(states[0], accept={"mixture"})
    other.restore(states, accept={"mixture"})


def test_lanes_that_loader_workers_shared_are_not_changed() -> None:
    state = after(3, build())
    state["lanes"]["1"] = {**state["lanes"]["1"], CAUGHT_UP: True}
    with pytest.raises(CheckpointError, match="lanes 1 of this checkpoint were shared by several loader workers"):
        build(size=3).restore(state, accept={"batch"})


def test_the_new_checkpoint_is_of_the_new_recipe() -> None:
    other = build(weights={"b": 1.0, "c": 3.0}, size=3)
    other.restore(after(3, build()), accept={"mixture", "batch"})
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(other.checkpoint()))
    assert state["recipe"] == other.recipe()
    again = build(weights={"b": 1.0, "c": 3.0}, size=3)
    again.restore(state)
    assert [len(batch) for batch in again][:-1] == [len(batch) for batch in other][:-1]
    with pytest.raises(CheckpointMismatch):
        build().restore(state)


def test_another_function_goes_on_behind_everything_in_flight() -> None:
    first = build(keep=odd, options={"cut_every": 8})
    iterator = iter(first)
    before = [record.meta.sample_id for batch in islice(iterator, 4) for record in batch.records]
    state = first.checkpoint()
    iterator.close()
    other = build(keep=small)
    other.restore(state, accept={"filter"})
    came = [record.meta.sample_id for batch in other for record in batch.records]
    assert came and not set(before) & set(came)
    assert all(shard == 0 and row < 50 for _, shard, row in came)


def test_new_weights_hold_from_one_round_on_and_are_reached() -> None:
    big = [dataset("b", 4000), dataset("c", 4000)]
    first = build(big, keep=lambda payload: True, options={"cut_every": 16})
    other = build(big, {"b": 1.0, "c": 3.0}, keep=lambda payload: True)
    other.restore(after(30, first), accept={"mixture"})
    names = [record.meta.sample_id[0] for batch in islice(iter(other), 200) for record in batch.records]
    share = sum(names[200:]) / len(names[200:])
    assert abs(share - 0.75) < 0.05
    other.close()


# What each difference means, in a stream that nothing reorders ------------------------------------------------


def straight(
    counts: dict[str, tuple[int, ...]],
    weights: dict[str, float] | None = None,
    size: int = 4,
    cut: int = 8,
    **more: Any,
) -> Pipeline:
    """One lane, rows as stored, one batch after the other."""
    settings = {"chunk_size": 16, "exhausted_policy": "redistribute", "shuffle_shards": False, **more}
    datasets = [dataset(name, *shards) for name, shards in counts.items()]
    source = StaticMixtureWorkSource(datasets=datasets, mixture=weights or dict.fromkeys(counts, 1.0), **settings)
    return Pipeline(source).options(canonical_replicas=1, runner="inline", cut_every=cut).batch(size)


def named(pipeline: Pipeline, batches: int | None = None) -> list[tuple[str, int, int]]:
    """Dataset, shard and row of each sample delivered."""
    names = {number: name for name, number in pipeline.work_source.component_ids().items()}
    iterator = iter(pipeline)
    ids = [record.meta.sample_id for batch in islice(iterator, batches) for record in batch.records]
    iterator.close()
    return [(names[number], shard, row) for number, shard, row in ids]


def of(name: str, samples: list[tuple[str, int, int]]) -> list[tuple[int, int]]:
    return [(shard, row) for which, shard, row in samples if which == name]


@pytest.mark.parametrize("taken", range(11))
def test_new_weights_wait_for_the_chunk_in_progress_and_the_cut_interval(taken: int) -> None:
    counts = {"b": (200,), "c": (200,)}
    whole = named(straight(counts))
    other = straight(counts, {"b": 1.0, "c": 3.0})
    other.restore(after(taken, straight(counts)), accept={"mixture"})
    samples = whole[: 4 * taken] + named(other)
    reached = -(-taken * 4 // 8) * 8  # the end of the cut interval
    begin = -(-reached // 16) * 16
    assert samples[:begin] == whole[:begin]
    for end in range(begin, begin + 160):
        assert abs(len(of("c", samples[begin:end])) - 0.75 * (end - begin)) <= 1
    for name in counts:
        assert of(name, samples) == of(name, whole)


def test_an_added_dataset_begins_with_its_first_row_wherever_its_name_sorts() -> None:
    counts = {"b": (200,), "c": (200,)}
    state = after(5, straight(counts))
    other = straight({"a": (52,), **counts})
    other.restore(state, accept={"datasets"})
    samples = named(straight(counts), 5) + named(other)
    first = next(place for place, sample in enumerate(samples) if sample[0] == "a")
    assert 32 <= first <= 36
    assert of("a", samples) == [(0, row) for row in range(52)]
    for name in counts:
        assert of(name, samples) == [(0, row) for row in range(200)]


def test_added_shards_follow_the_old_ones_in_their_pass_and_mix_in_the_next() -> None:
    settings: dict[str, Any] = {"exhausted_policy": "repeat", "max_repeats": 2, "shuffle_shards": True, "seed": 1}
    state = after(6, straight({"b": (30, 30)}, **settings))
    other = straight({"b": (30, 30, 7, 5)}, **settings)
    other.restore(state, accept={"shards"})
    samples = of("b", named(straight({"b": (30, 30)}, **settings), 6) + named(other))
    passes = samples[:72], samples[72:144], samples[144:]
    assert [len(set(rows)) for rows in passes] == [72, 72, 72]
    assert {shard for shard, _ in passes[0][:60]} == {0, 1}
    mixed = of("b", named(straight({"b": (30, 30, 7, 5)}, **settings)))
    assert passes[1] == mixed[72:144]


@pytest.mark.parametrize(("taken", "flushes"), [(0, 0), (3, 1), (5, 1), (6, 0), (8, 1)])
def test_another_cadence_of_flushes_holds_from_the_next_cut_on(taken: int, flushes: int) -> None:
    def build_with(cadence: int | None) -> Pipeline:
        pipeline = straight({"b": (480,)}, cut=8)
        pipeline._nodes.clear()
        return pipeline.shuffle(4).batch(3, drop_last=False).options(flush_every_k_chunks=cadence)

    before = [len(batch) for batch in build_with(1)]
    assert before[:12] == [3, 3, 3, 3, 3, 1] * 2  # emitted at the end of every chunk, of 16 samples
    other = build_with(None)
    other.restore(after(taken, build_with(1)), accept={"flush"})
    sizes = [len(batch) for batch in other]
    assert sum(before[:taken]) + sum(sizes) == 480
    assert sum(size < 3 for size in sizes[:-1]) == flushes


@pytest.mark.parametrize("taken", [1, 4, 9])
def test_another_function_passes_over_one_cut_interval_and_what_was_held(taken: int) -> None:
    first = build(keep=lambda payload: True, lanes=1, options={"cut_every": 8})
    iterator = iter(first)
    before = {record.meta.sample_id for batch in islice(iterator, taken) for record in batch.records}
    state = first.checkpoint()
    iterator.close()
    other = build(keep=lambda payload: payload["n"] >= 0, lanes=1, options={"cut_every": 8})
    other.restore(state, accept={"filter"})
    came = {record.meta.sample_id for batch in other for record in batch.records}
    assert not before & came
    held = 10 + 3  # a shuffle buffer and a batch that is not full
    assert 180 - len(before) - len(came) <= held + 8


@pytest.mark.parametrize(
    "options", [{"mtp_mode": True}, {"runner": "threads"}, {"runner": "process", "max_workers": 1}]
)
def test_a_change_is_the_same_wherever_the_engine_runs(options: dict[str, Any]) -> None:
    def changed(**more: Any) -> list[Any]:
        pipeline = build(weights={"b": 1.0, "c": 3.0}, size=3, options=more)
        pipeline.restore(state, accept={"mixture", "batch"})
        return [([r.meta.sample_id for r in b.records], pipeline.checkpoint(as_bytes=True)) for b in pipeline]

    state = after(5, build())
    assert changed(**options) == changed()

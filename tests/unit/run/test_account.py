"""What a restored run counts: what it delivers and drops itself, to the sample, and what it repeats apart from that."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from headrace import Dataset, InMemoryShard, Pipeline, SampleRecord, StaticMixtureWorkSource
from headrace.core.block import DATASET, Block
from headrace.core.checkpoint import LaneState
from headrace.observe.summary import PipelineSummary
from headrace.run.handover import Finished
from headrace.run.host import EngineSpec

ROWS = {"a": 150, "b": 90}
BAD = 17


def payload(name: str, n: int) -> dict[str, Any]:
    return {"n": n, "input_ids": np.full(n % 6 + 1, n + 1000 * (name == "b"), np.int32)}


def source() -> StaticMixtureWorkSource:
    data = [
        Dataset.from_dict(name, {0: InMemoryShard([payload(name, n) for n in range(rows)])})
        for name, rows in ROWS.items()
    ]
    return StaticMixtureWorkSource(data, {"a": 2, "b": 1}, chunk_size=16, exhausted_policy="redistribute")


def odd_or_bad(value: dict[str, Any]) -> bool:
    if value["n"] % BAD == 3:
        raise ValueError("not this one")
    return value["n"] % 3 != 0


def fifth(seen: int, records: list[SampleRecord]) -> tuple[int, list[SampleRecord]]:
    return seen + 1, [] if seen % 5 == 4 else records


def twins(records: list[SampleRecord]) -> list[SampleRecord]:
    return [SampleRecord(r.meta.child(i), dict(r.payload)) for r in records for i in range(2) if r.payload["n"] % 4]


CHAINS: dict[str, Any] = {
    "plain": lambda p: p.batch(4),
    "single records": lambda p: p.filter(odd_or_bad),
    "filter": lambda p: p.filter(odd_or_bad).batch(4),
    "shuffle": lambda p: p.filter(odd_or_bad).shuffle(20).batch(4),
    "filter behind": lambda p: p.shuffle(20).filter(odd_or_bad).batch(4, drop_last=False),
    "mixture": lambda p: p.filter(odd_or_bad).ensure_mixture(max_buffer_size=30).batch(4),
    "wrap": lambda p: p.filter(odd_or_bad).pack_flat(8, algorithm="wrap", pad_token_id=0).batch(3),
    "unpadded": lambda p: p.pack_flat(8, algorithm="wrap").batch(3),
    "bins": lambda p: p.pack_flat(5, algorithm="best_fit", num_bins=3, pad_token_id=0).batch(2),
    "packed rows": lambda p: p.pack_flat(8, algorithm="best_fit_wrap", pad_token_id=0).shuffle(6).batch(2),
    "pieces": lambda p: p.add_op("twins", process_many=twins).shuffle(9).batch(3, drop_last=False),
    "state": lambda p: p.stateful_transform("fifth", init_state=int, push=fifth).filter(odd_or_bad).batch(3),
    "state, shuffled": lambda p: p.stateful_transform("fifth", init_state=int, push=fifth).shuffle(9).batch(3),
}


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def truncated(pipeline: Pipeline) -> Pipeline:
    pipeline.map_transform(lambda value: {"n": value["n"], "text": "abcdef"[: value["n"] % 6 + 1]})
    return pipeline.tokenize(letters, field="text", max_length=3, truncation=True, special_tokens="none")


CHAINS["truncated"] = lambda p: truncated(p.filter(odd_or_bad)).batch(4)
CHAINS["truncated behind"] = lambda p: truncated(p.shuffle(15).filter(odd_or_bad)).batch(4)


def build(chain: str, **options: Any) -> Pipeline:
    pipeline = CHAINS[chain](Pipeline(source()))
    settings = {
        "auto_validation": "off",
        "on_error": "skip",
        "cut_every": 24,
        "canonical_replicas": 2,
        "uneven": "keep",
    }
    return pipeline.options(**settings | options)


def run(pipeline: Pipeline, batches: int | None = None) -> tuple[PipelineSummary, Any]:
    running = iter(pipeline)
    for _ in islice(running, batches):
        pass
    state = pipeline.checkpoint()
    running.close()
    summary = pipeline.metrics_snapshot()
    assert summary is not None
    return summary, state


def counted(*runs: PipelineSummary) -> Counter[Any]:
    """What several runs have delivered, dropped and refused together."""
    total = Counter[Any]()
    for summary in runs:
        for data in summary.datasets:
            total[data.name, "delivered"] += data.delivered
            total.update({(data.name, why): count for why, count in data.dropped.items()})
        total.update(summary.dropped_tokens)
        total["refused"] += summary.refused
    return +total


def chained(chain: str, takes: tuple[int | None, ...], micro_batches: tuple[int, ...], **options: Any) -> Any:
    """The summaries of runs that go on one from another."""
    state, summaries = None, []
    for batches, micro_batch in zip(takes, micro_batches, strict=True):
        pipeline = build(chain, micro_batch=micro_batch, **options)
        if state is not None:
            pipeline.restore(state)
        summary, state = run(pipeline, batches)
        summaries.append(summary)
    return summaries


def delivered(summary: PipelineSummary) -> dict[str, int]:
    return {data.name: data.delivered for data in summary.datasets}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize(("cut_every", "micro_batch"), [(24, 256), (7, 5), (1024, 16)])
def test_each_run_of_a_chain_counts_its_own(chain: str, cut_every: int, micro_batch: int) -> None:
    options = {"cut_every": cut_every, "micro_batch": micro_batch}
    whole, _ = run(build(chain, **options))
    assert all(not data.replayed for data in whole.datasets)
    state, sums = None, dict.fromkeys(ROWS, 0)
    for batches in (5, 4, None):
        pipeline = build(chain, **options)
        if state is not None:
            pipeline.restore(state)
        summary, state = run(pipeline, batches)
        for name, count in delivered(summary).items():
            sums[name] += count
    assert sums == delivered(whole)
    assert sum(summary.dropped_tokens.values()) <= sum(whole.dropped_tokens.values())
    for data, of_all in zip(summary.datasets, whole.datasets, strict=True):
        assert data.delivered + sum(data.dropped.values()) == data.handed_out
        assert of_all.delivered + sum(of_all.dropped.values()) == of_all.handed_out == ROWS[of_all.name]
        assert data.handed_out < of_all.handed_out and sum(data.dropped.values()) <= sum(of_all.dropped.values())


REORDERED = ("filter behind", "truncated behind")
"""Chains in which what is dropped comes up in another order than that of the lane."""


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("cut_every", [7, 1024])
@pytest.mark.parametrize("micro_batches", [(256, 256, 256), (5, 5, 5), (5, 256, 16)])
def test_what_is_dropped_adds_up_over_a_chain_of_runs(
    chain: str, cut_every: int, micro_batches: tuple[int, int, int]
) -> None:
    """Also where a block lies across a checkpoint's position. Inline, so that no batch is finished before it is asked for."""
    options: dict[str, Any] = {"runner": "inline", "canonical_replicas": 1, "cut_every": cut_every}
    whole, _ = run(build(chain, micro_batch=micro_batches[0], **options))
    runs = chained(chain, (3, 9, None), micro_batches, **options)
    if chain in REORDERED and len(set(micro_batches)) > 1:
        assert sum((counted(*runs) - counted(whole)).values()) + sum((counted(whole) - counted(*runs)).values()) < 16
    else:
        assert counted(*runs) == counted(whole)


def test_what_was_read_ahead_is_counted_by_the_run_that_goes_on_from_there() -> None:
    """Threads have finished more than was asked for, and count that too: never less than one uninterrupted run."""
    whole, _ = run(build("truncated"))
    runs = chained("truncated", (5, 3, None), (5, 64, 16))
    lost = "tokenize: truncated"
    assert sum(one.dropped_tokens[lost] for one in runs if one.dropped_tokens) >= whole.dropped_tokens[lost] > 0
    assert not counted(whole) - counted(*runs)


@pytest.mark.parametrize(("lanes", "groups"), [(3, 2), (4, 3), (2, 4), (4, 2)])
@pytest.mark.parametrize("chain", ["plain", "truncated", "shuffle", "wrap", "state"])
def test_groups_that_share_a_lane_each_count_their_own(chain: str, lanes: int, groups: int) -> None:
    options: dict[str, Any] = {"canonical_replicas": lanes, "micro_batch": 16}
    whole, _ = run(build(chain, **options))
    ranks = [run(build(chain, dp_degree=groups, dp_group_id=group, **options))[0] for group in range(groups)]
    assert counted(*ranks) == counted(whole)
    for rank in ranks:
        for data in rank.datasets:
            assert data.delivered + sum(data.dropped.values()) == data.handed_out


@pytest.mark.parametrize("chain", ["truncated", "wrap"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_groups_that_share_a_lane_count_their_own_after_a_restore(chain: str, before: int, after: int) -> None:
    options: dict[str, Any] = {"canonical_replicas": 4, "micro_batch": 16, "runner": "inline", "cut_every": 1024}
    whole, _ = run(build(chain, **options))
    first, states = zip(
        *(run(build(chain, dp_degree=before, dp_group_id=group, **options), 12 // before) for group in range(before)),
        strict=True,
    )
    second: list[PipelineSummary] = []
    for group in range(after):
        pipeline = build(chain, dp_degree=after, dp_group_id=group, **options)
        pipeline.restore(list(states))
        second.append(run(pipeline)[0])
        for data in second[-1].datasets:
            assert data.delivered + sum(data.dropped.values()) == data.handed_out
    assert counted(*second)["a", "delivered"] + counted(*first)["a", "delivered"] == counted(whole)["a", "delivered"]
    if before == 3:  # to find out where it stands, a group looks one batch ahead in lanes that it shares
        assert not counted(whole) - counted(*first, *second)
    else:
        assert counted(*first, *second) == counted(whole)


def test_groups_that_share_an_engine_each_count_their_own() -> None:
    pipeline = build("truncated", dp_degree=2, dp_group_id=0, canonical_replicas=3, runner="inline")
    topology = replace(pipeline.topology, node=(0, 1))
    lane = pipeline.work_source.lane
    start = {n: LaneState(0, 0, 0, 0, {0: lane(n, 3).state()}) for n in topology.computed}
    engine = EngineSpec(pipeline.plan(), pipeline._options, topology, pipeline.work_source, start, 0).build()
    engine.start()
    received: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    with pytest.raises(Finished):
        while True:
            for turn, message in engine.take():
                if isinstance(message, Block):
                    received[topology.owner(turn)].update(message.origin.ids[:, DATASET].tolist())
    engine.close()
    for group, samples in received.items():
        summary = engine.summary(group)
        ended = Counter(samples)
        for dataset, _, count in summary.dropped:
            ended[dataset] += count
        assert ended == dict(summary.handed_out) and samples
    whole, _ = run(build("truncated", canonical_replicas=3))
    cut = [dict(engine.summary(group).dropped_tokens)["tokenize: truncated"] for group in (0, 1)]
    assert sum(cut) == whole.dropped_tokens["tokenize: truncated"] and min(cut) > 0


@pytest.mark.parametrize("taken", range(1, 12))
def test_where_the_order_is_kept_every_sample_is_in_one_run(taken: int) -> None:
    """Inline and record by record, so that the first run has not read ahead either."""
    options: dict[str, Any] = {"runner": "inline", "micro_batch": 1, "canonical_replicas": 1, "prefetch_batches": 1}
    whole, _ = run(build("filter", **options))
    first, state = run(build("filter", **options), taken)
    pipeline = build("filter", **options)
    pipeline.restore(state)
    second, _ = run(pipeline)
    assert first.refused + second.refused == whole.refused > 0
    position = sum(data.handed_out for data in first.datasets)
    since_cut = (position - 1) % 24 + 1
    assert since_cut <= sum(data.replayed for data in second.datasets) < since_cut + 4  # and what was held of a batch
    for one, two, both in zip(first.datasets, second.datasets, whole.datasets, strict=True):
        assert one.handed_out + two.handed_out == both.handed_out
        assert one.delivered + two.delivered == both.delivered
        for why, count in both.dropped.items():
            assert one.dropped.get(why, 0) + two.dropped.get(why, 0) == count


@pytest.mark.parametrize(
    "options", [{"runner": "threads"}, {"runner": "process", "max_workers": 1}, {"mtp_mode": True}]
)
def test_it_is_the_same_wherever_the_engine_runs(options: dict[str, Any]) -> None:
    _, state = run(build("shuffle"), 9)

    def counts(**more: Any) -> Any:
        pipeline = build("shuffle", **more)
        pipeline.restore(state)
        return run(pipeline)[0].datasets

    assert counts(**options) == counts(runner="inline", micro_batch=3)
    assert sum(data.replayed for data in counts(runner="inline")) > 0


def test_a_snapshot_after_the_first_batch_has_no_replays_in_it() -> None:
    _, state = run(build("plain", canonical_replicas=1, cut_every=1024), 20)
    pipeline = build("plain", canonical_replicas=1, cut_every=1024, micro_batch=4, runner="inline")
    pipeline.restore(state)
    running = iter(pipeline)
    next(running)
    summary = pipeline.metrics_snapshot()
    assert summary is not None and summary.batches == 1
    counts = [sum(getattr(data, what) for data in summary.datasets) for what in ("replayed", "handed_out", "delivered")]
    assert counts == [80, 4, 4]
    running.close()


@pytest.mark.parametrize("taken", [1, 6, 11])
@pytest.mark.parametrize("later", [0, 3])
@pytest.mark.parametrize("change", ["batch", "pack_flat", "shuffle"])
def test_a_run_that_is_changed_on_purpose_counts_its_own(change: str, taken: int, later: int) -> None:
    def made(new: bool) -> Pipeline:
        sizes = {"shuffle": 10, "pack_flat": 8, "batch": 3}
        if new:
            sizes[change] += 5
        pipeline = Pipeline(source()).filter(odd_or_bad).shuffle(sizes["shuffle"])
        pipeline.pack_flat(sizes["pack_flat"], algorithm="wrap", pad_token_id=0).batch(sizes["batch"], drop_last=False)
        return pipeline.options(
            auto_validation="off", on_error="skip", cut_every=48, canonical_replicas=1, runner="inline", micro_batch=7
        )

    first, state = run(made(new=False), taken)
    pipeline = made(new=True)
    pipeline.restore(state, accept={change})
    runs = [first]
    if later:
        summary, state = run(pipeline, later)
        runs.append(summary)
        pipeline = made(new=True)
        pipeline.restore(state)
    summary, _ = run(pipeline)
    runs.append(summary)
    good = {name: sum(n % 3 != 0 and n % BAD != 3 for n in range(rows)) for name, rows in ROWS.items()}
    assert {name: sum(delivered(one)[name] for one in runs) for name in ROWS} == good
    for data in summary.datasets:
        assert data.delivered + sum(data.dropped.values()) == data.handed_out
        assert sum(data.dropped.values()) <= ROWS[data.name] - good[data.name]


@pytest.mark.parametrize("taken", [1, 4, 9])
def test_what_a_changed_operator_had_dropped_comes_again_and_counts_once(taken: int) -> None:
    """Documents too long for the old rows, read since the cut, enter the new packer and fit."""

    def made(length: int) -> Pipeline:
        pipeline = Pipeline(source()).pack_flat(length, algorithm="best_fit", num_bins=2, pad_token_id=0)
        settings: dict[str, Any] = {"runner": "inline", "canonical_replicas": 1, "cut_every": 60, "micro_batch": 7}
        return pipeline.batch(2, drop_last=False).options(flush_every_k_chunks=None, **settings)

    before, state = run(made(4), taken)
    assert taken == 1 or any("pack_flat: longer than a row" in data.dropped for data in before.datasets)
    pipeline = made(8)
    pipeline.restore(state, accept={"pack_flat"})
    summary, _ = run(pipeline)
    for data in summary.datasets:
        assert data.delivered == data.handed_out and not data.dropped

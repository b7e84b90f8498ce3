"""What a restored run counts: what it delivers and drops itself, to the sample, and what it repeats apart from that."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from headrace import Dataset, InMemoryShard, Pipeline, SampleRecord, StaticMixtureWorkSource
from headrace.observe.summary import PipelineSummary

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
    assert any("pack_flat: longer than a row" in data.dropped for data in before.datasets)
    pipeline = made(8)
    pipeline.restore(state, accept={"pack_flat"})
    summary, _ = run(pipeline)
    for data in summary.datasets:
        assert data.delivered == data.handed_out and not data.dropped

"""Laws 1 to 5 for chains with operators of the user's own, `ensure_mixture`, and documents that packing refuses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import Dataset, InMemoryShard, Pipeline, SampleRecord, StaticMixtureWorkSource

Records = list[SampleRecord]


def fresh() -> dict[str, Any]:
    return {"seen": {-1}, "last": None}


def first_of_its_kind(state: dict[str, Any], records: Records) -> tuple[dict[str, Any], Records]:
    out = [record for record in records if record.payload["n"] % 17 not in state["seen"]]
    return {"seen": state["seen"] | {r.payload["n"] % 17 for r in records[:1] if r.payload["n"] % 3}, "last": None}, out


def pairs(state: Records, records: Records) -> tuple[Records, Records]:
    """The second of two comes before the first, with both sums."""
    held = [*state, *records]
    if len(held) < 2:
        return held, []
    total = held[0].payload["n"] + held[1].payload["n"]
    return [], [SampleRecord(r.meta, {**r.payload, "n": total + k}) for k, r in enumerate(reversed(held))]


def twice(records: Records) -> Records:
    kept = [record for record in records if record.payload["n"] % 4]
    return [SampleRecord(r.meta.child(i), {**r.payload, "n": r.payload["n"] * 2 + i}) for r in kept for i in range(2)]


def tokens(payload: dict[str, Any]) -> dict[str, Any]:
    """Every thirteenth has a field that the others lack, and cannot be packed with them."""
    n = payload["n"]
    return {"n": n, "input_ids": np.arange(n % 7, dtype=np.int32) + n, **({"odd": [1]} if n % 13 == 5 else {})}


STEPS = {
    "filter": lambda p: p.stateful_transform("firsts", init_state=fresh, push=first_of_its_kind),
    "pairs": lambda p: p.stateful_transform(
        "pairs", init_state=list, push=pairs, flush=list, preserves_cursor_order=False
    ),
    "twice": lambda p: p.add_op("twice", process_many=twice),
    "shuffle": lambda p: p.shuffle(5),
    "mixture": lambda p: p.ensure_mixture(max_buffer_size=6, weight_by="n"),
    "samples": lambda p: p.ensure_mixture(mixture={"a": 2, "b": 0}, weight_by="samples", obsolete_drain_rate=0.5),
}
ENDS = {
    "batch": lambda p: p.batch(3),
    "keep": lambda p: p.batch(2, drop_last=False),
    "records": lambda p: p,
    "packed": lambda p: p.map_transform(tokens).pack_flat(8, algorithm="wrap", pad_token_id=0, on_error="skip").batch(2),
    "binned": lambda p: p.map_transform(tokens)
    .pack_flat(8, num_bins=2, pad_token_id=0, on_error="skip", drop_oversized=False)
    .batch(1),
}  # fmt: skip


@st.composite
def chains(draw: st.DrawFn) -> tuple[Any, int]:
    """A chain and its lanes, as a function of the settings of a run."""
    rows = {name: draw(st.integers(1, 60)) for name in "ab"}
    size, lanes, flush = draw(st.integers(1, 20)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    steps: Sequence[str] = draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3, unique=True))
    end = draw(st.sampled_from(sorted(ENDS)))

    def build(**options: Any) -> Pipeline:
        datasets = [
            Dataset.from_dict(name, {0: InMemoryShard([{"n": 100 * (name == "b") + i} for i in range(count)])})
            for name, count in rows.items()
        ]
        work = StaticMixtureWorkSource(datasets, {"a": 1, "b": 2}, chunk_size=size, exhausted_policy="redistribute")
        pipeline = Pipeline(work).options(
            canonical_replicas=lanes, flush_every_k_chunks=flush, auto_validation="off", uneven="keep", **options
        )
        for step in steps:
            STEPS[step](pipeline)
        return ENDS[end](pipeline)

    return build, lanes


RUNS = st.fixed_dictionaries(
    {
        "micro_batch": st.sampled_from([1, 2, 7, 256]),
        "cut_every": st.sampled_from([1, 5, 1024]),
        "runner": st.sampled_from(["inline", "threads"]),
    }
)


def seen(item: Any) -> Any:
    if hasattr(item, "records"):
        return [seen(record) for record in item.records]
    payload = {name: np.asarray(value).tolist() for name, value in item.payload.items()}
    return (item.meta.as_cursor_key(), payload)


@settings(max_examples=40, deadline=None)
@given(chains(), RUNS, RUNS, st.lists(st.integers(0, 6), max_size=4))
def test_resume_is_invisible_and_settings_are_not_data(
    chain: tuple[Any, int], run: dict[str, Any], other: dict[str, Any], legs: list[int]
) -> None:
    build, _ = chain
    straight = [seen(item) for item in build(**run)]
    state, got = None, []
    for steps in [*legs, 10**6]:
        pipeline = build(**{**run, "micro_batch": other["micro_batch"], "runner": other["runner"]})
        if state is not None:
            pipeline.restore(state)
        running = iter(pipeline)
        got += [seen(item) for item in islice(running, steps)]
        state = pipeline.checkpoint(as_bytes=True)
        running.close()
    assert got == straight


@settings(max_examples=25, deadline=None)
@given(chains(), RUNS, st.integers(0, 12), st.integers(1, 4))
def test_checkpoints_are_functions_of_the_position(
    chain: tuple[Any, int], run: dict[str, Any], steps: int, block: int
) -> None:
    build, _ = chain
    states = []
    for options in (run, {**run, "micro_batch": block, "runner": "inline"}):
        pipeline = build(**options)
        list(islice(running := iter(pipeline), steps))
        states.append(pipeline.checkpoint(as_bytes=True))
        running.close()
    assert msgspec.msgpack.decode(states[0]) == msgspec.msgpack.decode(states[1])


@settings(max_examples=25, deadline=None)
@given(chains(), RUNS)
def test_every_sample_is_delivered_or_counted(chain: tuple[Any, int], run: dict[str, Any]) -> None:
    pipeline = chain[0](**run)
    list(pipeline)
    summary = pipeline.metrics_snapshot()
    assert summary is not None
    for data in summary.datasets:
        assert data.delivered + sum(data.dropped.values()) == data.handed_out, data


@settings(max_examples=20, deadline=None)
@given(chains(), RUNS, st.integers(1, 4))
def test_topology_is_not_data(chain: tuple[Any, int], run: dict[str, Any], groups: int) -> None:
    build, _ = chain
    whole = [seen(item) for item in build(**run)]
    parts = [[seen(item) for item in build(**run, dp_degree=groups, dp_group_id=g)] for g in range(groups)]
    assert sorted(map(repr, whole)) == sorted(repr(item) for part in parts for item in part)

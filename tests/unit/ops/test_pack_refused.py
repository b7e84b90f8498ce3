"""Documents that cannot be packed, with `on_error="skip"` and `"quarantine"`."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from headrace.core.block import Block, Origin, concat_blocks
from headrace.core.op import Accumulator
from headrace.errors import ConfigError, RecordError
from headrace.ops.pack.flat import PackFlat

GOOD = {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 0]}
KINDS: list[Any] = [
    GOOD,
    GOOD,
    {"input_ids": [], "loss_mask": []},
    {"input_ids": [1, 2]},
    {"input_ids": [1, 2], "loss_mask": [1]},
    {"input_ids": [1.5], "loss_mask": [1]},
    {"input_ids": ["a"], "loss_mask": [1]},
    {"input_ids": [4] * 9, "loss_mask": [1] * 9},
    {"tokens": [1, 2]},
    {"text": "abc"},
    {"input_ids": [1], "positions": [0]},
    {"input_ids": [1, 2], "loss_mask": "11"},
    {"input_ids": [1, 2], "loss_mask": None},
    {"input_ids": [], "loss_mask": "none"},
    {"input_ids": [[1, 2]], "loss_mask": [[1, 1]]},
    "no mapping",
    None,
]
PACKERS: list[dict[str, Any]] = [
    {"algorithm": "wrap", "pad_token_id": 0},
    {"algorithm": "best_fit_wrap", "pad_token_id": 0, "candidate_pool_size": 4},
    {"algorithm": "first_fit", "num_bins": 2, "pad_token_id": 0},
    {"algorithm": "best_fit", "num_bins": 2, "pad_token_id": 0, "drop_oversized": False},
    {"algorithm": "first_fit", "num_bins": 2, "pad_token_id": 0, "homogeneity": "full", "drop_oversized": False},
    {"algorithm": "wrap", "pad_token_id": 0, "shuffle_strategy": "random"},
]


def block_of(payloads: list[Any], first: int = 0) -> Block:
    ids = np.zeros((len(payloads), 7), np.int64)
    ids[:, 2] = ids[:, 5] = np.arange(first, first + len(payloads))
    ids[:, 3] = ids[:, 2] % 2
    return Block(0, Origin(ids), None, list(payloads))


def outcome(blocks: list[Block]) -> tuple[list[Any], list[tuple[int, str]]]:
    rows = [block for block in blocks if len(block)]
    drops = [(row, drop.reason) for block in blocks for drop in block.drops for row in drop.ids[:, 2].tolist()]
    return (concat_blocks(rows).payloads() if rows else []), sorted(drops)


def plain(rows: list[Any]) -> list[Any]:
    return [{name: np.asarray(value).tolist() for name, value in row.items()} for row in rows]


@given(st.lists(st.sampled_from(range(len(KINDS))), max_size=14), st.sets(st.integers(0, 14)), st.sampled_from(PACKERS))
def test_what_is_refused_does_not_depend_on_blocks_or_restarts(
    kinds: list[int], cuts: set[int], parameters: dict[str, Any]
) -> None:
    payloads = [KINDS[kind] for kind in kinds]
    op = PackFlat(4, **parameters, on_error="skip")
    one: Accumulator = op.accumulator(0)
    rows, drops = outcome([*one.push(block_of(payloads)), *one.end()])

    out: list[Block] = []
    other: Accumulator = op.accumulator(0)
    for a, b in pairwise(sorted({0, len(payloads), *(cut for cut in cuts if cut < len(payloads))})):
        out += other.push(block_of(payloads[a:b], a))
        state, held = other.state(), other.held()
        again = block_of(payloads).take(held.ids[:, 2]) if len(held) else None
        other = op.accumulator(0)
        other.restore(state, again)
    again_rows, again_drops = outcome([*out, *other.end()])
    assert plain(again_rows) == plain(rows) and again_drops == drops


def test_what_is_refused_is_neither_packed_nor_a_teacher() -> None:
    bad_first = [{"input_ids": [1, 2], "loss_mask": [1]}, {"input_ids": [5, 6]}, GOOD, {"input_ids": [7, 8]}]
    packer = PackFlat(4, algorithm="wrap", on_error="skip").accumulator(0)
    blocks = packer.push(block_of(bad_first))
    rows, drops = outcome(blocks)
    assert [{name: np.asarray(rows[0][name]).tolist() for name in ("input_ids", "positions")}] == [
        {"input_ids": [5, 6, 7, 8], "positions": [0, 1, 0, 1]}
    ]
    assert drops == [(0, "skip: RecordError"), (2, "skip: RecordError")]
    with pytest.raises(RecordError, match="1 values for 2 tokens"):
        PackFlat(4, algorithm="wrap").accumulator(0).push(block_of(bad_first[:1]))


def test_only_known_policies() -> None:
    with pytest.raises(ConfigError, match="unknown on_error 'ignore'; known: None, 'raise', 'skip', 'quarantine'"):
        PackFlat(4, algorithm="wrap", on_error="ignore")  # type: ignore[arg-type]


def documents(count: int = 40) -> StaticMixtureWorkSource:
    rows = [{"input_ids": [i, i], **({"odd": [1]} if i in (7, 21) else {})} for i in range(count)]
    data = Dataset.from_dict("docs", {0: InMemoryShard(rows)})
    return StaticMixtureWorkSource([data], {"docs": 1}, shuffle_shards=False, chunk_size=8)


@pytest.mark.parametrize("runner", ["inline", "threads"])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_pipeline_leaves_out_what_it_cannot_pack_and_says_so(runner: str, shuffled: bool) -> None:
    def build() -> Pipeline:
        pipeline = Pipeline(documents())
        return (pipeline.shuffle(4) if shuffled else pipeline).pack_flat(4, algorithm="wrap", pad_token_id=0).batch(1)

    pipeline = build().options(runner=runner, on_error="skip")
    tokens = {t for batch in pipeline for t in batch.to_training(dtype=np.int64)["input_ids"].ravel().tolist()}
    assert tokens == set(range(40)) - {7, 21}
    summary = pipeline.metrics_snapshot()
    assert summary is not None and summary.refused == 2
    assert summary.datasets[0].dropped["pack_flat: skip: RecordError"] == 2
    with pytest.raises(RecordError, match="field 'odd' appears in some records only"):
        list(build().options(runner=runner))
    with pytest.raises(RecordError, match="2 records were refused, more than max_errors=1; the last by 'pack_flat'"):
        list(build().options(runner=runner, on_error="skip", max_errors=1))


def test_the_operator_s_own_policy_comes_first(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    pipeline = Pipeline(documents()).pack_flat(4, algorithm="wrap", on_error="quarantine").batch(1)
    with pytest.raises(ConfigError, match="quarantine_path"):
        pipeline.plan()
    assert len(list(pipeline.options(quarantine_path=bad))) == 19
    lines = [json.loads(line) for line in bad.read_text().splitlines()]
    assert [(line["dataset"], line["row"], line["operator"]) for line in lines] == [
        (0, 7, "pack_flat"),
        (0, 21, "pack_flat"),
    ]
    assert lines[0]["payload"] == {"input_ids": [7, 7], "odd": [1]} and "dataset 'docs'" in lines[0]["where"]


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_batch_of_rows_from_both_sides_of_a_flush_is_restored(policy: str) -> None:
    """Fields are learnt anew after a flush, so rows held behind the packer need not have the same ones."""
    rows = [{"input_ids": [i, i], **({"odd": [1, 1]} if i // 8 % 2 else {})} for i in range(48)]
    data = Dataset.from_dict("docs", {0: InMemoryShard(rows)})

    def build() -> Pipeline:
        work = StaticMixtureWorkSource([data], {"docs": 1}, chunk_size=8)
        chain = Pipeline(work).pack_flat(4, algorithm="wrap", on_error=policy).batch(7)
        return chain.options(flush_every_k_chunks=1, cut_every=1, runner="inline")

    def tokens(items: Any) -> list[Any]:
        return [[np.asarray(r.payload["input_ids"]).tolist() for r in batch.records] for batch in items]

    straight = tokens(build())
    for stop in range(len(straight) + 1):
        pipeline = build()
        got = tokens(islice(running := iter(pipeline), stop))
        state = pipeline.checkpoint()
        running.close()
        again = build()
        again.restore(state)
        assert got + tokens(again) == straight

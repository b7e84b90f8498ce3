"""`ensure_mixture`: who leaves when, worked out by hand, and what a pipeline delivers."""

from __future__ import annotations

import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from headrace.core.block import Block, Origin
from headrace.core.tokens import PADDING
from headrace.errors import ConfigError, OperatorError, RecordError
from headrace.ops.mixture import EnsureMixture

NAMES = {"code": 0, "web": 1, "old": 2}
EVEN = (("code", 1.0), ("web", 1.0))


def block_of(letters: str, payloads: list[Any] | None = None) -> Block:
    ids = np.zeros((len(letters), 7), np.int64)
    ids[:, 2] = ids[:, 5] = np.arange(len(letters))
    ids[:, 3] = [{"c": 0, "w": 1, "o": 2}[letter] for letter in letters]
    return Block(0, Origin(ids), None, payloads or [{"n": 1} for _ in letters])


def buffer(targets: tuple[tuple[str, float], ...] = EVEN, **settings: Any) -> Any:
    settings = {"weight_by": "samples", **settings}
    return EnsureMixture(targets, **settings).with_components(NAMES).accumulator(0)


def letters(blocks: list[Block]) -> str:
    return "".join("cwo"[c] for block in blocks for c in block.origin.ids[:, 3].tolist())


def test_the_one_furthest_behind_is_next_and_others_wait_for_it() -> None:
    mixer = buffer()
    assert letters(mixer.push(block_of("wwcwwc"))) == "cwcw"  # code first by name; web waits for it, twice
    assert letters(mixer.flush()) == "ww"
    assert letters(mixer.push(block_of("wc"))) == "cw"  # as new


def test_shares_of_three_to_one() -> None:
    mixer = buffer((("code", 1.0), ("web", 3.0)))
    out = letters(mixer.push(block_of("cw" * 12)))
    assert out == "wcww" + "cwww" * 3 + "c"  # at a tie the first by name
    assert letters(mixer.flush()) == "c" * 7


def test_weights_count_not_records() -> None:
    lengths = {"c": 10, "w": 30}
    order = "cwcwcwcwcwcwcwcw"
    mixer = buffer(weight_by="n")
    out = letters(mixer.push(block_of(order, [{"n": lengths[letter]} for letter in order])))
    given = {"c": 0, "w": 0}
    for letter in out:
        given[letter] += lengths[letter]
        assert abs(given["c"] - given["w"]) <= 30
    assert out == "cwcccwcccwc"


def test_a_full_buffer_is_emptied_to_its_ratio() -> None:
    mixer = buffer(max_buffer_size=10, drain_target_ratio=0.5)
    assert letters(mixer.push(block_of("w" * 9))) == ""
    assert letters(mixer.push(block_of("w"))) == "w" * 5
    assert len(mixer.held()) == 5
    assert letters(mixer.push(block_of("ccccccc"))) == "ccccc" + "cwcw"


def test_components_without_a_share_leave_one_in_so_many() -> None:
    mixer = buffer(obsolete_drain_rate=0.25)
    assert letters(mixer.push(block_of("oo" + "cw" * 6))) == "cwcwocwcwocwcw"
    mixer = buffer(obsolete_drain_rate=0.0)
    assert letters(mixer.push(block_of("oocwcw"))) == "cwcw"
    assert letters(mixer.flush()) == "oo"


@pytest.mark.parametrize(("rate", "order"), [(0.6, "ccocco"), (0.3, "ccccoccc"), (1.0, "cocococ"), (2 / 3, "ccococ")])
def test_any_rate_of_components_without_a_share_is_kept(rate: float, order: str) -> None:
    mixer = buffer(targets=(("code", 1.0), ("old", 0.0)), obsolete_drain_rate=rate)
    left = letters(mixer.push(block_of("o" * 400 + "c" * 400)))
    assert left.startswith(order)
    assert left.count("o") == pytest.approx(rate * left.count("c"), abs=1)


def test_padding_has_no_weight() -> None:
    block = block_of("cw" * 2)
    width = np.full((4, 8), 1, np.int32)
    padded = block.with_columns({"input_ids": width, PADDING: np.array([6, 0, 6, 0])})
    mixer = buffer(weight_by="auto")
    assert [mixer._weights(each) for each in (block.with_columns({"input_ids": width}), padded)] == [
        [8.0] * 4,
        [2.0, 8.0] * 2,
    ]


def test_without_force_what_has_no_room_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    mixer = buffer(max_buffer_size=None)
    assert letters(mixer.push(block_of("w" * 2000 + "c"))) == "cw"
    with caplog.at_level(logging.WARNING, "headrace"):
        (block,) = mixer.flush()
    assert not len(block) and [(d.reason, len(d.ids)) for d in block.drops] == [("no room in the mixture", 1999)]
    assert "1999 records have no room in the mixture" in caplog.text


def test_a_share_that_was_missed_is_told_at_a_flush(caplog: pytest.LogCaptureFixture) -> None:
    for tolerance in (0.2, 0.3):
        mixer = buffer(max_buffer_size=1, drain_target_ratio=0.5, warn_tolerance=tolerance)
        with caplog.at_level(logging.WARNING, "headrace"):
            mixer.push(block_of("cwww" * 500))
            mixer.flush()
    (record,) = caplog.records
    assert record.getMessage() == (
        "ensure_mixture: lane 0 was off by more than 0.2: code 0.25 (asked for 0.5), web 0.75 (asked for 0.5)"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_buffer_size": 0}, "max_buffer_size .* at least 1"),
        ({"drain_target_ratio": 1.0}, "drain_target_ratio is a number between 0 and 1"),
        ({"obsolete_drain_rate": "x"}, "obsolete_drain_rate is a number from 0 to 1; found 'x'"),
        ({"warn_tolerance": 2}, "warn_tolerance is a number"),
        ({"weight_by": 3}, "weight_by is 'auto', 'samples', a field's name or a function; found 3"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnsureMixture(EVEN, **settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"weight_by": "auto"}, RecordError, r"no token ids to count; the record has n \(dataset 0, shard 0, row 0\)"),
        ({"weight_by": "nope"}, RecordError, "weight_by='nope' gave MISSING"),
        ({"weight_by": lambda p: -1.0}, RecordError, "gave -1.0; a weight is a number of at least 0"),
        ({"weight_by": lambda p: p["m"]}, OperatorError, "raised KeyError: 'm'"),
    ],
)
def test_weights_that_are_none(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        buffer(**settings).push(block_of("cw"))


# -- in a pipeline ----------------------------------------------------------------------------------


def source(**mixture: float) -> StaticMixtureWorkSource:
    datasets = [
        Dataset.from_dict(name, {0: InMemoryShard([{"input_ids": [n] * length} for n in range(400)])})
        for name, length in (("code", 2), ("web", 6))
    ]
    return StaticMixtureWorkSource(datasets, mixture or {"code": 0.5, "web": 0.5}, chunk_size=64)


def tokens_by_name(pipeline: Pipeline, batches: int = 10**9) -> dict[int, int]:
    counts = {0: 0, 1: 0}
    for _, batch in zip(range(batches), pipeline, strict=False):
        for record in batch.records:
            counts[record.meta.sample_id[0]] += len(record.payload["input_ids"])
    return counts


def test_tokens_follow_the_curriculum_s_mixture() -> None:
    plain = tokens_by_name(Pipeline(source()).batch(4), 40)
    assert plain[1] == 3 * plain[0]
    even = tokens_by_name(Pipeline(source()).ensure_mixture().batch(4), 40)
    assert abs(even[0] - even[1]) <= 6
    other = tokens_by_name(Pipeline(source()).ensure_mixture(mixture={"code": 1, "web": 9}).batch(4), 40)
    assert abs(9 * other[0] - other[1]) <= 60


def test_nothing_is_lost_and_resuming_is_invisible() -> None:
    def build() -> Pipeline:
        return Pipeline(source()).ensure_mixture(max_buffer_size=50).batch(3, drop_last=False)

    straight = [batch.ids for batch in build()]
    assert sorted(row for batch in straight for row in batch) == sorted((d, 0, r) for d in (0, 1) for r in range(400))
    pipeline = build()
    running = iter(pipeline)
    for _ in range(50):
        next(running)
    state = pipeline.checkpoint()
    running.close()
    resumed = build().options(micro_batch=7, runner="inline")
    resumed.restore(state)
    assert [batch.ids for batch in resumed] == straight[50:]


def test_where_it_may_stand_and_whose_mixture_it_is() -> None:
    with pytest.raises(ConfigError, match=r"ensure_mixture\(\) after a packing operator"):
        Pipeline(source()).pack_flat(8, algorithm="wrap").ensure_mixture().batch(1).plan()
    with pytest.raises(ConfigError, match="no component is called 'wiki'; known: code, web"):
        Pipeline(source()).ensure_mixture(mixture={"wiki": 1}).batch(1).plan()
    with pytest.raises(TypeError, match="did you mean 'max_buffer_size'"):
        Pipeline(source()).ensure_mixture(max_bufer_size=3)
    recipe = Pipeline(source(code=1, web=3)).ensure_mixture().recipe()
    assert recipe["operators"]["0.ensure_mixture"]["targets"] == {"code": 1.0, "web": 3.0}


# -- records without a weight -------------------------------------------------------------------------


def weight(payload: dict[str, Any]) -> Any:
    if payload["n"] == 7:
        raise KeyError("seven")
    return {13: -1.0, 21: "much", 22: None}.get(payload["n"], 1.0)


@pytest.mark.parametrize("by", ["auto", "field", "function"])
@pytest.mark.parametrize("cut", [1, 2, 3, 40])
def test_records_without_a_weight_are_left_out_as_if_they_had_not_been(by: str, cut: int) -> None:
    bad = {"auto": {3, 4}, "field": {5}, "function": {7, 13, 21, 22}}[by]

    def payload(n: int) -> dict[str, Any]:
        match by:
            case "auto":
                return {"text": "none"} if n in bad else {"input_ids": [n] * (n % 5 + 1)}
            case "field":
                return {"n": float("nan") if n in bad else n % 4 + 1}
            case _:
                return {"n": n}

    word, settings = (
        "cwwcwcccwcwwcwwwcwcwccwwcwcwcccwwwcwcccw",
        {"weight_by": {"field": "n", "function": weight}.get(by, by)},
    )

    def outcome(numbers: list[int], **more: Any) -> tuple[list[int], list[int]]:
        mixer, rows, dropped = buffer(**settings, **more), [], []
        for start in range(0, len(numbers), cut):
            part = numbers[start : start + cut]
            block = block_of("".join(word[n] for n in part), [payload(n) for n in part])
            block.origin.ids[:, 2] = block.origin.ids[:, 5] = part
            again = mixer.push(block)
            rows += [row for out in again for row in out.origin.ids[:, 2].tolist()]
            dropped += [row for out in again for drop in out.drops for row in drop.ids[:, 2].tolist()]
            assert all(drop.reason.startswith("skip: ") for out in again for drop in out.drops)
        rows += [row for out in mixer.flush() for row in out.origin.ids[:, 2].tolist()]
        return rows, dropped

    every = list(range(len(word)))
    assert outcome(every, on_error="skip") == (outcome([n for n in every if n not in bad])[0], sorted(bad))


def labelled(policy: str | None, **options: Any) -> Pipeline:
    shard = InMemoryShard([{"n": n} for n in range(40)])
    work = StaticMixtureWorkSource([Dataset.from_dict("d", {0: shard})], {"d": 1}, chunk_size=8, shuffle_shards=False)
    return Pipeline(work).ensure_mixture(weight_by=weight, on_error=policy).batch(3, drop_last=False).options(**options)


GOOD = [n for n in range(40) if n not in (7, 13, 21, 22)]


@pytest.mark.parametrize("made", [lambda: labelled("skip"), lambda: labelled(None, on_error="skip")])
def test_a_pipeline_leaves_out_records_without_a_weight_and_says_so(made: Any) -> None:
    pipeline = made().options(cut_every=4)
    running = iter(pipeline)
    got = [r.payload["n"] for batch in islice(running, 3) for r in batch.records]
    state = pipeline.checkpoint()
    got += [r.payload["n"] for batch in running for r in batch.records]
    assert got == GOOD
    summary = pipeline.metrics_snapshot()
    assert summary is not None and summary.refused == 4
    (data,) = summary.datasets
    assert data.dropped == {"ensure_mixture: skip: KeyError": 1, "ensure_mixture: skip: RecordError": 3}
    assert data.delivered + sum(data.dropped.values()) == data.handed_out == 40
    other = made().options(micro_batch=2)
    other.restore(state)
    assert [r.payload["n"] for batch in other for r in batch.records] == GOOD[9:]


def test_what_has_no_weight_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    with pytest.raises(ConfigError, match="quarantine_path"):
        labelled("quarantine").plan()
    list(labelled("quarantine", quarantine_path=bad))
    lines = [json.loads(line) for line in bad.read_text().splitlines()]
    assert [(line["row"], line["payload"]) for line in lines] == [(n, {"n": n}) for n in (7, 13, 21, 22)]
    assert lines[0]["reason"] == "KeyError: 'seven'"
    with pytest.raises(
        RecordError, match="3 records were refused, more than max_errors=2; the last by 'ensure_mixture'"
    ):
        list(labelled("skip", max_errors=2))
    with pytest.raises(OperatorError, match=r"raised KeyError: 'seven' \(dataset 0, shard 0, row 7\).*on_error='skip'"):
        list(labelled("raise", on_error="skip"))
    with pytest.raises(ConfigError, match=r"ensure_mixture\(on_error='ignore'\): choose one of"):
        labelled("ignore")

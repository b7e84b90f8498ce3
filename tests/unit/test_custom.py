"""Operators of the user's own: what they may do, that they resume like any other, and what is refused."""

from __future__ import annotations

import json
import pickle
from collections import Counter, deque
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import Dataset, InMemoryShard, Pipeline, SampleRecord, StaticMixtureWorkSource
from headrace.custom.values import pack_value, unpack_value
from headrace.errors import CheckpointError, ConfigError, OperatorError, RecordError

RUNNERS = ("inline", "threads")


def source(rows: int = 120, chunk_size: int = 16, **settings: Any) -> StaticMixtureWorkSource:
    shard = InMemoryShard([{"x": i, "ids": np.arange(i % 5 + 1)} for i in range(rows)])
    return StaticMixtureWorkSource([Dataset.from_dict("d", {0: shard})], {"d": 1}, chunk_size=chunk_size, **settings)


def values(items: Any) -> list[Any]:
    return [record.payload["x"] for batch in items for record in batch.records]


# -- stateful_transform: a running filter, and a window that makes one record of three ------------------------


def nothing() -> dict[str, Any]:
    return {"seen": 0, "last": None}


def every_third(state: dict[str, Any], records: list[SampleRecord]) -> tuple[dict[str, Any], list[SampleRecord]]:
    assert len(records) == 1
    state["seen"] += 1
    return state, records if state["seen"] % 3 == 0 else []


def sums(state: list[SampleRecord], records: list[SampleRecord]) -> tuple[list[SampleRecord], list[SampleRecord]]:
    state = [*state, *records]
    if len(state) < 3:
        return state, []
    total = sum(record.payload["x"] for record in state)
    return [], [SampleRecord(state[0].meta.child(0), {"x": total, "parts": np.array([r.payload["x"] for r in state])})]


def leftovers(state: list[SampleRecord]) -> list[SampleRecord]:
    return [SampleRecord(record.meta, {"x": -record.payload["x"], "parts": np.zeros(1)}) for record in state]


def thirds(pipeline: Pipeline) -> Pipeline:
    return pipeline.stateful_transform("thirds", init_state=nothing, push=every_third)


def windows(pipeline: Pipeline) -> Pipeline:
    return pipeline.stateful_transform(
        "sums", init_state=list, push=sums, flush=leftovers, preserves_cursor_order=False
    )


@pytest.mark.parametrize("runner", RUNNERS)
def test_dropped_records_need_nothing_and_are_counted(runner: str) -> None:
    pipeline = thirds(Pipeline(source(shuffle_shards=False))).batch(4, drop_last=False).options(runner=runner)
    assert values(pipeline) == list(range(2, 120, 3))
    summary = pipeline.metrics_snapshot()
    assert summary is not None
    (data,) = summary.datasets
    assert (data.handed_out, data.delivered, data.dropped) == (120, 40, {"thirds: not handed on": 80})


def test_records_may_be_made_of_several_and_what_is_left_is_flushed() -> None:
    got = values(windows(Pipeline(source(20, chunk_size=4))).batch(1).options(flush_every_k_chunks=2))
    assert got == [0 + 1 + 2, 3 + 4 + 5, -6, -7, 8 + 9 + 10, 11 + 12 + 13, -14, -15, 16 + 17 + 18, -19]
    summary = (pipeline := windows(Pipeline(source(20, chunk_size=4))).batch(1)).metrics_snapshot()
    assert summary is None and len(list(pipeline)) == 8


CHAINS: dict[str, Any] = {
    "filter": lambda p: thirds(p).batch(3, drop_last=False),
    "window": lambda p: windows(p).batch(3, drop_last=False),
    "shuffle": lambda p: windows(p).shuffle(5).batch(2),
    "behind-shuffle": lambda p: thirds(p.shuffle(7)).batch(3),
    "packed": lambda p: (
        thirds(p).map_transform(lambda r: {"input_ids": r["ids"], "x": r["x"]}).pack_flat(4, algorithm="wrap").batch(2)
    ),
    "two": lambda p: windows(thirds(p)).batch(2),
}


def delivered(items: Any) -> list[Any]:
    return [
        [(r.meta.as_cursor_key(), {k: np.asarray(v).tolist() for k, v in r.payload.items()}) for r in b.records]
        for b in items
    ]


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("cut_every", [1, 7, 1024])
def test_resuming_is_invisible_and_settings_are_not_data(chain: str, cut_every: int) -> None:
    def build(**options: Any) -> Pipeline:
        return CHAINS[chain](Pipeline(source())).options(cut_every=cut_every, flush_every_k_chunks=3, **options)

    straight = delivered(build(runner="inline"))
    assert delivered(build(micro_batch=5, runner="threads")) == straight
    state, got = None, []
    for steps in (1, 2, 3, 1000):
        pipeline = build(micro_batch=3)
        if state is not None:
            pipeline.restore(pickle.loads(pickle.dumps(state)))
        running = iter(pipeline)
        got += delivered(islice(running, steps))
        state = pipeline.checkpoint()
        running.close()
    assert got == straight


def test_checkpoints_at_equal_positions_are_equal_bytes() -> None:
    states = []
    for micro_batch in (2, 64):
        pipeline = windows(Pipeline(source())).shuffle(5).batch(2).options(micro_batch=micro_batch)
        list(islice(running := iter(pipeline), 7))
        states.append(pipeline.checkpoint(as_bytes=True))
        running.close()
    assert states[0] == states[1]


def test_a_state_that_is_not_plain_needs_save_and_load() -> None:
    class Seen:
        def __init__(self, number: int = 0) -> None:
            self.number = number

    def push(state: Seen, records: list[SampleRecord]) -> tuple[Seen, list[SampleRecord]]:
        state.number += 1
        return state, records if state.number % 2 else []

    def build(**more: Any) -> Pipeline:
        return (
            Pipeline(source(8))
            .stateful_transform("odd", init_state=Seen, push=push, **more)
            .batch(2)
            .options(cut_every=1)
        )

    with pytest.raises(CheckpointError, match=r"odd: the state holds a .*Seen .*give save= and load="):
        list(build())
    pipeline = build(save=lambda state: state.number, load=Seen)
    assert values(pipeline) == [0, 2, 4, 6]
    with pytest.raises(ConfigError, match="save= and load= go together"):
        build(save=len)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"push": lambda s, r: r}, r"push\(\) returned \[SampleRecord.*; return \(state, list of records\)"),
        ({"push": lambda s, r: (s, [r[0].payload])}, r"push\(\) gave a dict .*; give records"),
        ({"push": lambda s, r: 1 / 0}, "push.. raised ZeroDivisionError"),
        ({"init_state": lambda: [][0]}, "init_state.. raised IndexError"),
        ({"push": lambda s, r: (s, r), "transform": lambda records: [1]}, r"transform\(\) gave a int"),
    ],
)
def test_functions_that_misbehave_are_named(settings: dict[str, Any], message: str) -> None:
    settings = {"init_state": dict, "push": every_third, **settings}
    with pytest.raises(OperatorError, match="mine: " + message):
        list(Pipeline(source(8)).stateful_transform("mine", **settings).batch(2))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda p: p.stateful_transform("batch", init_state=dict, push=every_third),
            "an operator of the library has this name",
        ),
        (lambda p: p.stateful_transform("", init_state=dict, push=every_third), "needs a name"),
        (lambda p: p.stateful_transform("a", push=every_third), "needs init_state="),
        (lambda p: p.stateful_transform("a", init_state=dict, psh=every_third), "needs push="),
        (lambda p: p.stateful_transform("a", init_state=dict, push=every_third, flsh=len), "did you mean 'flush'"),
        (lambda p: windows(p).batch(1).options(flush_every_k_chunks=None).plan(), "keep the flushes"),
        (lambda p: p.add_op("shuffle", process_many=list), "an operator of the library has this name"),
        (lambda p: p.add_op("mine"), "needs process_many="),
        (lambda p: p.add_op(3), "object with a method process_many"),
        (lambda p: p.add_op("mine", process_many=list, accumulator=dict), "write it as stateful_transform"),
        (lambda p: p.add_op("mine", process_many=list, preserves_cursor_order=False), "see stateful_transform"),
        (lambda p: p.add_op("mine", proces_many=list), "did you mean 'process_many'"),
    ],
)
def test_what_cannot_be_meant_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Pipeline(source()))


def test_a_changed_run_cannot_be_taken_on_purpose_through_a_state() -> None:
    pipeline = thirds(Pipeline(source())).batch(2)
    state = pipeline.checkpoint()
    other = thirds(Pipeline(source())).batch(3)
    with pytest.raises(CheckpointError, match="with a stateful_transform"):
        other.restore(state, accept={"batch"})


@pytest.mark.parametrize(
    "value",
    [
        None, True, -5, 2.5, "é", b"\0", [], (1, [2, (3,)]), {"a": {1: "b"}, (1, 2): None}, {3, 1, 2}, frozenset("ab"),
        deque([1, 2], maxlen=3), np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(1.5), ["set", [1]],
    ],
)  # fmt: skip
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    again = unpack_value(pack_value(value, "it"))
    assert (
        type(again) is type(value) and np.array_equal(again, value) if isinstance(value, np.ndarray) else again == value
    )
    assert getattr(again, "maxlen", None) == getattr(value, "maxlen", None)
    assert pack_value({"b", "a", "c"}, "it") == pack_value({"c", "b", "a"}, "it")


@pytest.mark.parametrize("value", [Counter("ab"), object(), 1 << 70, [lambda: 0], np.array([object()])])
def test_other_values_are_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match="it holds a "):
        pack_value(value, "it")


# -- add_op -----------------------------------------------------------------------------------------


def twice_the_even(records: list[SampleRecord]) -> list[SampleRecord]:
    out = []
    for record in records:
        if record.payload["x"] % 2 == 0:
            out += [SampleRecord(record.meta.child(i), {"x": record.payload["x"] + i / 2}) for i in range(2)]
    return out


class Adder:
    """Set up in each worker."""

    def __init__(self, by: int) -> None:
        self.by, self.ready = by, False

    def setup(self) -> None:
        self.ready = True

    def process_many(self, records: list[SampleRecord]) -> list[SampleRecord]:
        assert self.ready
        for record in records:
            record.payload = {"x": record.payload["x"] + self.by}
        return records


@pytest.mark.parametrize("runner", [*RUNNERS, "process"])
def test_records_in_records_out(runner: str) -> None:
    pipeline = Pipeline(source(9, shuffle_shards=False)).add_op("twice", process_many=twice_the_even, parallelism=2)
    pipeline.add_op(Adder(10)).batch(4, drop_last=False).options(runner=runner, micro_batch=2)
    assert values(pipeline) == [x + 10 for even in range(0, 9, 2) for x in (even, even + 0.5)]
    summary = pipeline.metrics_snapshot()
    assert summary is not None and summary.datasets[0].dropped == {"twice: not handed on": 4}
    assert list(pipeline.recipe()["operators"]) == ["0.twice", "1.Adder", "2.batch"]


def test_an_operator_of_ones_own_resumes_like_any_other() -> None:
    def build(**options: Any) -> Pipeline:
        chain = Pipeline(source()).add_op("twice", process_many=twice_the_even).shuffle(9).batch(4, drop_last=False)
        return chain.options(cut_every=5, **options)

    straight = delivered(build(runner="inline"))
    pipeline = build()
    got = delivered(islice(running := iter(pipeline), 4))
    state = pipeline.checkpoint()
    running.close()
    other = build(micro_batch=3)
    other.restore(state)
    assert got + delivered(other) == straight


def test_what_depends_on_its_group_is_named() -> None:
    def numbered(records: list[SampleRecord]) -> list[SampleRecord]:
        for number, record in enumerate(records):
            record.payload = {"x": number}
        return records

    with pytest.raises(OperatorError, match=r"mine\(.*numbered\) gives other records for a group than for its halves"):
        list(Pipeline(source()).add_op("mine", process_many=numbered).batch(2))
    assert (
        len(list(Pipeline(source()).add_op("m", process_many=numbered).batch(2).options(auto_validation="off"))) == 60
    )
    with pytest.raises(OperatorError, match="gave a dict"):
        list(Pipeline(source()).add_op("mine", process_many=lambda rs: [r.payload for r in rs]).batch(2))


def test_samples_in_pieces_count_with_their_first() -> None:
    """A first piece that does not come back is a dropped sample, whatever becomes of the others."""
    seconds = Pipeline(source(8)).add_op("twice", process_many=twice_the_even)
    seconds.add_op("seconds", process_many=lambda rs: [r for r in rs if r.meta.lineage == (1,)])
    for chain in (seconds, thirds(Pipeline(source(8)).add_op("twice", process_many=twice_the_even).shuffle(3))):
        list(pipeline := chain.batch(1, drop_last=False))
        summary = pipeline.metrics_snapshot()
        assert summary is not None
        (data,) = summary.datasets
        assert data.delivered + sum(data.dropped.values()) == data.handed_out == 8


# -- on_error -----------------------------------------------------------------------------------------

BAD = {3, 4, 17, 40, 41, 42, 99, 119}


def halves_then_fails(state: dict[str, Any], records: list[SampleRecord]) -> tuple[dict[str, Any], list[SampleRecord]]:
    """Changes the state and the payload in place, in depth, before it sees that it cannot go on."""
    payload = records[0].payload
    state["total"] += payload["x"]
    state["last"].append(payload["x"])
    payload["notes"].append(state["total"])
    del state["last"][:-3]
    if payload["x"] in BAD:
        raise KeyError(payload["x"])
    payload["last"] = list(state["last"])
    return state, records if payload["x"] % 2 == 0 else []


def noted(rows: int = 120) -> StaticMixtureWorkSource:
    shard = InMemoryShard([{"x": i, "notes": []} for i in range(rows)])
    return StaticMixtureWorkSource([Dataset.from_dict("d", {0: shard})], {"d": 1}, chunk_size=16, shuffle_shards=False)


def expected_of_the_good() -> list[tuple[int, list[int], list[int]]]:
    out, total, last = [], 0, deque[int](maxlen=3)
    for x in range(120):
        if x in BAD:
            continue
        total += x
        last.append(x)
        if x % 2 == 0:
            out.append((x, [total], list(last)))
    return out


def remembering(policy: str | None = "skip", **options: Any) -> Pipeline:
    pipeline = Pipeline(noted()).stateful_transform(
        "sum", init_state=lambda: {"total": 0, "last": []}, push=halves_then_fails, on_error=policy
    )
    return pipeline.batch(3, drop_last=False).options(**options)


def told(items: Any) -> list[tuple[int, list[int], list[int]]]:
    return [
        (r.payload["x"], list(r.payload["notes"]), list(r.payload["last"])) for batch in items for r in batch.records
    ]


@pytest.mark.parametrize("cut_every", [1, 7, 1024])
@pytest.mark.parametrize("micro_batch", [1, 5, 256])
def test_a_state_goes_on_as_it_was_before_the_record_that_failed(cut_every: int, micro_batch: int) -> None:
    pipeline = remembering(cut_every=cut_every, micro_batch=micro_batch)
    assert told(pipeline) == expected_of_the_good()
    summary = pipeline.metrics_snapshot()
    assert summary is not None and summary.refused == len(BAD)
    (data,) = summary.datasets
    assert data.dropped["sum: skip: KeyError"] == len(BAD)
    assert data.delivered + sum(data.dropped.values()) == data.handed_out == 120


@pytest.mark.parametrize("cut_every", [1, 7, 1024])
def test_a_run_that_leaves_out_records_resumes_like_any_other(cut_every: int) -> None:
    state, got = None, []
    for steps in (1, 1, 4, 1000):
        pipeline = remembering(cut_every=cut_every, micro_batch=steps + 2)
        if state is not None:
            pipeline.restore(state)
        got += told(islice(running := iter(pipeline), steps))
        state = pipeline.checkpoint()
        running.close()
    assert got == expected_of_the_good()


def test_a_window_of_records_and_early_flushes_survive_a_failure() -> None:
    """A state of records, which `should_flush` empties."""

    def push(state: list[SampleRecord], records: list[SampleRecord]) -> tuple[list[SampleRecord], Any]:
        state.extend(records)
        if records[0].payload["x"] in BAD:
            raise ValueError("not this one")
        return state, None

    def build(**options: Any) -> Pipeline:
        pipeline = Pipeline(noted(20)).stateful_transform(
            "five", init_state=list, push=push, flush=list, should_flush=lambda state: len(state) == 5, on_error="skip"
        )
        return pipeline.batch(5, drop_last=False).options(**options)

    good = [x for x in range(20) if x not in BAD]
    assert values(build()) == values(build(cut_every=1, micro_batch=2)) == good


def test_what_was_refused_is_kept_as_it_came(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    pipeline = remembering("quarantine")
    with pytest.raises(ConfigError, match="quarantine_path"):
        pipeline.plan()
    assert told(pipeline.options(quarantine_path=bad)) == expected_of_the_good()
    lines = [json.loads(line) for line in bad.read_text().splitlines()]
    assert [(line["row"], line["operator"], line["reason"]) for line in lines] == [
        (x, "sum", f"KeyError: {x}") for x in sorted(BAD)
    ]
    assert lines[0]["payload"] == {"x": 3, "notes": []}


def test_the_options_policy_reaches_operators_of_ones_own_and_theirs_comes_first() -> None:
    assert told(remembering(None, on_error="skip")) == expected_of_the_good()
    for pipeline in (remembering("raise", on_error="skip"), remembering(None)):
        with pytest.raises(
            OperatorError, match=r"sum: push\(\) raised KeyError: 3 \(dataset 0, shard 0, row 3\).*on_error='skip'"
        ):
            list(pipeline)
    with pytest.raises(RecordError, match="3 records were refused, more than max_errors=2; the last by 'sum'"):
        list(remembering(max_errors=2))
    with pytest.raises(ConfigError, match=r"sum\(on_error='ignore'\): choose one of"):
        remembering("ignore")
    with pytest.raises(ConfigError, match=r"mine\(on_error='ignore'\): choose one of"):
        Pipeline(source()).add_op("mine", process_many=list, on_error="ignore")  # type: ignore[arg-type]


def test_functions_without_a_record_raise_whatever_the_policy() -> None:
    settings: dict[str, Any] = {"init_state": dict, "push": every_third, "on_error": "skip"}
    for broken in ({"init_state": lambda: 1 / 0}, {"should_flush": lambda state: 1 / 0}):
        name = next(iter(broken))
        with pytest.raises(OperatorError, match=rf"mine: {name}\(\) raised ZeroDivisionError.*on_error has no say"):
            made = {**settings, "push": lambda state, records: (state, records), **broken}
            list(Pipeline(source(8)).stateful_transform("mine", **made).batch(2))
    with pytest.raises(OperatorError, match=r"return \(state, list of records\)"):
        list(Pipeline(source(8)).stateful_transform("mine", **{**settings, "push": lambda s, r: r}).batch(2))


def test_a_push_that_changes_its_mind_cannot_be_gone_on_with() -> None:
    seen: list[int] = []

    def push(state: int, records: list[SampleRecord]) -> tuple[int, list[SampleRecord]]:
        x = records[0].payload["x"]
        if x in seen or x == 5:
            raise ValueError(x)
        seen.append(x)
        return state, records

    pipeline = Pipeline(source(8, shuffle_shards=False))
    pipeline.stateful_transform("once", init_state=int, push=push, on_error="skip").batch(2)
    with pytest.raises(OperatorError, match=r"once: push\(\) raised ValueError: 0, of a record that it took before"):
        list(pipeline)


def fails_on_the_bad(records: list[SampleRecord]) -> list[SampleRecord]:
    """Changes payloads in place, in depth, before it sees that it cannot go on; drops the odd, and makes two of the even."""
    out = []
    for record in records:
        record.payload["notes"].append(len(record.payload["notes"]))
        if record.payload["x"] in BAD:
            raise ValueError(record.payload["x"])
        if record.payload["x"] % 2 == 0:
            out += [SampleRecord(record.meta.child(i), {**record.payload, "i": i}) for i in range(2)]
    return out


@pytest.mark.parametrize("runner", [*RUNNERS, "process"])
@pytest.mark.parametrize("micro_batch", [1, 7, 256])
def test_a_group_that_fails_is_taken_apart(runner: str, micro_batch: int) -> None:
    pipeline = Pipeline(noted()).add_op("mine", process_many=fails_on_the_bad, parallelism=2, on_error="skip")
    pipeline.batch(4, drop_last=False).options(runner=runner, micro_batch=micro_batch, max_workers=2)
    got = [(r.payload["x"], r.payload["i"], list(r.payload["notes"])) for batch in pipeline for r in batch.records]
    good = [x for x in range(120) if x not in BAD]
    assert got == [(x, i, [0]) for x in good if x % 2 == 0 for i in range(2)]
    summary = pipeline.metrics_snapshot()
    assert summary is not None and summary.refused == len(BAD)
    (data,) = summary.datasets
    assert data.dropped == {"mine: skip: ValueError": len(BAD), "mine: not handed on": sum(x % 2 for x in good)}


@pytest.mark.parametrize("runner", [*RUNNERS, "process"])
@pytest.mark.parametrize("micro_batch", [1, 7, 256])
@pytest.mark.parametrize("validation", ["strict", "off"])
def test_a_group_that_fails_raises_by_default_and_names_the_record(
    runner: str, micro_batch: int, validation: str
) -> None:
    pipeline = Pipeline(noted()).add_op("mine", process_many=fails_on_the_bad, parallelism=2)
    pipeline.options(runner=runner, micro_batch=micro_batch, max_workers=2, auto_validation=validation)
    got: list[Any] = []
    first = min(BAD)
    message = rf"operator 'mine' failed on dataset 'd', shard '0', row {first}: ValueError: {first}\. .*on_error='skip'"
    with pytest.raises(OperatorError, match=message) as caught:
        got.extend((r.payload["x"], r.payload["i"], list(r.payload["notes"])) for r in pipeline)
    assert isinstance(caught.value.__cause__, ValueError)
    assert got == [(x, i, [0]) for x in range(0, first - first % micro_batch, 2) for i in range(2)]


def test_a_field_that_was_taken_out_before_the_failure_is_there_again_when_the_record_is_looked_for() -> None:
    def takes(records: list[SampleRecord]) -> list[SampleRecord]:
        for record in records:
            if record.payload.pop("x") == 5:
                raise KeyError("not this one")
        return records

    pipeline = Pipeline(noted()).add_op("mine", process_many=takes).options(auto_validation="off", runner="inline")
    with pytest.raises(OperatorError, match=r"shard '0', row 5: KeyError: 'not this one'"):
        list(pipeline)


def test_a_failure_is_not_put_down_to_a_record_that_it_was_not_seen_on() -> None:
    def no_three(records: list[SampleRecord]) -> list[SampleRecord]:
        if len(records) > 2:
            raise ValueError("three are too many")
        return records

    def used_up(records: list[SampleRecord]) -> list[SampleRecord]:
        for record in records:
            record.payload["notes"].append("seen")
            if record.payload["notes"][-2:] == ["seen", "seen"]:
                raise KeyError("seen before")
            if record.payload["x"] == 3:
                raise ValueError("not this one")
        return records

    for name, fn in (("no_three", no_three), ("used_up", used_up)):
        pipeline = Pipeline(noted()).add_op("mine", process_many=fn)
        pipeline.options(micro_batch=4, auto_validation="off", runner="inline")
        with pytest.raises(OperatorError, match=r"begins with dataset 0, shard 0, row 0, and on none") as caught:
            list(pipeline)
        assert name in str(caught.value) and isinstance(caught.value.__cause__, ValueError)


def test_a_record_op_gives_records_only() -> None:
    with pytest.raises(OperatorError, match="gave a int"):
        list(Pipeline(noted()).add_op("mine", process_many=lambda records: [1], on_error="skip").batch(2))


def test_what_depends_on_its_group_is_named_where_records_fail_too() -> None:
    def numbered(records: list[SampleRecord]) -> list[SampleRecord]:
        for number, record in enumerate(records):
            record.payload = {"x": number, "was": record.payload["x"]}
            if record.payload["was"] == 1:
                raise ValueError("not this one")
        return records

    pipeline = Pipeline(noted()).add_op("mine", process_many=numbered, on_error="skip").batch(2).options(micro_batch=4)
    with pytest.raises(OperatorError, match="gives other records for a group than for its halves"):
        list(pipeline)

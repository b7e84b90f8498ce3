"""Refused records over a chain of runs: each is counted against `max_errors`, logged and written once."""

from __future__ import annotations

import itertools
import json
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from headrace import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from headrace.core.refusal import Refusal
from headrace.errors import RecordError
from headrace.run.faults import FaultLog

BAD = {n for n in range(100) if n % 7 == 3}
_calls = itertools.count()


def refuses(value: dict[str, Any]) -> dict[str, Any]:
    if value["n"] in BAD:
        raise ValueError(f"call {next(_calls)}")  # another text each time
    return value


def counts(state: int, records: list[Any]) -> tuple[int, list[Any]]:
    refuses(records[0].payload)
    return state + 1, records


CHAINS: dict[str, Any] = {
    "stateless": lambda p: p.map_transform(refuses).batch(5),
    "stateful": lambda p: p.stateful_transform("counts", init_state=int, push=counts).batch(5),
}


def build(chain: str, **options: Any) -> Pipeline:
    shard = InMemoryShard([{"n": n} for n in range(100)])
    source = StaticMixtureWorkSource([Dataset.from_dict("d", {0: shard})], {"d": 1}, shuffle_shards=False)
    settings = {"runner": "inline", "micro_batch": 4, "on_error": "skip", "auto_validation": "off"}
    return CHAINS[chain](Pipeline(source)).options(**settings | options)


def stopped(pipeline: Pipeline, batches: int) -> Any:
    running = iter(pipeline)
    for _ in islice(running, batches):
        pass
    running.close()
    return pipeline.checkpoint()


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("micro_batch", [1, 4, 256])
def test_repeated_refusals_do_not_count_against_max_errors(chain: str, micro_batch: int) -> None:
    state = stopped(build(chain), 9)
    position = 9 * 5 + sum(n in BAD for n in range(52))  # 45 good ones end at sample 51
    later = sum(n in BAD for n in range(position, 100))
    assert 0 < later < len(BAD)

    def restored(max_errors: int) -> Pipeline:
        pipeline = build(chain, max_errors=max_errors, micro_batch=micro_batch)
        pipeline.restore(state)
        return pipeline

    pipeline = restored(later)
    list(pipeline)
    summary = pipeline.metrics_snapshot()
    assert summary is not None and summary.refused == later
    with pytest.raises(RecordError, match=f"{later} records were refused, more than max_errors={later - 1}"):
        list(restored(later - 1))


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("micro_batch", [4, 256])
def test_a_refused_record_is_written_once_whatever_its_error_says(
    chain: str, micro_batch: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"on_error": "quarantine", "quarantine_path": tmp_path / "bad.jsonl"}
    state = stopped(build(chain, micro_batch=micro_batch, **options), 9)
    pipeline = build(chain, **options)
    pipeline.restore(state)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "headrace"):
        list(pipeline)
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == sorted(BAD)
    assert len(caplog.records) == sum(n in BAD for n in range(52, 100))


def test_lines_of_one_record_are_known_by_its_place_and_operator(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"

    def written(*given: tuple[str, int, str]) -> int:
        log = FaultLog(None, str(path), lambda ids: f'row {ids[2]}, "reason": of all')
        for operator, row, reason in given:
            log.add(operator, [0, 0, row, 0, 0, row, 0], Refusal(reason, b"{}"))
        log.close()
        return len(path.read_text().splitlines())

    assert written(("a", 1, "this"), ("a", 2, "this")) == 2
    assert written(("a", 1, "that"), ("b", 1, "this"), ("a", 3, "this")) == 4

"""A record that fails takes nothing with it: what goes out before it, and what was dropped, does not depend on blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from headrace.core.block import CHUNK, OFFSET, ORIGIN_WIDTH, PIECE, Block, Origin
from headrace.core.tokens import PIECE_BITS
from headrace.errors import OperatorError, RecordError
from headrace.run.stage import rows_before

SIZES = (4, 64, 256)


def pipeline(rows: int = 400) -> Pipeline:
    data = Dataset.from_dict(
        "toy", {0: InMemoryShard([{"x": i, "tags": ["a"], "n": np.array([i])} for i in range(rows)])}
    )
    work = StaticMixtureWorkSource(datasets=[data], mixture={"toy": 1.0}, chunk_size=512, shuffle_shards=False)
    return Pipeline(work)


def delivered(chain: Any, expected: type[Exception], match: str) -> list[list[Any]]:
    out: list[list[Any]] = []
    with pytest.raises(expected, match=match):
        out.extend([record.payload for record in batch.records] for batch in chain)
    return out


def fail_at(bad: int) -> Any:
    def fn(row: dict[str, Any]) -> Any:
        if row["x"] == bad:
            raise ValueError("bad")
        row["n"] += 1000
        row["tags"].append("b")
        return row

    return fn


@pytest.mark.parametrize("runner", ["inline", "threads"])
@pytest.mark.parametrize("size", SIZES)
def test_a_function_runs_once_on_each_record_before_the_one_that_fails(size: int, runner: str) -> None:
    chain = pipeline().map_transform(fail_at(199)).batch(4)
    batches = delivered(
        chain.options(micro_batch=size, runner=runner, auto_validation="off"), OperatorError, "row 199: ValueError: bad"
    )
    assert len(batches) == 49
    assert all(
        row["n"].tolist() == [1000 + row["x"]] and row["tags"] == ["a", "b"] for batch in batches for row in batch
    )


@pytest.mark.parametrize("size", SIZES)
def test_one_refused_record_too_many_comes_behind_those_before_it(size: int, caplog: pytest.LogCaptureFixture) -> None:
    def bad(row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] % 50 == 49:
            raise ValueError("bad")
        return row

    chain = pipeline().filter(lambda row: row["x"] % 2).map_transform(bad).batch(4)
    batches = delivered(
        chain.options(micro_batch=size, runner="inline", on_error="skip", max_errors=3),
        RecordError,
        r"row 199: ValueError",
    )
    rows = [row["x"] for batch in batches for row in batch]
    assert rows == [x for x in range(199) if x % 2 and x % 50 != 49][: len(rows)] and len(rows) == 96
    assert len(caplog.records) == 4


@pytest.mark.parametrize("size", SIZES)
def test_a_block_function_gives_what_is_before_the_row_that_it_fails_on(size: int) -> None:
    def fn(columns: dict[str, Any]) -> dict[str, Any]:
        if 199 in columns["x"]:
            raise ValueError("bad")
        return {"x": columns["x"], "n": [n + 1000 for n in columns["n"]]}

    batches = delivered(
        pipeline().map_block(fn).batch(4).options(micro_batch=size), OperatorError, "row 199: ValueError: bad"
    )
    assert [row["x"] for batch in batches for row in batch] == list(range(196))
    chain = pipeline().map_block(fn).batch(4).options(micro_batch=size, on_error="skip")
    assert [row.payload["x"] for batch in chain for row in batch.records] == [x for x in range(397) if x != 199]


def test_a_block_function_that_fails_on_no_row_alone_is_an_error() -> None:
    def fn(columns: dict[str, Any]) -> dict[str, Any]:
        if len(columns["x"]) > 1:
            raise MemoryError("too large")
        return columns

    chain = pipeline().map_block(fn).batch(4).options(micro_batch=8, on_error="skip")
    delivered(
        chain,
        OperatorError,
        r"map_block\(.*fn\) raised MemoryError: too large on 8 rows that begin with .* row 0, and",
    )


@pytest.mark.parametrize("size", SIZES)
def test_what_was_dropped_before_a_record_that_fails_is_counted_over_the_chain(size: int) -> None:
    def run(state: Any, bad: int) -> tuple[Any, Any]:
        chain = pipeline(256).filter(lambda row: row["x"] % 2 == 0).map_transform(fail_at(bad)).batch(4)
        chain.options(runner="inline", micro_batch=size)
        if state is not None:
            chain.restore(state)
        try:
            for _ in chain:
                pass
        except OperatorError:
            pass
        (counted,) = chain.metrics_snapshot().datasets
        return chain.checkpoint(), (counted.delivered, sum(counted.dropped.values()))

    state, (delivered_1, dropped_1) = run(None, 100)
    _, (delivered_2, dropped_2) = run(state, -1)
    assert (delivered_1, dropped_1) == (48, 47)
    assert (delivered_1 + delivered_2, dropped_1 + dropped_2) == run(None, -1)[1] == (128, 128)


def test_rows_before_a_row_are_found_by_the_pieces_that_it_was_cut_into() -> None:
    def origin(*rows: tuple[int, int, int]) -> Origin:
        ids = np.zeros((len(rows), ORIGIN_WIDTH), np.int64)
        ids[:, [CHUNK, OFFSET, PIECE]] = rows
        return Origin(ids)

    whole = origin((0, 0, 0), (0, 1, 0), (0, 2, 5), (1, 0, 0))
    cut = origin((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 2, 5 << PIECE_BITS), (0, 2, 5 << PIECE_BITS | 1), (1, 0, 0))
    assert rows_before(whole, [0, 1, 2, 3], cut) == [0, 2, 3, 5]
    assert rows_before(whole, [2], origin((0, 1, 0), (1, 0, 0))) == [1]
    assert rows_before(whole, [3], Block(0, Origin.empty(), {}).origin) == [0]

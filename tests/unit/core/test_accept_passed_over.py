"""What a change on purpose passes over is said, so that every sample is accounted for."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource

Row = dict[str, int]


def build(keep: Callable[[Row], bool], buffer: int = 20, **options: Any) -> Pipeline:
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"x": k} for k in range(200)])})
    source = StaticMixtureWorkSource([data], MixtureSpec({"toy": 1.0}), chunk_size=64)
    return (
        Pipeline(source)
        .filter(keep)
        .shuffle(buffer)
        .batch(4, drop_last=False)
        .options(runner="inline", cut_every=32, **options)
    )


def all_of(row: Row) -> bool:
    return row["x"] >= 0


def even(row: Row) -> bool:
    return row["x"] % 2 == 0


def of(batches: Any) -> list[int]:
    return [record.payload["x"] for batch in batches for record in batch.records]


@pytest.mark.parametrize("first", [0, 6, 25])
def test_each_sample_is_delivered_dropped_or_passed_over(first: int, caplog: pytest.LogCaptureFixture) -> None:
    before, after = build(all_of), build(even)
    iterator = iter(before)
    delivered = of(islice(iterator, first))
    state = before.checkpoint()
    iterator.close()
    with caplog.at_level(logging.WARNING, logger="headrace"):
        after.restore(state, accept={"filter"})
    came = of(after)
    summary = after.metrics_snapshot()
    assert summary is not None
    (toy,) = summary.datasets
    assert toy.handed_out == toy.delivered + sum(toy.dropped.values()) and toy.delivered == len(came)
    gone = 200 - len(delivered) - toy.handed_out
    if not first:
        assert gone == 0 and not caplog.messages
        return
    (message,) = caplog.messages
    most, goes_on = map(int, re.findall(r"at most (\d+)\..* 0 at sample (\d+)", message)[0])
    assert gone == goes_on - len(delivered) > 0 and gone <= most
    assert set(range(goes_on)) >= set(delivered) and set(came) == {x for x in range(goes_on, 200) if x % 2 == 0}


def test_changes_that_lose_nothing_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before, after = build(all_of), build(all_of, buffer=9)
    iterator = iter(before)
    delivered = of(islice(iterator, 6))
    state = before.checkpoint()
    iterator.close()
    with caplog.at_level(logging.WARNING, logger="headrace"):
        after.restore(state, accept={"shuffle"})
        assert sorted(delivered + of(after)) == list(range(200))
    assert not caplog.messages

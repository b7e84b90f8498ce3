"""A run that drops everything says so, once; one that gives batches does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.errors import OperatorError
from headrace.run import stretch


def endless(keep: Callable[[int], bool], **options: Any) -> Pipeline:
    """A filter over 64 rows again and again; it raises after 5000 of them, since nothing else would end the wait."""
    seen = 0

    def predicate(row: dict[str, int]) -> bool:
        nonlocal seen
        seen += 1
        if seen > 5000:
            raise RuntimeError("enough")
        return keep(row["x"])

    data = Dataset.from_dict("toy", {0: InMemoryShard([{"x": k} for k in range(64)])})
    source = StaticMixtureWorkSource([data], MixtureSpec({"toy": 1.0}), chunk_size=32, stop_after_passes=None)
    return Pipeline(source).filter(predicate).batch(4).options(cut_every=50, auto_validation="off", **options)


@pytest.mark.parametrize("options", [{"runner": "inline"}, {"runner": "threads", "canonical_replicas": 3}])
def test_a_run_that_drops_everything_says_so_once(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretch, "LONG", 1000)
    with caplog.at_level(logging.WARNING, logger="headrace"), pytest.raises(OperatorError, match="enough"):
        next(iter(endless(lambda x: False, **options)))
    (message,) = caplog.messages
    assert "no batch for a long stretch: the last 10" in message
    assert "of 'toy' (filter: filtered)" in message


def test_a_run_whose_batches_are_far_apart_is_told_of_once_and_one_that_goes_on_never(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 rows one is kept, so that 252 are dropped for each batch."""
    for long, told in ((260, 0), (150, 1)):
        monkeypatch.setattr(stretch, "LONG", long)
        caplog.clear()
        iterator = iter(endless(lambda x: x == 7, runner="inline"))
        assert len(list(islice(iterator, 12))) == 12
        iterator.close()
        assert len(caplog.messages) == told

"""Logs that have little or nothing in common: "the same stream" is said only of what was compared."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource, verify
from headrace.errors import DataError
from headrace.run import digest


def run(log: Path, batches: int, state: Any = None, seed: int = 1, size: int = 4, **options: Any) -> Any:
    """Deliver some batches into a log; the checkpoint after the last."""
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"x": k} for k in range(100)])})
    source = StaticMixtureWorkSource(
        [data], MixtureSpec({"toy": 1.0}), chunk_size=16, seed=seed, shuffle_within_shard=True
    )
    pipeline = (
        Pipeline(source)
        .batch(size)
        .options(runner="inline", digest=True, digest_log=str(log), uneven="keep", **options)
    )
    if state is not None:
        pipeline.restore(state)
    iterator = iter(pipeline)
    assert len(list(islice(iterator, batches))) == batches
    iterator.close()
    return pipeline.checkpoint()


def test_logs_without_a_batch_in_common_were_not_compared(tmp_path: Path) -> None:
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    state = run(a, 5)
    run(b, 0, seed=99, size=5)
    with pytest.raises(DataError, match="a holds 5 batches from number 0 to 4, b holds no batch at all"):
        verify.diff(a, b)
    with pytest.raises(DataError, match="a holds no batch at all, b holds no batch"):
        verify.diff(b, b)
    run(c, 5, state)
    with pytest.raises(DataError, match="b holds 5 batches from number 5 to 9"):
        verify.diff(a, c)
    whole = tmp_path / "whole"
    run(whole, 10)
    assert verify.diff(whole, [a, c]) is None
    assert verify.diff(whole, c) is None, "a resumed leg is compared for what it holds"


def test_ranks_that_share_no_batch_were_not_compared(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank{rank}" for rank in range(2)]
    for rank, log in enumerate(logs):
        run(log, 3, dp_degree=2, dp_group_id=rank)
    with pytest.raises(DataError, match="no batch in common"):
        verify.diff(*logs)


def test_another_recipe_is_said_beside_what_it_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs = {name: tmp_path / name for name in ("one", "again", "seed", "lanes")}
    run(logs["one"], 6)
    run(logs["again"], 6)
    run(logs["seed"], 6, seed=2)
    run(logs["lanes"], 6, canonical_replicas=2)
    assert verify.diff(logs["one"], logs["again"]) is None and not caplog.messages
    found = verify.diff(logs["one"], logs["seed"])
    assert found is not None and found.batch == 0 and "other samples (the runs are of different recipes)" in found.what
    found = verify.diff(logs["one"], logs["lanes"])
    assert found is not None and "the runs have 1 and 2 lanes" in found.what


def test_the_same_batches_of_another_recipe_are_the_same_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    run(a, 4)
    b.write_bytes(a.read_bytes().replace(b'"recipe":"', b'"recipe":"0'))
    with caplog.at_level(logging.WARNING, logger="headrace"):
        assert verify.diff(a, b) is None
    (message,) = caplog.messages
    assert "the 4 batches that both logs hold are the same" in message and "different recipes" in message


def test_a_missing_batch_is_found_with_contiguous_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "GROUP", 1)
    options: Any = {"canonical_replicas": 4, "dp_degree": 2, "mapping_strategy": "contiguous"}
    logs = [tmp_path / f"rank{rank}" for rank in range(2)]
    for rank, log in enumerate(logs):
        run(log, 6, dp_group_id=rank, **options)
    lines = logs[1].read_bytes().splitlines(keepends=True)
    short, last = tmp_path / "short", tmp_path / "last"
    short.write_bytes(b"".join(lines[:3] + lines[4:]))  # the third of 2, 3, 6, 7, 10, 11
    last.write_bytes(b"".join(lines[:-1]))
    found = verify.diff(logs, [logs[0], short])
    assert found is not None and found.batch == 6 and found.what == "b lacks this batch"
    assert verify.diff(logs, [logs[0], last]) is None and verify.diff(logs, logs[0]) is None

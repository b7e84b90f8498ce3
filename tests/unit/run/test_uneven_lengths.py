"""Lengths of lanes by arithmetic: only where every row of the datasets is a record, and checked as the lanes end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource, steps
from headrace.core.lanes import Topology
from headrace.errors import ConfigError, DataError
from headrace.run.uneven_plan import Run, lane_lengths


def some_rows(number: int) -> Iterator[dict[str, int]]:
    """Every row of one lane, and half of those of the other."""
    if (number // 8) % 2 == 0 or number < 48:
        yield {"x": number}


def made() -> Dataset:
    return steps.Pipeline([some_rows], runner="inline").dataset("s", list(range(96)))


def of_group(group: int, data: Any, **options: Any) -> Pipeline:
    source = StaticMixtureWorkSource(
        [data], MixtureSpec({data.name: 1.0}), chunk_size=8, lane_assignment="modulo", shuffle_shards=False
    )
    return Pipeline(source).batch(4).options(dp_degree=2, dp_group_id=group, runner="inline", **options)


def lengths(pipeline: Pipeline) -> dict[int, int] | None:
    return lane_lengths(Run(pipeline.plan(), pipeline._options, Topology(2, 2), pipeline.work_source, 0))


def test_lengths_are_unknown_where_a_dataset_may_leave_rows_out() -> None:
    whole = Dataset.from_dict("w", {0: InMemoryShard([{"x": k} for k in range(96)])})
    assert lengths(of_group(0, whole)) == {0: 12, 1: 12}
    assert lengths(of_group(0, made())) is None
    assert lengths(of_group(0, SilentDataset(whole, ()))) is None
    for group in range(2):
        with pytest.raises(ConfigError, match=f"group {group} of 2 cannot know .*aggregate_dir"):
            iter(of_group(group, made()))


def test_groups_agree_where_a_step_leaves_rows_out(tmp_path: Path) -> None:
    delivered = [0, 0]

    def run(group: int) -> None:
        delivered[group] = sum(
            1 for _ in of_group(group, made(), aggregate_dir=str(tmp_path), aggregate_timeout_s=60.0)
        )

    threads = [threading.Thread(target=run, args=(group,)) for group in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert delivered == [6, 6]


class SilentDataset:
    """A dataset of a user's own, which leaves rows out and may say that it does not."""

    format = "own"

    def __init__(self, whole: Dataset, gone: tuple[int, ...]) -> None:
        self._whole, self._gone = whole, gone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    every_row = property(lambda self: bool(self._gone))

    def open(self, options: Any = None) -> SilentDataset:
        return self

    def read(self, shard: int, rows: Any, fields: Any = None, bad: Any = None) -> list[Any]:
        left_out = [place for place, row in enumerate(rows.tolist()) if row in self._gone]
        for place in left_out:
            bad.leave_out(place)
        return [{"x": row} for row in rows.tolist() if row not in self._gone]


@pytest.mark.parametrize("rule", ["drop", "pad"])
def test_a_lane_that_does_not_have_its_length_is_an_error(rule: Any) -> None:
    whole = Dataset.from_dict("w", {0: InMemoryShard([{"x": k} for k in range(96)])})
    broken = SilentDataset(whole, tuple(range(40)))
    with pytest.raises(DataError, match=r"lane 0 has 12 batches by the curriculum, and ended after 6; .*every_row"):
        list(of_group(0, broken, uneven=rule))

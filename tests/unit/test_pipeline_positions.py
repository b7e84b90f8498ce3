"""Where a pipeline stands: nothing but a delivered batch moves it, and a position stays with its recipe."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.errors import CheckpointError, CheckpointMismatch, ConfigError, OperatorError
from headrace.run.digest import DigestLog
from headrace.types import SampleBatch


def pipeline(n: int = 100, **options: Any) -> Pipeline:
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"x": i} for i in range(n)])})
    source = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"toy": 1.0}), chunk_size=16, seed=1)
    return Pipeline(source).batch(4).options(runner="inline", **options)


def numbers(batch: Any) -> list[int]:
    return [record.payload["x"] for record in batch.records]


def saved(batches: int, make: Callable[[], Pipeline] = pipeline) -> tuple[dict[str, Any], list[list[int]]]:
    """A checkpoint after so many batches, and those that follow."""
    run = make()
    iterator = iter(run)
    list(islice(iterator, batches))
    return run.checkpoint(), [numbers(batch) for batch in iterator]


# -- a restored state waits until something was delivered --------------------------------------------


def test_a_run_that_cannot_begin_leaves_the_restored_state(tmp_path: Path) -> None:
    state, rest = saved(5)
    (tmp_path / "file").touch()
    run = pipeline(digest=True, digest_log=str(tmp_path / "file" / "log.jsonl"))
    run.restore(state)
    with pytest.raises(OSError, match="file"):
        iter(run)
    assert run.starts_at == 5 and run.checkpoint() == state
    run.options(digest_log=str(tmp_path / "log.jsonl"))
    assert [numbers(batch) for batch in run] == rest


def test_a_setting_that_an_error_asks_for_is_made_and_the_run_goes_on() -> None:
    def make(**options: Any) -> Pipeline:
        return pipeline(canonical_replicas=4, **options).map_batch(lambda batch: batch)

    state, rest = saved(4, make)
    run = make(dp_degree=2, dp_group_id=0)
    run.restore(state)
    with pytest.raises(ConfigError, match="aggregate_dir"):
        iter(run)
    run.options(uneven="keep")
    assert run.starts_at == 4 and numbers(next(iter(run))) == rest[0]


def test_a_worker_that_cannot_start_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state, rest = saved(5)
    run = pipeline()
    run.restore(state)
    with monkeypatch.context() as broken:
        broken.setattr("headrace.run.engine.Engine.start", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            iter(run)
    assert [numbers(batch) for batch in run] == rest


def test_an_iterator_that_was_closed_before_its_first_batch_leaves_it() -> None:
    state, rest = saved(5)
    run = pipeline()
    run.restore(state)
    for _ in range(2):
        iter(run).close()
        assert run.starts_at == 5 and run.checkpoint() == state
    assert [numbers(batch) for batch in run] == rest
    assert run.starts_at == 0 and len(list(run)) == 25


def test_an_error_before_the_first_batch_leaves_it() -> None:
    bad: set[int] = {20}

    def look(payload: dict[str, Any]) -> dict[str, Any]:
        assert payload["x"] not in bad
        return payload

    state, rest = saved(5, lambda: pipeline().map_batch(lambda batch: batch))
    assert rest[0][0] == 20
    run = pipeline().map_batch(lambda batch: [look(record.payload) for record in batch.records] and batch)
    run.restore({**state, "recipe": run.recipe()})  # a function's code is part of a recipe
    with pytest.raises(OperatorError):
        list(run)
    bad.clear()
    assert [numbers(batch) for batch in run] == rest


# -- a position belongs to a recipe ------------------------------------------------------------------


def test_settings_do_not_move_the_position() -> None:
    run = pipeline()
    list(islice(run, 5))
    state = run.checkpoint()
    assert state["position"] == 5
    for change in (lambda: run.options(prefetch_batches=3), lambda: run.fetch_parallelism(1, max_batch=7)):
        change()
        assert run.checkpoint() == state
    assert numbers(next(iter(run))) == [0, 1, 2, 3]  # another iteration begins anew, as ever


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run.map_batch(lambda batch: batch), "map_batch"),
        (lambda run: run.options(canonical_replicas=3), r"canonical_replicas: 1 -> 3"),
        (lambda run: setattr(run, "work_source", pipeline(60).work_source), "rows: 100 -> 60"),
    ],
    ids=["operator", "lanes", "data"],
)
def test_a_changed_recipe_has_no_position_of_another(change: Callable[[Pipeline], Any], message: str) -> None:
    run = pipeline()
    list(islice(run, 5))
    change(run)
    with pytest.raises(CheckpointError, match=f"(?s)was changed after its last run.*{message}"):
        run.checkpoint()
    first = next(iter(run))
    assert numbers(first) == [0, 1, 2, 3] and run.checkpoint()["position"] == 1


def test_nor_has_a_restored_state_that_waits() -> None:
    state, _ = saved(5)
    run = pipeline()
    run.restore(state)
    run.map_batch(lambda batch: batch)
    for use in (run.checkpoint, lambda: iter(run), run.state_dict):
        with pytest.raises(CheckpointMismatch, match="map_batch"):
            use()
    assert run.starts_at == 5


def test_what_was_delivered_does_not_travel_and_what_waits_does() -> None:
    state, rest = saved(5)
    run = pipeline()
    run.restore(state)
    for other in (pickle.loads(pickle.dumps(run)), copy.deepcopy(run)):
        assert [numbers(batch) for batch in other] == rest
    list(islice(run, 2))
    assert run.checkpoint()["position"] == 7
    assert pickle.loads(pickle.dumps(run)).checkpoint()["position"] == 0


# -- a batch counts when the loop has it ---------------------------------------------------------------


def test_a_batch_that_cannot_be_digested_was_not_delivered() -> None:
    class Opaque:
        pass

    def third(batch: Any) -> Any:
        return {"v": Opaque() if numbers(batch)[0] == 8 else numbers(batch)}

    run = pipeline(digest=True).map_batch(third)
    got: list[Any] = []
    with pytest.raises(ConfigError, match="digest"):
        got.extend(value["v"] for value in run)
    state = run.checkpoint()
    summary = run.metrics_snapshot()
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7]] and state["position"] == 2
    assert summary is not None and summary.batches == 2
    again = pipeline().map_batch(third)
    again.restore(state)
    iterator = iter(again)
    assert isinstance(next(iterator)["v"], Opaque) and next(iterator)["v"] == [12, 13, 14, 15]


def test_nor_was_one_that_could_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    run = pipeline(digest=True)
    iterator = iter(run)
    next(iterator)
    with monkeypatch.context() as broken:
        broken.setattr(SampleBatch, "from_block", classmethod(lambda cls, block: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            next(iterator)
    assert run.checkpoint()["position"] == 1
    run.restore(run.checkpoint())
    assert numbers(next(iter(run))) == [4, 5, 6, 7]


@pytest.mark.parametrize("group", [0, 1])
def test_nor_with_lanes_that_groups_share(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Pipeline:
        return pipeline(canonical_replicas=3, dp_degree=2, dp_group_id=group, uneven="keep")

    for taken in range(8):
        state, rest = saved(taken, make)
        run = make()
        iterator = iter(run)
        list(islice(iterator, taken))
        with monkeypatch.context() as broken:
            broken.setattr(SampleBatch, "from_block", classmethod(lambda cls, block: 1 / 0))
            with pytest.raises(ZeroDivisionError):
                next(iterator)
        assert run.checkpoint() == state
        run.restore(state)
        assert [numbers(batch) for batch in run] == rest


def test_a_run_ends_whatever_its_parts_say_about_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pipeline(digest=True, digest_log=str(tmp_path / "log.jsonl"))
    iterator = iter(run)
    list(islice(iterator, 2))
    closed: list[bool] = []
    really = DigestLog.close
    close = type(iterator.consumer).close
    monkeypatch.setattr(type(iterator.consumer), "close", lambda self: (closed.append(True), close(self))[1])
    with monkeypatch.context() as broken:
        broken.setattr("headrace.run.digest.DigestLog.close", lambda self: (really(self), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            iterator.close()
    assert closed == [True] and run.checkpoint()["position"] == 2

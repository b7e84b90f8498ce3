"""The collective checkpoint: what every rank receives, what stale and missing ranks do to it, over each kind of board."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from obstore.store import LocalStore

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.errors import CheckpointError, ConfigError
from headrace.run import aggregate
from headrace.run.aggregate import Aggregation, Codec
from headrace.run.board import Board, FolderBoard, StoreBoard, open_board

BOARDS = ("folder", "store", "memory")


@pytest.fixture(params=BOARDS)
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Board]]:
    """Opens the same board again and again, as ranks do."""
    match request.param:
        case "folder":
            yield lambda: FolderBoard(str(tmp_path / "shared"))
        case "store":
            yield lambda: StoreBoard(LocalStore(str(tmp_path)), "store", "some/prefix")
        case _:
            yield lambda: open_board(f"memory://{tmp_path.name}/prefix")


def state(rank: int, position: int = 8, **extra: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "canonical_replicas": 4,
        "position": position,
        "recipe": {"seed": 0, **extra},
        "lanes": {str(rank): {"taken": 2, "held": b"\x00\xff" * 30, "lane": rank}},
    }


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results (or exceptions) of calls that run at the same time."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001  handed to the test
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def ranks(board: Callable[[], Board], world: int, **settings: Any) -> list[Aggregation]:
    return [Aggregation(board(), rank, world, **{"timeout_s": 20.0, **settings}) for rank in range(world)]


@pytest.mark.parametrize("codec", [Codec(), Codec("json", "none"), Codec("json", "zstd"), Codec("msgpack", "none")])
def test_every_rank_receives_the_state_of_all(board: Callable[[], Board], codec: Codec) -> None:
    ends = ranks(board, 3, codec=codec)
    results = together([lambda r=r, end=end: end.gather(state(r)) for r, end in enumerate(ends)])
    assert results[0] == results[1] == results[2]
    assert results[0]["lanes"] == {str(r): state(r)["lanes"][str(r)] for r in range(3)}


def test_again_and_again_at_the_same_and_at_later_steps(board: Callable[[], Board]) -> None:
    ends = ranks(board, 3)

    def rank(number: int) -> list[int]:
        return [ends[number].gather(state(number, position))["position"] for position in (0, 0, 4, 8, 8, 12)]

    assert together([lambda r=r: rank(r) for r in range(3)]) == [[0, 0, 4, 8, 8, 12]] * 3


def test_a_rank_that_does_not_come_is_named_within_the_time_out(board: Callable[[], Board]) -> None:
    ends = ranks(board, 4, timeout_s=0.6)
    before = time.monotonic()
    results = together([lambda r=r: ends[r].gather(state(r)) for r in (0, 2)])
    assert time.monotonic() - before < 20
    assert all(isinstance(result, CheckpointError) for result in results)
    assert "ranks 1, 3 to call checkpoint()" in str(results[0])
    assert "each rank's own checkpoint needs no other" in str(results[0])
    assert "ranks 1, 3" in str(results[1])


def test_saving_on_one_rank_alone_says_who_is_missing(board: Callable[[], Board]) -> None:
    (leader, follower) = ranks(board, 2, timeout_s=0.2)
    with pytest.raises(CheckpointError, match=r"rank 0 waited .* for rank 1"):
        leader.gather(state(0))
    with pytest.raises(CheckpointError, match=r"rank 1 waited .* for rank 0"):
        follower.gather(state(1))


def test_after_a_failed_round_the_next_one_works(board: Callable[[], Board]) -> None:
    ends = ranks(board, 2, timeout_s=10.0)
    with pytest.raises(CheckpointError):
        Aggregation(board(), 0, 2, timeout_s=0.1).gather(state(0, 4))
    results = together([lambda r=r: ends[r].gather(state(r, 4)) for r in (0, 1)])
    assert results[0] == results[1] and sorted(results[0]["lanes"]) == ["0", "1"]


def test_a_late_rank_is_waited_for(board: Callable[[], Board], caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(aggregate, "SAY_AFTER_S", 0.05)
    ends = ranks(board, 2)

    def late() -> Any:
        time.sleep(0.5)
        return ends[1].gather(state(1))

    with caplog.at_level(logging.WARNING, "headrace"):
        results = together([lambda: ends[0].gather(state(0)), late])
    assert results[0] == results[1]
    assert "rank 0 waits for rank 1" in caplog.text


def test_what_a_dead_job_left_is_never_taken_for_an_answer(board: Callable[[], Board]) -> None:
    """Same run id, same step, other content: the whole last round is still there, and half of one that was never finished."""
    together([lambda r=r, e=e: e.gather(state(r, seed=1)) for r, e in enumerate(ranks(board, 3))])
    with pytest.raises(CheckpointError):
        Aggregation(board(), 0, 3, timeout_s=0.1).gather(state(0, seed=1))
    ends = ranks(board, 3)

    def slow_leader() -> Any:
        time.sleep(0.3)  # the others see the dead leader's call first, and answer it
        return ends[0].gather(state(0))

    results = together([slow_leader, lambda: ends[1].gather(state(1)), lambda: ends[2].gather(state(2))])
    assert results[0] == results[1] == results[2]
    assert results[0]["recipe"] == {"seed": 0} and sorted(results[0]["lanes"]) == ["0", "1", "2"]


def test_ranks_at_different_steps_are_told_on_every_rank(board: Callable[[], Board]) -> None:
    ends = ranks(board, 2)
    results = together([lambda r=r: ends[r].gather(state(r, position=8 + 4 * r)) for r in (0, 1)])
    assert all(isinstance(result, CheckpointError) for result in results)
    assert "rank 0: 8, rank 1: 12" in str(results[0]) and "rank 0: 8, rank 1: 12" in str(results[1])


def test_contradictions_are_told(board: Callable[[], Board]) -> None:
    ends = ranks(board, 2)
    results = together([lambda r=r: ends[r].gather(state(r, extra=r)) for r in (0, 1)])
    assert "different recipes: extra: 0 -> 1" in str(results[0]) and "different recipes" in str(results[1])
    three = Aggregation(board(), 1, 3, timeout_s=10)
    results = together([lambda: ends[0].gather(state(0)), lambda: three.gather(state(1))])
    assert "rank 1 has world_size=3, rank 0 has 2" in str(results[0])


def test_two_runs_under_one_run_id_are_found_out(board: Callable[[], Board]) -> None:
    first = Aggregation(board(), 0, 2, timeout_s=20)
    second = Aggregation(board(), 0, 2, timeout_s=1)

    def later() -> Any:
        time.sleep(0.2)
        return second.gather(state(0))

    results = together([lambda: first.gather(state(0)), later])
    assert "another run has begun a checkpoint" in str(results[0]) and "run_id of its own" in str(results[0])


def test_ranks_that_encode_differently_are_told(tmp_path: Path) -> None:
    def ends(rank: int, codec: Codec) -> Aggregation:
        return Aggregation(FolderBoard(str(tmp_path)), rank, 2, timeout_s=0.5, codec=codec)

    results = together(
        [lambda: ends(0, Codec("json", "none")).gather(state(0)), lambda: ends(1, Codec()).gather(state(1))]
    )
    assert all(isinstance(result, CheckpointError) for result in results)


def test_little_is_left_behind_and_nothing_half_written(tmp_path: Path) -> None:
    ends = ranks(lambda: FolderBoard(str(tmp_path)), 2)
    for position in range(5):
        together([lambda r=r, p=position: ends[r].gather(state(r, p)) for r in (0, 1)])
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert [name.rpartition("/")[2] for name in names if "/" in name] == ["merged", "rank-1"]
    assert "call" in names and not any("writing" in name for name in names)


def test_a_killed_writer_leaves_no_half_message(tmp_path: Path) -> None:
    board = FolderBoard(str(tmp_path))
    board.put("call", b"old")
    with open(tmp_path / ".writing-abc", "wb") as file:
        file.write(b"ha")
    assert board.get("call") == b"old" and board.present("", ["call", ".writing"]) == {"call"}
    board.put("call", b"new")
    assert board.get("call") == b"new"


def test_codecs_keep_bytes() -> None:
    message = {"a": b"\x00\x01", "b": [1, {"c": b""}], "d": "text", "e": None}
    for codec in (Codec(), Codec("json", "none")):
        assert codec.decode(codec.encode(message)) == message
    assert msgspec.json.decode(Codec("json", "none").encode(message))["d"] == "text"


# -- through the pipeline --------------------------------------------------------------------------


def pipeline(rank: int, world: int, folder: Any, **options: Any) -> Pipeline:
    data = Dataset.from_dict("a", {0: InMemoryShard([{"x": i} for i in range(60)])})
    work = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"a": 1.0}), stop_after_passes=None)
    identity = {"world_size": world, "global_rank": rank, "canonical_replicas": 6}
    return (
        Pipeline(work)
        .batch(2)
        .options(runner="inline", aggregate_dir=folder, aggregate_timeout_s=20.0, **identity, **options)
    )


def test_the_merged_state_resumes_any_number_of_ranks(tmp_path: Path) -> None:
    def save(rank: int) -> Any:
        made = pipeline(rank, 3, str(tmp_path), run_id="mine")
        iterator = iter(made)
        for _ in range(2):
            next(iterator)
        merged = made.checkpoint()
        iterator.close()
        return merged

    results = together([lambda r=r: save(r) for r in range(3)])
    assert results[0] == results[1] == results[2] and len(results[0]["lanes"]) == 6
    assert os.listdir(tmp_path) == ["mine"]
    alone = pipeline(0, 1, None)
    iterator = iter(alone)
    for _ in range(6):
        next(iterator)
    expected = next(iterator).ids
    assert alone.checkpoint()["lanes"]["1"] == results[0]["lanes"]["1"]
    iterator.close()
    for world in (1, 2, 6):
        made = pipeline(0, world, None)
        made.restore(results[0])
        assert next(iter(made)).ids == expected


def test_iterating_and_one_rank_need_no_directory(tmp_path: Path) -> None:
    assert len(next(iter(pipeline(1, 4, None)))) == 2
    assert pipeline(0, 1, str(tmp_path / "unused")).checkpoint()["position"] == 0
    assert not (tmp_path / "unused").exists()
    assert pipeline(3, 4, str(tmp_path / "unused")).state_dict().keys() == {
        "headrace.run",
        "headrace.lane.1",
        "headrace.lane.3",
        "headrace.lane.5",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregate_dir": "a", "aggregate_store": "torch://"}, "give one of the two"),
        ({"aggregate_store": "redis://x"}, "torch://host:port"),
        ({"aggregate_timeout_s": 0.0}, "aggregate_timeout_s"),
        ({"aggregate_serializer": "pickle"}, "msgpack"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline(0, 2, None).options(**options)

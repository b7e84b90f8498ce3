"""Reading a file from several places at once, and readers in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError, DataChangedError, WorkerDied
from headrace.steps import FileReader, Pipeline, emit, split_seeks
from headrace.steps.emission import BLOCK

every_runner = pytest.mark.parametrize("runner", ["inline", "threads", "process"])
LINES = st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=12), max_size=40)


def keep(x: Any) -> Any:
    return x


@settings(deadline=None, max_examples=60)
@given(lines=LINES, splits=st.integers(1, 7), last_newline=st.booleans(), crlf=st.booleans(), mark=st.booleans())
def test_parts_cover_a_file_exactly(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], splits: int, last_newline: bool, crlf: bool, mark: bool
) -> None:
    end = "\r\n" if crlf else "\n"
    text = end.join(lines) + (end if last_newline and lines else "")
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + text.encode())
    places = split_seeks(path, splits)
    assert len(places) <= splits
    assert [line for pos, count in places for line in FileReader(path, pos, count)] == list(FileReader(path))
    expected = text.split(end)
    if expected[-1] == "":
        expected.pop()
    assert [line.removeprefix("\ufeff") for line in FileReader(path)] == [
        line.removeprefix("\ufeff") for line in expected
    ] or (mark and not expected)


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes('{"a": "x\u2028y\x85z"}\n\n{"b": 1}'.encode())
    assert list(FileReader(path)) == ['{"a": "x\u2028y\x85z"}', "", '{"b": 1}']
    assert list(FileReader(path, encoding=None))[1:] == [b"", b'{"b": 1}']
    assert split_seeks(path, 1) == [(0, 3)]


def test_a_file_that_became_shorter_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a\nb\n")
    with pytest.raises(DataChangedError, match="expected 5 lines"):
        list(FileReader(path, 0, 5))
    path.write_bytes(b"a\n\xff\xfe\n")
    with pytest.raises(UnicodeDecodeError, match="line 1 from byte 0"):
        list(FileReader(path))
    with pytest.raises(ConfigError):
        split_seeks(path, 0)
    path.write_bytes(b"")
    assert split_seeks(path, 3) == []


def turns(readers: list[list[Any]]) -> list[Any]:
    """The rule of turns: BLOCK items of each reader in order, as long as it has any."""
    blocks = [[reader[k : k + BLOCK] for k in range(0, len(reader), BLOCK)] for reader in readers]
    return [item for round_ in zip_longest(*blocks, fillvalue=[]) for block in round_ for item in block]


@every_runner
@pytest.mark.parametrize("sizes", [[], [0], [0, 0], [1], [1000, 3], [300, 700, 0, 256], [5] * 6])
def test_readers_take_turns(runner: str, sizes: list[int]) -> None:
    readers = [[(r, k) for k in range(size)] for r, size in enumerate(sizes)]
    with Pipeline([keep], num_workers=2, runner=runner) as pipeline:
        emit(readers, pipeline)
        assert list(pipeline) == turns(readers)
        assert pipeline.statistics().received == sum(sizes)


@every_runner
def test_unordered_readers_give_every_item_once(runner: str) -> None:
    readers = [range(k, k + 700) for k in (0, 1000, 2000)]
    with Pipeline([keep], num_workers=2, runner=runner, ordered=False) as pipeline:
        emit(readers, pipeline)
        assert sorted(pipeline) == [x for reader in readers for x in reader]


def test_the_order_of_readers_by_seed() -> None:
    readers = [[k] for k in range(20)]

    def run(seed: int | None) -> list[int]:
        with Pipeline([keep], runner="inline") as pipeline:
            emit(readers, pipeline, seed=seed)
            return list(pipeline)

    assert run(None) == list(range(20))
    assert run(1) == run(1) != run(2)
    assert sorted(run(1)) == list(range(20))


def broken_reader(at: int) -> Iterator[int]:
    yield from range(at)
    raise LookupError(f"cannot read {at}")


class Broken:
    def __init__(self, at: int) -> None:
        self.at = at

    def __iter__(self) -> Iterator[int]:
        return broken_reader(self.at)


@every_runner
def test_an_error_of_a_reader_comes_after_what_it_read(runner: str) -> None:
    got: list[int] = []
    with Pipeline([keep], num_workers=2, runner=runner) as pipeline:
        emit([Broken(700)], pipeline)
        with pytest.raises(LookupError, match="cannot read 700"):
            for x in pipeline:
                got.append(x)  # noqa: PERF402 (kept up to the error)
    assert got == list(range(700))


class Killed(Broken):
    def __iter__(self) -> Iterator[int]:
        yield from range(self.at)
        time.sleep(0.1)  # so that what was read has left
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_emitter_is_an_error_never_an_early_end() -> None:
    with Pipeline([keep], num_workers=1) as pipeline:
        emit([Killed(300), range(1000)], pipeline)
        with pytest.raises(WorkerDied, match=r"emitter 0: .*SIGKILL"):
            list(pipeline)


class Endless(Broken):
    def __iter__(self) -> Iterator[int]:
        yield from range(10**12)


@pytest.mark.parametrize("runner", ["threads", "process"])
def test_an_emitter_does_not_run_away(runner: str) -> None:
    with Pipeline([keep], num_workers=1, runner=runner) as pipeline:
        emit([Endless(0), Endless(0)], pipeline)
        outputs = iter(pipeline)
        first = [next(outputs) for _ in range(3 * BLOCK)]
        assert first == [*range(BLOCK), *range(BLOCK), *range(BLOCK, 2 * BLOCK)]
        assert pipeline.statistics().received < 200_000


class Arrays(Broken):
    def __iter__(self) -> Iterator[Any]:
        for k in range(self.at):
            yield np.full(50_000, k)


@every_runner
def test_arrays_from_emitters(runner: str) -> None:
    with Pipeline([keep], num_workers=2, runner=runner) as pipeline:
        emit([Arrays(40), Arrays(20)], pipeline)
        outputs = [(int(array[0]), int(array[-1]), array.size) for array in pipeline]
    assert outputs == [(k, k, 50_000) for k in [*range(40), *range(20)]]


def test_enqueued_items_and_emitters_together() -> None:
    with Pipeline([keep], num_workers=1, runner="threads") as pipeline:
        pipeline.enqueue(-1)
        emit([range(10)], pipeline)
        assert sorted(pipeline) == list(range(-1, 10))


def test_what_is_no_list_of_readers_is_refused() -> None:
    with Pipeline([keep], num_workers=1, runner="inline") as pipeline:
        for bad in ("path", [3]):
            with pytest.raises(ConfigError, match="list of readers"):
                emit(bad, pipeline)

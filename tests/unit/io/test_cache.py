"""Copies and indexes: whole or absent, made once, evicted under a limit, never beside the data."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import json
import logging
import os
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.io import Dataset, build_index
from headrace.io import cache as cache_module
from headrace.io.cache import CopyCache, cache_root, key_of, locked, pauses, writing
from headrace.io.options import CacheOptions

TEXT = frozenset({"text"})
KEYS = {name: key_of(name) for name in "abcdekl"}


def _corpus(folder: Path, shards: int = 3, rows: int = 1000) -> list[list[str]]:
    folder.mkdir(exist_ok=True)
    texts = [[f"{s} {r} " + "x" * 400 for r in range(rows)] for s in range(shards)]
    for s, shard in enumerate(texts):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in shard)
        (folder / f"{s}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 1))
    return texts


def _read(reader, shard: int, rows: int = 1000) -> list[str]:
    return reader.read(shard, np.arange(rows), TEXT)["text"]


def test_nothing_is_written_beside_the_data(tmp_path: Path, cache_folder: Path) -> None:
    texts = _corpus(tmp_path / "d")
    before = sorted(os.listdir(tmp_path / "d"))
    data = Dataset.from_path("d", tmp_path / "d")
    reader = data.open()
    assert [_read(reader, s) for s in range(3)] == texts
    assert sorted(os.listdir(tmp_path / "d")) == before
    assert len(list((cache_folder / "copies").glob("*.gz"))) == 3
    assert len(list((cache_folder / "index").iterdir())) == 3


def test_copies_stay_under_the_limit(tmp_path: Path) -> None:
    texts = _corpus(tmp_path / "d", shards=5)
    options = {"cache": {"limit_bytes": 1_000_000}}  # two of them
    data = Dataset.from_path("d", tmp_path / "d", options=options)
    cache = CopyCache(CacheOptions(limit_bytes=1_000_000))
    reader = data.open()
    for shard in (0, 1, 2, 3, 4, 0, 4):
        assert _read(reader, shard) == texts[shard]
        assert cache.used() <= 1_000_000


def test_copies_made_at_the_same_time_stay_under_the_limit() -> None:
    cache = CopyCache(CacheOptions(limit_bytes=1000))
    start = threading.Barrier(4)
    most: list[int] = []

    def make(name: str) -> None:
        def slowly(out: IO[bytes]) -> None:
            for _ in range(6):
                out.write(b"x" * 70)
                most.append(cache.used())

        start.wait()
        with contextlib.suppress(ConfigError):  # the others' copies may leave no room
            os.close(cache.acquire(KEYS[name], slowly))

    threads = [threading.Thread(target=make, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) <= 1000
    assert cache.used() in (0, 420, 840)
    os.close(cache.acquire(KEYS["e"], lambda out: out.write(b"x" * 900)))
    assert cache.used() == 900


def test_a_limit_below_one_shard_says_what_to_do(tmp_path: Path, cache_folder: Path) -> None:
    _corpus(tmp_path / "d", shards=1)
    data = Dataset.from_path("d", tmp_path / "d", options={"cache": {"limit_bytes": "100kb"}})
    assert data.total() == 1000  # counting needs no copy
    with pytest.raises(ConfigError, match=r"may hold 102400 bytes.*CacheOptions\.limit_bytes"):
        _read(data.open(), 0)
    assert not list((cache_folder / "copies").glob("*.gz"))
    assert not list((cache_folder / "copies").glob("*.part"))


def test_a_copy_in_use_is_not_evicted() -> None:
    cache = CopyCache(CacheOptions(limit_bytes=1000))
    held = cache.acquire(KEYS["a"], lambda out: out.write(b"a" * 600))
    with pytest.raises(ConfigError, match="600 of them are in use"):
        cache.acquire(KEYS["b"], lambda out: out.write(b"b" * 600))
    assert os.pread(held, 1000, 0) == b"a" * 600
    os.close(held)
    os.close(cache.acquire(KEYS["b"], lambda out: out.write(b"b" * 600)))
    assert cache.used() == 600


def test_the_copy_opened_longest_ago_goes_first() -> None:
    cache = CopyCache(CacheOptions(limit_bytes=1000))
    for name in "abc":
        os.close(cache.acquire(KEYS[name], lambda out: out.write(b"x" * 300)))
        path = cache.folder / KEYS[name]
        os.utime(path, (1e9 + ord(name), 1e9 + ord(name)))
    os.close(cache.acquire(KEYS["a"], lambda out: out.write(b"never")))
    os.close(cache.acquire(KEYS["d"], lambda out: out.write(b"x" * 300)))
    assert {p.name for p in cache.folder.iterdir() if p.suffix != ".lock"} == {KEYS[name] for name in "acd"}


def test_threads_make_a_copy_once() -> None:
    cache = CopyCache(CacheOptions())
    made, barrier = [], threading.Barrier(6)

    def work() -> None:
        barrier.wait()
        os.close(cache.acquire(KEYS["k"], lambda out: (made.append(1), out.write(b"data"))))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_processes_share_a_cache(tmp_path: Path, cache_folder: Path) -> None:
    texts = _corpus(tmp_path / "d", shards=2)
    code = (
        "import sys, numpy as np; from headrace.io import Dataset;"
        "d = Dataset.from_path('d', sys.argv[1], options={'cache': {'limit_bytes': 1200000}}); r = d.open();"
        "c = [r.read(s, np.arange(1000), frozenset({'text'}))['text'] for s in (0, 1, 0, 1)];"
        "assert c[0] == c[2] and c[1] == c[3]; print(len(c[0]), c[1][-1])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "d")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for run in runs:
        out, err = run.communicate(timeout=120)
        assert out.split(" ", 1) == ["1000", texts[1][-1] + "\n"], err
    assert not list(cache_folder.rglob("*.part"))
    assert len([p for p in (cache_folder / "copies").iterdir() if p.suffix != ".lock"]) == 2


def test_half_a_file_never_appears(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), writing(tmp_path / "x") as out:
        out.write(b"half")
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_the_index_is_kept_checked_and_mended(tmp_path: Path, cache_folder: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "b"}\n')
    assert Dataset.from_path("d", path).total() == 2
    (index,) = (cache_folder / "index").iterdir()
    first = index.stat()
    assert Dataset.from_path("d", path).total() == 2
    assert index.stat().st_mtime_ns == first.st_mtime_ns  # kept
    path.write_bytes(b'{"text": "c"}\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n')  # as long as before
    assert path.stat().st_size == 28
    assert Dataset.from_path("d", path).total() == 1
    for broken in (b"", b"short", index.read_bytes()[:-3], b"\0" * 200):
        index.write_bytes(broken)
        assert Dataset.from_path("d", path).total() == 1
    index.unlink()
    data = Dataset.from_path("d", path)
    index.unlink()  # gone between making the dataset and reading it
    assert data.open().read(0, np.array([0]), TEXT) == {"text": ["c"]}


def test_an_index_beside_the_data(tmp_path: Path, cache_folder: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n')
    options = {"cache": {"index_beside": True}}
    report = build_index(tmp_path, options=options)
    assert (report.format, report.shards, report.rows, report.bytes) == ("jsonl", 1, 1, 14)
    assert sorted(os.listdir(tmp_path)) == [".a.jsonl.headrace-index", "a.jsonl"]
    assert not (cache_folder / "index").exists()
    assert Dataset.from_path("d", tmp_path, options=options).shard_names == ("a.jsonl",)


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root(CacheOptions(root=str(tmp_path / "here"))) == tmp_path / "here"
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "env"))
    assert cache_root(CacheOptions()) == tmp_path / "env"
    monkeypatch.delenv("HEADRACE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root(CacheOptions()) == tmp_path / "xdg" / "headrace"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="HEADRACE_CACHE"):
        cache_root(CacheOptions(root=str(tmp_path / "file")))


# -- locks that are held by others, or not there at all ------------------------------------------------------

HOLDER = (
    "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); "
    "sys.stdin.read()"
)


@pytest.mark.parametrize("ended", ["let go", "killed"])
def test_a_wait_for_another_process_is_told_again_and_again(
    ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_module, "_PATIENCE_S", 0.02)
    path, entered = tmp_path / "a.lock", threading.Event()

    def work() -> None:
        with locked(path):
            entered.set()

    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with caplog.at_level(logging.WARNING, "headrace"):
            worker = threading.Thread(target=work)
            worker.start()
            while len(caplog.records) < 3:
                assert not entered.is_set()
                time.sleep(0.01)
        holder.kill() if ended == "killed" else holder.communicate()
    worker.join(60)
    assert entered.is_set()
    told: list[Any] = [record.args for record in caplog.records]
    assert [args[0] for args in told] == [path] * len(told)
    assert told[0][1] < told[1][1] < told[2][1]
    assert f"waiting for the lock {path} for " in caplog.text and "HEADRACE_CACHE" in caplog.text


def test_the_words_about_a_wait_come_less_and_less_often() -> None:
    assert list(islice(pauses(), 10)) == [5, 10, 20, 40, 80, 160, 320, 600, 600, 600]


def test_a_lock_that_is_free_is_taken_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "headrace"):
        for _ in range(3):
            with locked(tmp_path / "a.lock"):
                pass
    assert caplog.records == []


def without_locks(number: int | None) -> Any:
    """`flock` of a mount without locks: an error, or one that always says yes."""

    def flock(fd: int, operation: int) -> None:
        if number is not None:
            raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, None])
def test_without_locks_work_is_done_twice_at_most(
    number: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks(number))
    cache, start = CopyCache(CacheOptions(limit_bytes=1000)), threading.Barrier(4)
    got: list[bytes] = []

    def work() -> None:
        def make(out: IO[bytes]) -> None:
            for _ in range(3):
                out.write(b"x" * 50)

        start.wait()
        fd = cache.acquire(KEYS["k"], make)
        got.append(os.pread(fd, 1000, 0))
        os.close(fd)

    with caplog.at_level(logging.WARNING, "headrace"):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held = cache.acquire(KEYS["k"], lambda out: out.write(b"never"))
        os.close(cache.acquire(KEYS["l"], lambda out: out.write(b"y" * 900)))  # k has to make room, in use or not
    assert got == [b"x" * 150] * 4
    assert os.pread(held, 1000, 0) == b"x" * 150  # whoever has it open keeps it
    os.close(held)
    assert {path.name for path in cache.folder.iterdir() if path.suffix != ".lock"} == {KEYS["l"]}
    told = [text for record in caplog.records if "has no file locks" in (text := record.getMessage())]
    assert [str(cache.folder) in text for text in told] == [True] * (number is not None)


def test_an_error_that_is_none_of_the_mount_s_locks_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"), locked(tmp_path / "a.lock"):
        pass


def test_eviction_asks_for_its_lock_as_nfs_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def as_on_nfs(fd: int, operation: int) -> None:
        writes = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if operation & fcntl.LOCK_EX and not writes:
            raise OSError(errno.EBADF, "an exclusive lock needs a file open for writing")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    cache = CopyCache(CacheOptions(limit_bytes=1000))
    for name in "abc":
        os.close(cache.acquire(KEYS[name], lambda out: out.write(b"x" * 400)))
    assert cache.used() == 800


def test_nothing_but_copies_is_removed_from_the_folder_of_copies() -> None:
    cache = CopyCache(CacheOptions(limit_bytes=1000))
    for name in ("mine.jsonl.gz", ".mine.part"):
        (cache.folder / name).write_bytes(b"x" * 900)
        os.utime(cache.folder / name, (1.0, 1.0))
    for name in "ab":
        os.close(cache.acquire(KEYS[name], lambda out: out.write(b"x" * 900)))
    assert {path.name for path in cache.folder.iterdir() if path.suffix != ".lock"} == {
        "mine.jsonl.gz",
        ".mine.part",
        KEYS["b"],
    }


def test_a_full_disk_is_said_with_what_is_needed_and_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    texts = _corpus(tmp_path / "d", shards=1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", full)
        data = Dataset.from_path("d", tmp_path / "d")
        assert data.total() == 1000  # counting needs no copy
        with pytest.raises(
            ConfigError, match=rf"the disk of {cache_folder}/copies is full.*needs \d+ bytes.*\d+ are free"
        ):
            _read(data.open(), 0)
    assert not list((cache_folder / "copies").glob("*.part"))
    assert _read(data.open(), 0) == texts[0]
    with pytest.raises(ConfigError, match="needs 5 bytes or more"), writing(tmp_path / "f") as out:
        out.write(b"12345")
        out.flush()
        full()


def test_copies_made_over_and_over_are_told_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    cache = CopyCache(CacheOptions(limit_bytes=1000))
    cache_module._had.clear()
    with caplog.at_level(logging.WARNING, "headrace"):
        for _ in range(5):
            for name in "ab":
                os.close(cache.acquire(KEYS[name], lambda out: out.write(b"x" * 600)))
    told = [text for text in caplog.messages if "is made again" in text]
    assert [f"{n} times so far" in text for n, text in zip((1, 2, 4, 8), told, strict=True)] == [True] * 4
    assert str(cache.folder / KEYS["a"]) in told[0]
    assert "1000 bytes" in told[0]


def test_new_data_under_an_old_name_is_not_served_from_the_cache(tmp_path: Path) -> None:
    for new in ("one", "two"):  # the same size, compressed and not
        for name in ("a.jsonl.gz", "b.jsonl"):
            line = json.dumps({"text": new}).encode()
            (tmp_path / name).write_bytes(gzip.compress(line, 0) if name.endswith("gz") else line)
        data = Dataset.from_path("d", tmp_path)
        assert [_read(data.open(), shard, 1) for shard in range(2)] == [[new]] * 2

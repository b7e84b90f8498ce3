"""Decoded pieces: decoded once by neighbours, bounded in bytes, let go when read through."""

from __future__ import annotations

import threading

import pytest

from headrace.io.group_cache import GroupCache


def test_neighbours_decode_once() -> None:
    cache: GroupCache[str] = GroupCache(1 << 20)
    calls, start = [], threading.Barrier(8)
    release = threading.Event()

    def decode() -> tuple[str, int, int]:
        calls.append(1)
        release.wait(5)
        return "piece", 10, 100

    got: list[str] = []

    def work() -> None:
        start.wait()
        got.append(cache.get("k", 1, decode))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    release.set()
    for thread in threads:
        thread.join()
    assert got == ["piece"] * 8
    assert len(calls) == 1


def test_limit_and_least_recently_used() -> None:
    cache: GroupCache[int] = GroupCache(100)
    decoded: list[int] = []

    def ask(key: int) -> int:
        return cache.get(key, 1, lambda: (decoded.append(key) or key, 40, 1000))

    for key in (1, 2, 1, 3, 1, 2):
        assert ask(key) == key
        assert cache.kept_bytes <= 100
    assert decoded == [1, 2, 3, 2]


def test_a_piece_read_through_is_let_go() -> None:
    cache: GroupCache[int] = GroupCache(1000)
    for served in (10, 10, 10):
        cache.get("k", served, lambda: (1, 50, 30))
    assert cache.kept_bytes == 0


def test_a_piece_over_the_limit_serves_the_reads_that_follow() -> None:
    cache: GroupCache[int] = GroupCache(10)
    decoded = []
    for _ in range(5):
        cache.get("k", 1, lambda: (decoded.append(1) or 1, 50, 30))
    assert len(decoded) == 1


def test_an_error_reaches_everybody_and_is_not_kept() -> None:
    cache: GroupCache[int] = GroupCache(10)

    def fail() -> tuple[int, int, int]:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            cache.get("k", 1, fail)
    assert cache.get("k", 1, lambda: (3, 1, 10)) == 3
    cache.clear()
    assert cache.kept_bytes == 0

"""A pooled buffer is never handed out while anybody can still see it."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.io.buffers import BufferPool

BIG = (64, 1024)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_a_dropped_buffer_is_reused() -> None:
    pool = BufferPool()
    first = _address(pool.empty(BIG, np.int64))
    assert _address(pool.empty(BIG, np.int64)) == first
    assert pool.kept_bytes == 64 * 1024 * 8


def test_views_of_every_kind_keep_a_buffer() -> None:
    pool = BufferPool()
    makers = [
        lambda a: a[3:5],
        lambda a: a.reshape(-1)[7:],
        lambda a: a.T,
        lambda a: a.view(np.int32),
        lambda a: memoryview(a),
        lambda a: a.__array_interface__ and iter(a),
    ]
    for make in makers:
        array = pool.empty(BIG, np.int64)
        address = _address(array)
        view = make(array)
        del array
        assert _address(pool.empty(BIG, np.int64)) != address, make
        del view
        gc.collect()


def test_a_tensor_keeps_a_buffer() -> None:
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    pool = BufferPool()
    array = pool.empty(BIG, np.int64)
    address = _address(array)
    tensor = torch.from_numpy(array)[1:]
    del array
    assert _address(pool.empty(BIG, np.int64)) != address
    del tensor
    assert address in {_address(pool.empty(BIG, np.int64)) for _ in range(3)}


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from([40_000, 65_536, 100_000, 300_000]), st.integers(0, 5)), max_size=60))
def test_live_arrays_keep_their_values(steps: list[tuple[int, int]]) -> None:
    pool = BufferPool(max_bytes=1 << 20, depth=4)
    live: dict[int, tuple[np.ndarray, int]] = {}
    for number, (size, slot) in enumerate(steps):
        array = pool.empty((size,), np.uint8)
        array.fill(number % 251)
        live[slot] = (array[5:-5], number % 251)
        for view, value in live.values():
            assert view[0] == view[-1] == value
        assert pool.kept_bytes <= 1 << 20


def test_threads_never_share() -> None:
    pool, wrong = BufferPool(), []

    def work(mark: int) -> None:
        for _ in range(300):
            array = pool.empty((40_000,), np.uint8)
            array.fill(mark)
            total = int(array.sum(dtype=np.int64))
            if total != mark * 40_000:
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_small_arrays_are_left_to_the_allocator() -> None:
    pool = BufferPool()
    assert pool.empty((4, 8), np.float32).shape == (4, 8)
    assert pool.kept_bytes == 0
    assert pool.empty((0, 8), np.float32).shape == (0, 8)

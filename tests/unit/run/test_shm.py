"""The slab: no allocation overlaps a living one, pages come back in any order, full means no and never wait."""

from __future__ import annotations

import gc
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.run.shm import PAGE, Arena, Recycler, SlabReader, SlabWriter, arena_bytes, create_arena


def slab(pages: int) -> tuple[Arena, SlabWriter, SlabReader]:
    arena = create_arena(pages * PAGE)
    arena.close()  # the mapping stays
    return arena, SlabWriter(arena.slab(0)), SlabReader(arena.slab(0))


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.integers(1, 5 * PAGE), max_size=40), seed=st.integers(0, 2**32))
def test_what_lives_is_never_overwritten(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    _, writer, reader = slab(8)
    living: dict[int, tuple[int, int]] = {}
    for stamp, size in enumerate(sizes):
        data = bytes([stamp % 251]) * size
        offset = writer.put(memoryview(data))
        pages_used = sum(-(-used // PAGE) for used, _ in living.values())
        if offset < 0:
            assert pages_used + -(-size // PAGE) > 8 or len(living) > 0
        else:
            assert offset not in living
            living[offset] = (size, stamp % 251)
        for place, (length, value) in living.items():
            view = reader.view(place, length)
            assert view[0] == view[length - 1] == value
        while living and rng.random() < 0.5:
            reader.release(place := rng.choice(list(living)))
            del living[place]
    assert writer.hits + writer.misses == len(sizes)


def test_an_empty_slab_is_used_from_its_start_again() -> None:
    _, writer, reader = slab(4)
    for _ in range(20):
        offset = writer.put(memoryview(bytes(3 * PAGE)))
        assert offset == 0
        reader.release(offset)
    assert writer.put(memoryview(bytes(5 * PAGE))) == -1


def test_a_lease_ends_with_the_last_array_that_sees_it() -> None:
    _, writer, reader = slab(1)
    offset = writer.put(memoryview(np.arange(100).tobytes()))
    array = np.frombuffer(reader.lease(offset, 800), np.int64).reshape(10, 10)
    view = array[3:, ::2]
    del array
    gc.collect()
    assert writer.put(memoryview(b"x")) == -1 and view[0, 0] == 30
    del view
    gc.collect()
    assert writer.put(memoryview(b"x")) == 0


def test_recycled_memory_is_never_seen_by_two() -> None:
    recycler = Recycler(limit=4 * PAGE)
    kept = []
    for k in range(50):
        copy = recycler.copy(memoryview(np.full(PAGE // 8, k)).cast("B"))
        array = np.frombuffer(copy, np.int64)
        if k % 3 == 0:
            kept.append((k, array[5:]))
        assert array.flags.writeable and (array == k).all()
    assert all((array == k).all() for k, array in kept)


def test_an_arena_has_room_for_two_slabs() -> None:
    for pages in (0, 1, 1000):
        assert arena_bytes(pages) >= 2 * pages * PAGE
    arena, _, _ = slab(2)
    arena.words[0] = 7
    other = arena.slab(1)
    other[1][0] = 1
    assert arena.words[0] == 7 and arena.slab(0)[1][0] == 0

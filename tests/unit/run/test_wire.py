"""Frames survive any cutting of the stream, with and without a slab."""

from __future__ import annotations

import gc
import pickle
import socket
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.run import wire
from headrace.run.failure import from_exception, pack, shorten, unpack
from headrace.run.shm import PAGE, SlabReader, SlabWriter, create_arena

VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=20) | st.binary(max_size=200),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
SIZES = st.lists(st.sampled_from([0, 10, 8192, 9000, 20_000]), max_size=4)


@settings(deadline=None, max_examples=60)
@given(values=VALUES, sizes=SIZES, with_slab=st.booleans(), data=st.data())
def test_a_frame_comes_out_as_it_went_in(values: Any, sizes: list[int], with_slab: bool, data: st.DataObject) -> None:
    arena = create_arena(4 * PAGE if with_slab else 0)
    arena.close()
    writer = SlabWriter(arena.slab(0)) if with_slab else None
    inbox = wire.Inbox(SlabReader(arena.slab(0)) if with_slab else None, np.array)
    arrays = [np.arange(size) for size in sizes]
    parts = wire.encode(wire.Head(wire.ACK, wire.LAST, 3, 4, 5, 0.25), (values, arrays), writer)
    stream = b"".join(bytes(part) for part in parts)
    assert wire.frame_bytes(parts) >= sum(array.nbytes for array in arrays)
    cut = data.draw(st.integers(0, len(stream) - 1))
    need = wire.parse(memoryview(stream)[:cut], inbox)
    assert isinstance(need, int) and cut < need <= len(stream)
    parsed = wire.parse(memoryview(stream + b"next"), inbox)
    assert not isinstance(parsed, int)
    frame, length = parsed
    assert length == len(stream)
    assert (frame.kind, frame.flags & wire.LAST, frame.a, frame.b, frame.first, frame.seconds) == (
        wire.ACK,
        1,
        3,
        4,
        5,
        0.25,
    )
    got, got_arrays = frame.decode()
    assert got == values
    assert all(np.array_equal(left, right) for left, right in zip(got_arrays, arrays, strict=True))


def test_a_blocking_receiver_sees_the_same_and_the_end() -> None:
    left, right = socket.socketpair()
    values = [{"text": "x" * 300_000, "array": np.arange(100_000)}, None, list(range(1000))]

    def talk() -> None:
        for value in values:
            wire.send(left, wire.encode(wire.Head(wire.ITEMS, b=1), value, None))
        left.close()

    thread = threading.Thread(target=talk)
    thread.start()
    got = [frame.decode() for frame in iter(lambda: wire.receive(right, wire.Inbox(None)), None)]
    thread.join()
    right.close()
    assert got[0]["text"] == values[0]["text"] and np.array_equal(got[0]["array"], values[0]["array"])
    assert got[1:] == values[1:]


def test_parts_already_sent_are_not_sent_again() -> None:
    queue = [memoryview(b"abc"), memoryview(b"de")]
    assert [b"".join(wire.unsent(queue, sent)) for sent in range(6)] == [b"abcde", b"bcde", b"cde", b"de", b"e", b""]


class Strict(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.lock = threading.Lock()


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), Strict(code=3), Mute(1), OSError(2, "gone"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")],
)
def test_any_exception_can_be_packed(error: BaseException) -> None:
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 (any kind is the point)
        failure = from_exception(raised, "step resize", {"k": 1})
    back = unpack(pack(failure))
    assert type(back.error) is type(error) and back.error.args == error.args
    assert (back.where, back.item) == ("step resize", "{'k': 1}")
    assert "test_any_exception_can_be_packed" in back.worker_traceback
    raised = back.raised(7)
    assert back.raised(7) is raised and len(raised.__notes__) == 1 and "item 7" in raised.__notes__[0]


def test_a_local_class_of_exception_is_told_by_name_at_least() -> None:
    class Local(Exception):
        pass

    back = unpack(pack(from_exception(Local("here"), "", None)))
    assert type(back.error).__name__ == "Local" and "here" in str(back.error)


class Shy:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_any_item_can_be_told_shortly() -> None:
    assert len(shorten({"text": "x" * 10**6, "more": list(range(10**5))})) <= 300
    assert "Shy" in shorten(Shy())


class Refuses:
    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise RuntimeError("not to be rebuilt")


@pytest.mark.parametrize("on", [True, False])
def test_reading_leaves_the_garbage_collector_as_it_was(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    seen: list[bool] = []
    gc.callbacks.append(lambda phase, info: seen.append(True))
    try:
        (gc.enable if on else gc.disable)()
        pickled = wire.Packed(wire.dumps([{"x": [k]} for k in range(5000)]), [])
        broken = wire.Packed(pickle.dumps(Refuses()), [])
        seen.clear()
        assert len(pickled.decode()) == 5000
        assert len(seen) <= 2  # one collection may follow, its start and its stop
        assert gc.isenabled() == on
        with pytest.raises(RuntimeError, match="rebuilt"):
            broken.decode()
        assert gc.isenabled() == on
        monkeypatch.setattr(threading, "active_count", lambda: 2)
        seen.clear()
        assert len(pickled.decode()) == 5000
        assert bool(seen) == on  # somebody else might switch it: it is left alone
    finally:
        gc.callbacks.pop()
        gc.enable()


def test_a_function_with_a_large_array_travels_in_one_piece() -> None:
    table = np.arange(100_000)
    for function in ({"table": table}, lambda row: table[row]):
        again = pickle.loads(wire.dumps(function))
        assert (again["table"] == table).all() if isinstance(again, dict) else again(99_999) == 99_999

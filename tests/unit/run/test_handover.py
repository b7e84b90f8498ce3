"""The bounded buffer: order, bounds, and how both sides learn of the end."""

import threading
import time

import pytest

from headrace.run.handover import SMALL, Closed, Finished, Handover


def test_everything_comes_out_in_order_and_then_the_end() -> None:
    buffer = Handover(units=8, nbytes=10**9)
    got: list[int] = []

    def produce() -> None:
        for i in range(1000):
            buffer.put(i, 1, 10)
        buffer.finish()

    thread = threading.Thread(target=produce)
    thread.start()
    with pytest.raises(Finished):
        while True:
            got += buffer.take()
    thread.join()
    assert got == list(range(1000))


def test_it_holds_half_its_bound_so_that_the_consumer_may_hold_the_other_half() -> None:
    buffer = Handover(units=8, nbytes=10**9)
    done = threading.Event()

    def produce() -> None:
        for i in range(5):
            buffer.put(i, 1)
        done.set()

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    assert not done.wait(0.2) and len(buffer) == 4
    assert list(buffer.take()) == [0, 1, 2, 3]
    assert done.wait(5) and list(buffer.take()) == [4]


@pytest.mark.parametrize(
    ("nbytes", "fixed", "held"),
    [(1000, False, 16), (1000, True, 4), (0, False, 4), (SMALL, False, 4), (SMALL // 6 + 1, False, 6)],
    ids=["small", "a number that was asked for", "of unknown size", "large", "small for a while"],
)
def test_more_of_what_is_small_is_held(nbytes: int, fixed: bool, held: int) -> None:
    buffer = Handover(units=8, nbytes=10**9, fixed=fixed)

    def produce() -> None:
        try:
            while True:
                buffer.put(0, 1, nbytes)
        except Closed:
            pass

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    deadline = time.monotonic() + 5
    while len(buffer) < held and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(buffer) == held
    buffer.close()
    thread.join()


def test_bytes_bound_it_too_but_one_item_always_fits() -> None:
    buffer = Handover(units=100, nbytes=10)
    buffer.put("big", 1, 1000)
    assert list(buffer.take()) == ["big"]


def test_a_cut_never_waits() -> None:
    buffer = Handover(units=2, nbytes=10)
    buffer.put("batch", 1, 100)
    buffer.put("cut")
    assert list(buffer.take()) == ["batch", "cut"]


def test_a_failure_comes_after_what_was_put_before_it() -> None:
    buffer = Handover(units=8, nbytes=100)
    buffer.put("batch", 1)
    buffer.fail(ValueError("broken"))
    assert list(buffer.take()) == ["batch"]
    with pytest.raises(ValueError, match="broken"):
        buffer.take()


def test_closing_ends_a_waiting_producer() -> None:
    buffer = Handover(units=2, nbytes=100)
    ended = threading.Event()

    def produce() -> None:
        try:
            while True:
                buffer.put(0, 1)
        except Closed:
            ended.set()

    threading.Thread(target=produce, daemon=True).start()
    assert not ended.wait(0.1)
    buffer.close()
    assert ended.wait(5)

"""The watchdog by itself: real sockets and threads, no torch."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable

from headrace.parallel.torch_watchdog import Address, Failure, Hub, Watchdog, own_address


class Rank:
    """One watched rank, with what it heard."""

    def __init__(self, rank: int, address: Address) -> None:
        self.heard: list[Failure] = []
        self.position = f"rank {rank} idle"
        self.dog = Watchdog(rank, address, lambda: self.position, self.heard.append)


def start(ranks: int, silence: float = 15.0) -> tuple[Hub, list[Rank]]:
    hub = Hub("127.0.0.1", silence)
    return hub, [Rank(r, hub.address) for r in range(ranks)]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come to be"
        time.sleep(0.01)


def stop(hub: Hub, ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.dog.close()
    hub.close()


def test_end_of_a_process_is_told_to_all() -> None:
    hub, ranks = start(3)
    ranks[1].position = "step 4, 1F2 (action 3 of 9)"
    time.sleep(0.3)  # its position travels with a heartbeat
    ranks[1].dog._closing.set()  # a process that dies says nothing
    ranks[1].dog._socket.shutdown(socket.SHUT_RDWR)
    until(lambda: bool(ranks[0].heard and ranks[2].heard))
    for rank in (ranks[0], ranks[2]):
        (failure,) = rank.heard
        assert failure.rank == 1
        assert "process ended" in failure.reason
        assert failure.position == "step 4, 1F2 (action 3 of 9)"
        assert rank.dog.wait_for_news(0) == failure
    ranks[1].dog._thread.join(timeout=5)
    ranks[1].dog._socket.close()
    stop(hub, ranks)


def test_own_report_goes_to_the_others_only() -> None:
    hub, ranks = start(3)
    ranks[2].position = "step 0, 2B1"
    ranks[2].dog.report("ValueError: no")
    until(lambda: bool(ranks[0].heard and ranks[1].heard))
    assert ranks[0].heard == [Failure(2, "ValueError: no", "step 0, 2B1")]
    assert ranks[2].heard == []
    ranks[1].dog.report("RuntimeError: the echo")  # what fails after the first is its consequence
    time.sleep(0.2)
    assert len(ranks[0].heard) == 1
    stop(hub, ranks)


def test_goodbye_is_no_failure() -> None:
    hub, ranks = start(2)
    ranks[1].dog.close()
    hub.close()
    ranks[0].dog._thread.join(timeout=5)
    assert not ranks[0].dog._thread.is_alive()
    assert ranks[0].heard == []
    ranks[0].dog.close()


def test_end_of_the_hub_is_a_failure_of_its_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours: list[Rank] = []
        thread = threading.Thread(
            target=lambda: ours.append(Rank(1, Address("127.0.0.1", server.getsockname()[1], "word")))
        )
        thread.start()
        connection, _ = server.accept()
        hello = json.loads(connection.recv(1000))
        assert hello == {"rank": 1, "position": "rank 1 idle", "token": "word"}
        thread.join()
        connection.close()
    until(lambda: bool(ours[0].heard))
    assert ours[0].heard[0].rank == 0
    ours[0].dog.close()


def test_silence_is_a_failure() -> None:
    hub, ranks = start(1, silence=0.6)
    with socket.create_connection((hub.address.host, hub.address.port)) as silent:
        silent.sendall(json.dumps({"rank": 7, "position": "here", "token": hub.address.token}).encode() + b"\n")
        until(lambda: bool(ranks[0].heard))
    assert ranks[0].heard[0].rank == 7
    assert "silent for 0.6 s" in ranks[0].heard[0].reason
    stop(hub, ranks)


def test_strangers_are_shown_out() -> None:
    """A wrong word, or bytes that are no message, end the connection and nothing else."""
    hub, ranks = start(1)
    for greeting in (b'{"rank":5,"token":"guess"}\n', b"GET / HTTP/1.1\r\n\r\n", b""):
        with socket.create_connection((hub.address.host, hub.address.port)) as stranger:
            if greeting:
                stranger.sendall(greeting)
                assert stranger.recv(100) == b""
    time.sleep(0.2)
    assert ranks[0].heard == []
    stop(hub, ranks)


def test_late_rank_learns_of_an_earlier_failure() -> None:
    hub, ranks = start(1)
    ranks[0].dog.report("gone")
    time.sleep(0.2)
    late = Rank(1, hub.address)
    until(lambda: bool(late.heard))
    assert late.heard[0].reason == "gone"
    stop(hub, [*ranks, late])


def test_own_address_of_a_local_peer() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"

"""The collective form of `checkpoint()`: every rank calls it, every rank gets the merged state of all.

Optional: each rank's own checkpoint needs no other rank, and `restore` takes a list of them. This form is for trainers that store
one state on one rank.

Protocol, over any board (`board.py`); rank 0 leads:

1. the leader writes `call` with a fresh random round id;
2. every rank that reads `call` writes `<round>/rank-N`: its state, and a random ticket of its own. A rank that sees another `call`
   than it answered answers again;
3. when all ranks' states are there, the leader removes what the last round left, merges them and writes `<round>/merged` with
   the tickets it used (or `<round>/failed` with the reason and the tickets);
4. a rank takes `merged` only if its own ticket is in it.

So nothing that an earlier job left behind, under the same run id and at the same step, can ever be taken for an answer: a leader
believes only answers to its own round, a rank only results made from its own answer. No locks, no clocks of other machines.
Waiting looks again after 2 ms at first, then ever later up to the board's limit.
"""

from __future__ import annotations

import base64
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import zstandard

from headrace.core import checkpoint as ckpt
from headrace.errors import CheckpointError
from headrace.run.board import Board

CALL: Final = "call"
FIRST_WAIT_S: Final = 0.002
SAY_AFTER_S: Final = 5.0
"""Seconds of waiting after which a log line names the ranks that are waited for."""

_log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class Codec:
    """How messages become bytes: msgpack or JSON, compressed or not."""

    serializer: str = "msgpack"
    compressor: str = "zstd"

    def encode(self, message: Any) -> bytes:
        """As bytes."""
        as_json = self.serializer == "json"
        data = msgspec.json.encode(_without_bytes(message)) if as_json else msgspec.msgpack.encode(message)
        return zstandard.compress(data) if self.compressor == "zstd" else data

    def decode(self, data: bytes) -> Any:
        """Back from `encode()`."""
        if self.compressor == "zstd":
            data = zstandard.ZstdDecompressor().decompress(data)
        return _with_bytes(msgspec.json.decode(data)) if self.serializer == "json" else msgspec.msgpack.decode(data)


def _without_bytes(value: Any) -> Any:
    match value:
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case Mapping():
            return {key: _without_bytes(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_bytes(item) for item in value]
        case _:
            return value


def _with_bytes(value: Any) -> Any:
    match value:
        case {"$bytes": text}:
            return base64.b64decode(text)
        case dict():
            return {key: _with_bytes(item) for key, item in value.items()}
        case list():
            return [_with_bytes(item) for item in value]
        case _:
            return value


class Aggregation:
    """One rank's end of the collective. `gather` may be called any number of times, by all ranks alike."""

    def __init__(self, board: Board, rank: int, world: int, *, timeout_s: float, codec: Codec | None = None) -> None:
        """Rank `rank` of `world`; rank 0 leads."""
        self._board, self._rank, self._world = board, rank, world
        self._timeout_s, self._codec = timeout_s, codec or Codec()

    def gather(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The merged state of all ranks.

        CheckpointError names the ranks that did not come within the time-out, or what their states disagree about; on every rank
        that takes part.
        """
        ticket = secrets.token_hex(8)
        answer = {"ticket": ticket, "world": self._world, "state": dict(state)}
        return self._lead(answer) if self._rank == 0 else self._follow(answer)

    # -- rank 0 --------------------------------------------------------------------------------------

    def _lead(self, answer: dict[str, Any]) -> dict[str, Any]:
        last = self._read(CALL)
        round_ = secrets.token_hex(8)
        self._write(CALL, round_)
        answers: dict[int, dict[str, Any]] = {0: answer}
        names = {f"rank-{rank}": rank for rank in range(1, self._world)}

        def look() -> bool:
            if self._read(CALL) != round_:
                raise CheckpointError(
                    f"another run has begun a checkpoint in {self._board.where}: two runs share aggregate_dir (or aggregate_store) "
                    "and run_id; give each run a run_id of its own"
                )
            open_ = [name for name, rank in names.items() if rank not in answers]
            for name in self._board.present(round_, open_):
                answers[names[name]] = self._read(f"{round_}/{name}")
            return len(answers) == self._world

        def missing() -> list[int]:
            return [rank for rank in range(self._world) if rank not in answers]

        try:
            self._wait(look, missing)
            if isinstance(last, str):
                self._board.remove(last)  # all ranks answered this round, so none still reads that one
            merged = self._merge(answers)
        except CheckpointError as error:
            tickets = [answer["ticket"] for answer in answers.values()]
            self._write(f"{round_}/failed", {"tickets": tickets, "reason": str(error)})
            raise
        self._write(
            f"{round_}/merged", {"tickets": [answers[r]["ticket"] for r in range(self._world)], "state": merged}
        )
        return merged

    def _merge(self, answers: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        for rank, answer in sorted(answers.items()):
            if answer["world"] != self._world:
                raise CheckpointError(f"rank {rank} has world_size={answer['world']}, rank 0 has {self._world}")
        states = [answers[rank]["state"] for rank in range(self._world)]
        if not ckpt.of_one_step(states):
            told = ", ".join(f"rank {rank}: {ckpt.delivered(state)}" for rank, state in enumerate(states))
            raise CheckpointError(
                f"the ranks called checkpoint() after different numbers of global batches ({told}); call it at the same step on all"
            )
        return ckpt.merge(states)

    # -- the others ----------------------------------------------------------------------------------

    def _follow(self, answer: dict[str, Any]) -> dict[str, Any]:
        ticket, answered = answer["ticket"], ""
        found: dict[str, Any] = {}

        def result_of(round_: str) -> bool:
            for name in self._board.present(round_, ("merged", "failed")):
                result = self._read(f"{round_}/{name}")
                if result is not None and ticket in result["tickets"]:
                    found.update(result)
            return bool(found)

        def look() -> bool:
            nonlocal answered
            call = self._read(CALL)
            if answered and result_of(answered):  # after the call: a leader ends a round before it calls the next
                return True
            if isinstance(call, str) and call != answered:
                answered = call
                self._write(f"{call}/rank-{self._rank}", answer)
            return False

        def missing() -> list[int]:
            if not answered:
                return [0]
            names = {f"rank-{rank}": rank for rank in range(1, self._world)}
            here = self._board.present(answered, names)
            return [rank for name, rank in names.items() if name not in here] or [0]

        self._wait(look, missing)
        if "reason" in found:
            raise CheckpointError(f"rank 0 could not make this checkpoint: {found['reason']}")
        return found["state"]

    # -- both ----------------------------------------------------------------------------------------

    def _wait(self, look: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        begun, pause, said = time.monotonic(), FIRST_WAIT_S, False
        while not look():
            waited = time.monotonic() - begun
            if waited >= self._timeout_s:
                raise CheckpointError(
                    f"rank {self._rank} waited {waited:.0f} s for {_names(missing())} to call checkpoint() (looking in "
                    f"{self._board.where}; option aggregate_timeout_s={self._timeout_s:g}). With aggregate_dir or "
                    "aggregate_store set, every rank must call it; without, each rank's own checkpoint needs no other, and "
                    "restore() takes a list of them"
                )
            if waited > SAY_AFTER_S and not said:
                said = True
                _log.warning("rank %d waits for %s to call checkpoint()", self._rank, _names(missing()))
            time.sleep(min(pause, max(0.0, self._timeout_s - waited)))
            pause = min(pause * 1.5, self._board.longest_wait_s)

    def _read(self, name: str) -> Any:
        data = self._board.get(name)
        if data is None:
            return None
        try:
            return self._codec.decode(data)
        except (zstandard.ZstdError, msgspec.DecodeError):
            if name == CALL:  # left by a run with another serializer; the leader replaces it
                return None
            raise CheckpointError(
                f"{self._board.where}/{name} cannot be decoded: the ranks differ in aggregate_serializer or aggregate_compressor"
            ) from None

    def _write(self, name: str, message: Any) -> None:
        self._board.put(name, self._codec.encode(message))


def _names(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

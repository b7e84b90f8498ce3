"""Agreeing over a board (`board.py`) where every member's data end, without anybody waiting in the steady state.

Every member writes what it knows of its own lanes; the leader (member 0) adds it up and writes the sum; everybody reads the sum. A
thread does it, so that the loop finds the answer there. Traffic per look: one message read and one written by a member, two a
member by the leader.

Rules (if the code differs from them, the code is wrong):

1. The leader draws a round id; a member that reads it answers with it and with a ticket of its own. The leader adds up only
   answers to its own round, and a member believes only a sum that lists its own ticket. So nothing that an earlier run left
   behind is taken for a word of this one.
2. The leader itself acts only on sums that it has written. So when it leaves, the others know all that it acted on.
3. A member that leaves goes on talking in the background until its last word is written to a leader that knows it, and the leader
   until all have left: a member without data may be done before the others have begun. An interpreter that ends waits two
   seconds for that.
4. A member that is waited for and has said nothing for the time-out is named in an error, as is one that has left and without
   which no decision is possible. One that is slow but alive is waited for.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from headrace.core.uneven import Standing, together
from headrace.errors import WorkerDied
from headrace.run.board import Board

SUM: Final = "merged"
LOOK_S: Final = 0.1
"""Seconds between two looks while nobody waits."""
BUSY_S: Final = 0.005
"""Seconds between two looks while the loop waits."""
BEAT_S: Final = 1.0
"""Seconds after which a member speaks even if it knows nothing new."""
SAY_AFTER_S: Final = 5.0
JOIN_S: Final = 1.0
EXIT_S: Final = 2.0
"""Seconds that `close`, and the end of the interpreter, wait until the last words are heard."""

_log = logging.getLogger("headrace")
_talking: set[threading.Thread] = set()


@atexit.register
def _hear_out() -> None:
    deadline = time.monotonic() + EXIT_S
    for thread in list(_talking):
        thread.join(max(0.0, deadline - time.monotonic()))


class Word(msgspec.Struct, kw_only=True):
    """What a member writes."""

    ticket: str
    round: str
    beat: int
    confirmed: int
    gap: int | None
    reach: int
    ended: bool
    left: bool

    @property
    def standing(self) -> Standing:
        """Its lanes."""
        return Standing(self.confirmed, self.gap, self.reach, self.ended)


class Sum(msgspec.Struct, kw_only=True):
    """What the leader writes: `words` by member, of all whose word it has."""

    round: str
    beat: int
    members: int
    words: dict[int, Word]
    silent: dict[int, float]
    """Seconds since each member was last heard of, for those silent for more than a beat or two."""


@dataclass(eq=False)
class BoardAgreement:
    """Member `member` of `members` that write to `folder` of a board. `who(member)` names one in errors."""

    board: Board
    folder: str
    member: int
    members: int
    timeout_s: float
    who: Callable[[int], str]
    _own: Standing = field(default_factory=lambda: Standing(0))
    _ticket: str = field(default_factory=lambda: secrets.token_hex(8))
    _round: str = ""
    _beat: int = 0
    _left: bool = False
    _listed: bool = False
    _heard_out: bool = False
    _failure: BaseException | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to talk."""
        now = time.monotonic()
        self._sum: Sum | None = None
        self._heard: dict[int, tuple[int, float]] = {}
        self._words: dict[int, Word] = {}
        self._written, self._wrote_at, self._begun = b"", 0.0, now
        self._new, self._hurry = threading.Condition(), threading.Event()
        self._waiting = False
        if self.member == 0:
            self._round = secrets.token_hex(8)
        self._thread = threading.Thread(target=self._talk, name="headrace-agreement", daemon=True)
        _talking.add(self._thread)
        self._thread.start()

    def publish(self, own: Standing) -> None:
        """Told at the next look."""
        self._own = own

    def wait(self, decide: Callable[[Standing], bool | None]) -> bool:
        """The decision from the newest sum, or from one that comes."""
        begun, said = time.monotonic(), False
        with self._new:
            while True:
                known = self._known()
                decision = None if known is None else decide(known)
                if decision is not None:
                    self._waiting = False
                    return decision
                waited = time.monotonic() - begun
                self._raise_if_hopeless(decide, waited)
                if waited > SAY_AFTER_S and not said:
                    said = True
                    _log.warning("%s waits for %s to prepare its next batches", self.who(self.member), self._slowest())
                self._waiting = True
                self._hurry.set()
                self._new.wait(0.5)

    def close(self) -> None:
        """Say what is known last, and that no more will come."""
        if self._thread is None or self._left:
            return
        self._left = True
        self._hurry.set()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    # -- what the loop needs ----------------------------------------------------------------------------

    def _known(self) -> Standing | None:
        found = self._sum
        if found is None or len(found.words) < self.members:
            return None
        return together(word.standing for word in found.words.values())

    def _raise_if_hopeless(self, decide: Callable[[Standing], bool | None], waited: float) -> None:
        if self._failure is not None:
            raise self._failure
        found = self._sum
        if found is not None:
            gone = {member: word for member, word in found.words.items() if word.left}
            stuck = [self.who(member) for member, word in gone.items() if decide(word.standing) is None]
            if stuck:
                raise WorkerDied(
                    f"{', '.join(stuck)} left the run before its data ended, so {self.who(self.member)} cannot know which step "
                    "is the last that all groups can fill. End all groups at the same step, or set uneven='keep'"
                )
        if waited < self.timeout_s:
            return
        silent = self._silent()
        if silent:
            raise WorkerDied(
                f"{self.who(self.member)} waited {waited:.0f} s to agree on the end of the data; nothing was heard of "
                f"{', '.join(silent)} (looking in {self.board.where}/{self.folder}; option aggregate_timeout_s="
                f"{self.timeout_s:g}). Every rank must iterate the pipeline, in the same order, with world_size and global_rank set"
            )

    def _silent(self) -> list[str]:
        now = time.monotonic()
        leader_for = now - self._heard.get(0, (0, self._begun))[1]
        if self.member and leader_for > self.timeout_s:
            return [self.who(0)]
        found = self._sum
        if found is None:
            return [self.who(0)] if self.member else []
        named = {member for member, seconds in found.silent.items() if seconds > self.timeout_s}
        return [self.who(member) for member in sorted(named)]

    def _slowest(self) -> str:
        found = self._sum
        if found is None:
            return self.who(0)
        missing = [member for member in range(self.members) if member not in found.words]
        if missing:
            return ", ".join(self.who(member) for member in missing)
        return self.who(min(found.words, key=lambda member: found.words[member].standing.filled))

    # -- the thread -------------------------------------------------------------------------------------

    def _talk(self) -> None:
        left_at = 0.0
        try:
            while not self._heard_out:
                if self.member == 0:
                    self._lead()
                else:
                    self._follow()
                if self._left:
                    left_at = left_at or time.monotonic()
                    if time.monotonic() - left_at > self.timeout_s:
                        return
                self._hurry.wait(BUSY_S if self._waiting else min(LOOK_S, self.board.longest_wait_s))
                self._hurry.clear()
        except BaseException as error:  # noqa: BLE001  a board that fails: whoever waits raises it
            self._failure = error
            with self._new:
                self._new.notify_all()
        finally:
            _talking.discard(threading.current_thread())

    def _word(self) -> Word:
        own = self._own
        return Word(
            ticket=self._ticket,
            round=self._round,
            beat=self._beat,
            confirmed=own.confirmed,
            gap=own.gap,
            reach=own.reach,
            ended=own.ended,
            left=self._left,
        )

    def _follow(self) -> None:
        data = self.board.get(f"{self.folder}/{SUM}")
        if data is not None:
            found = msgspec.msgpack.decode(data, type=Sum)
            self._hear(0, found.beat)
            self._round = found.round
            mine = found.words.get(self.member)
            if mine is not None and mine.ticket == self._ticket:
                self._listed = True
                self._show(found)
        if self._round:
            word = self._word()
            self._write(f"{self.folder}/rank-{self.member}", word)
            self._heard_out = self._listed and word.left  # the leader of this very round finds it there

    def _lead(self) -> None:
        names = {f"rank-{member}": member for member in range(1, self.members)}
        for name in self.board.present(self.folder, names):
            data = self.board.get(f"{self.folder}/{name}")
            word = None if data is None else msgspec.msgpack.decode(data, type=Word)
            if word is not None and word.round == self._round:
                self._hear(names[name], word.beat)
                self._words[names[name]] = word
        self._words[0] = self._word()
        now = time.monotonic()
        ages = {member: now - self._heard.get(member, (0, self._begun))[1] for member in range(1, self.members)}
        words = self._words
        silent = {
            m: round(age, 1) for m, age in ages.items() if age > 3 * BEAT_S and not (m in words and words[m].left)
        }
        found = Sum(round=self._round, beat=self._beat, members=self.members, words=dict(words), silent=silent)
        self._write(f"{self.folder}/{SUM}", found)
        self._show(found)
        self._heard_out = len(words) == self.members and all(word.left for word in words.values())

    def _hear(self, member: int, beat: int) -> None:
        if self._heard.get(member, (-1, 0.0))[0] != beat:
            self._heard[member] = (beat, time.monotonic())

    def _write(self, name: str, message: Any) -> None:
        """Only what is new, or a sign of life."""
        now = time.monotonic()
        data = msgspec.msgpack.encode(message)
        if data == self._written and now - self._wrote_at < BEAT_S:
            return
        self.board.put(name, data)
        self._written, self._wrote_at = data, now
        self._beat += 1

    def _show(self, found: Sum) -> None:
        with self._new:
            self._sum = found
            self._new.notify_all()

"""Whose turn it is to use a pipeline's executor, which serves one thread at a time.

* A turn is one step of a flow. It may wait for workers as long as nothing happens.
* Threads get turns in the order in which they came. One that has the turn may take it again: the items of a map may be
  the outputs of another map of the same pipeline.
* `ask` makes the thread that waits for workers end its step soon. Whoever comes with something to do asks once, and then
  only waits in line: two threads that ask each other again and again would never sleep.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import monotonic

from headrace.errors import ConfigError

_LEAVE = 0.5  # seconds to wait for another thread's step before closing all the same: it may be in a user's code
_AGAIN = 0.1  # seconds until one who asked asks again: the other may have been just about to wait


class Turn:
    """A fair lock, and the news that threads without the turn wait for."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake()` makes the executor return, if it waits; it is called with `news` held."""
        self.news = threading.Condition()  # held for moments only; a signal handler may hold it twice
        self.closed = False
        self.asked = False  # whether anyone has asked since this turn began
        self._wake = wake
        self._line: deque[object] = deque()  # the first has the turn
        self._holder = 0
        self._depth = 0

    @property
    def free(self) -> bool:
        """Whether nobody has it."""
        return not self._line

    def check(self) -> None:
        """Raise if the pipeline was closed."""
        if self.closed:
            raise ConfigError("this pipeline is closed; build a new one")

    def ask(self) -> None:
        """Tell everyone to look again. Any thread and any signal handler may call it."""
        with self.news:
            self.news.notify_all()
            if self._line:
                self.asked = True
                self._wake()

    def take(self, timeout: float | None = None, *, ask: bool = False) -> bool:
        """Wait for the turn, `timeout` seconds at most; whether it came."""
        with self.news:
            if self._holder != threading.get_ident():
                if not self._stand_in_line(None if timeout is None else monotonic() + timeout, ask):
                    return False
                self._holder = threading.get_ident()
                self.asked = False
            self._depth += 1
            return True

    def leave(self) -> None:
        """Let the next one have it."""
        with self.news:
            self._depth -= 1
            if not self._depth:
                self._holder = 0
                self._line.popleft()
                self.news.notify_all()

    @contextmanager
    def step(self, *, ask: bool) -> Generator[None, None, None]:
        """For a step: the turn of a pipeline that is not closed."""
        self.take(ask=ask)
        try:
            self.check()
            yield
        finally:
            self.leave()

    @contextmanager
    def closing(self) -> Generator[bool, None, None]:
        """For the end of something: the turn, or after a while without it. Says whether it came."""
        came = self.take(_LEAVE, ask=True)
        try:
            yield came
        finally:
            if came:
                self.leave()

    def _stand_in_line(self, deadline: float | None, ask: bool) -> bool:
        ticket = object()
        self._line.append(ticket)
        came = False
        try:
            while self._line[0] is not ticket:
                left = None if deadline is None else deadline - monotonic()
                if left is not None and left <= 0:
                    return False
                if ask:
                    self.asked = True
                    self._wake()
                    left = _AGAIN if left is None else min(left, _AGAIN)
                self.news.wait(left)
            came = True
        finally:
            if not came:  # too late, or interrupted
                self._line.remove(ticket)
                self.news.notify_all()
        return came

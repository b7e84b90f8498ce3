"""Where a flow's items come from: an iterable, the queue of `enqueue`, or emitter processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from time import perf_counter
from typing import Any, Protocol

from headrace.errors import ConfigError

PATIENCE = 0.005  # seconds that filling one batch may take; a slow source must not hold back what is finished
_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class Pulled:
    """Items to submit: a sequence, or a message of `count` items that only a worker reads."""

    items: Any
    count: int


class Source(Protocol):
    """Gives items when asked."""

    @property
    def ended(self) -> bool:
        """Whether there will never be more."""
        ...

    def pull(self, most: int) -> Pulled | None:
        """At most about `most` items, or None if there is none now."""
        ...

    def close(self) -> None:
        """Give up what was not pulled."""
        ...


class IterableSource:
    """An iterable, pulled in the consumer's thread, only when a worker has room."""

    def __init__(self, items: Iterable[Any]) -> None:
        """Begin the iteration."""
        self._iterator: Iterator[Any] = iter(items)
        self._origin = self._iterator
        self._instant = isinstance(items, (list, tuple, range, dict, set))  # no item of these can keep anyone waiting
        self.ended = False
        self.error: BaseException | None = None
        self.samples: list[Any] = []  # the first few items

    def pull(self, most: int) -> Pulled | None:
        """Up to `most` items, fewer from a slow source. An error of the source ends it; `error` keeps it."""
        items: list[Any] = []
        append, clock, iterator = items.append, perf_counter, self._iterator
        deadline = clock() + PATIENCE
        try:
            if self._instant:
                items.extend(islice(iterator, most))
                self.ended = len(items) < most
            for _ in range(0 if self._instant else most):
                append(next(iterator))
                if clock() > deadline:
                    break
        except StopIteration:
            self.ended = True
        except Exception as error:  # noqa: BLE001 (the source's own; raised after the results of what it gave before)
            self.ended, self.error = True, error
        if len(self.samples) < _SAMPLES:
            self.samples.extend(items[: _SAMPLES - len(self.samples)])
        return Pulled(items, len(items)) if items else None

    def give_back(self, items: Sequence[Any]) -> None:
        """Items that were pulled last and not begun: they are the next again."""
        if items:
            self._iterator = chain(items, self._iterator)
            self.ended = False

    def close(self) -> None:
        """Close a generator."""
        if (close := getattr(self._origin, "close", None)) is not None and not self.ended:
            close()
        self.ended = True


class QueueSource:
    """Items given one by one, from any thread. Ended when it is empty: the owner decides whether to wait."""

    error: BaseException | None = None

    def __init__(self, most: int) -> None:
        """Hold at most `most` items that no worker has taken yet."""
        self._most = most
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        """Add an item at the end."""
        if len(self._items) >= self._most:
            raise ConfigError(
                f"{len(self._items)} enqueued items wait for a worker, and max_pending is {self._most}: dequeue some, use "
                "map() which pulls by itself, or raise max_pending"
            )
        self._items.append(item)

    @property
    def ended(self) -> bool:
        """Whether nothing waits."""
        return not self._items

    def pull(self, most: int) -> Pulled | None:
        """The oldest items."""
        items: list[Any] = []
        while self._items and len(items) < most:
            items.append(self._items.popleft())
        return Pulled(items, len(items)) if items else None

    def close(self) -> None:
        """Forget what waits."""
        self._items.clear()


class Chained:
    """Several sources, one after the other.

    It ends when all have ended, or for the time being when one has failed: until `take_error` has left that one out.
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        """Take from the first that has anything."""
        self.sources = list(sources)
        self._failed: list[Any] = []

    @property
    def ended(self) -> bool:
        """Whether there is nothing to pull and nothing to wait for."""
        ended = True
        for source in self.sources:  # all are asked: one may find that it has failed
            ended = source.ended and ended
            if source.error is not None:
                return True
        return ended

    def take_error(self) -> BaseException | None:
        """The error of the first source that has failed, which is left out from now on."""
        for source in self.sources:
            if source.error is not None:
                self.sources.remove(source)
                self._failed.append(source)
                return source.error
        return None

    def pull(self, most: int) -> Pulled | None:
        """What the first source that has something gives."""
        for source in self.sources:
            if (pulled := source.pull(most)) is not None:
                return pulled
        return None

    def close(self) -> None:
        """Close all."""
        for source in (*self.sources, *self._failed):
            source.close()

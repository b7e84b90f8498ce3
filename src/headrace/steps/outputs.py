"""Outputs one by one, from lists of them, at the speed of the interpreter's own loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from itertools import chain
from typing import Any, cast


class Outputs(chain[Any]):
    """An iterator over the items of the lists that a generator gives; `close` closes the generator.

    A Python generator between the flow and the consumer would cost 30 ns an item for each frame; this costs 10.
    """

    _lists: Generator[Iterable[Any], None, None]
    _current: list[Iterator[Any]]

    @classmethod
    def of(cls, lists: Generator[Iterable[Any], None, None]) -> Outputs:
        """Items of `lists`, in order."""
        current: list[Iterator[Any]] = [iter(())]
        outputs = cast(Outputs, cls.from_iterable(_remembered(lists, current)))  # of this class, whatever the stubs say
        outputs._lists, outputs._current = lists, current
        return outputs

    def close(self) -> None:
        """End the work behind this iterator; it gives nothing more."""
        self._lists.close()
        deque(self._current[0], 0)


def _remembered(
    lists: Generator[Iterable[Any], None, None], current: list[Iterator[Any]]
) -> Generator[Iterator[Any], None, None]:
    try:
        for out in lists:
            current[0] = iter(out)
            yield current[0]
    finally:
        lists.close()

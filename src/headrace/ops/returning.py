"""Rows that come back after a restore one by one, in the order in which they will leave.

A shuffle buffer knows that order beforehand: it is a function of the count of arrivals. So a restored buffer of 8192 documents need
not read all of them again before the first batch; they are read while the run goes on, each before its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from headrace.core.block import Block, Ints, Origin, concat_blocks

ROWS_AT_A_TIME = 64

InTurn = Callable[[Iterator[Origin]], Iterator[Block]]
"""Reads the rows of these origins again: one block for each."""


class Returning:
    """Rows with handles that are not here yet. `handles` ascending, with `origins`; `order` yields them as they will leave."""

    def __init__(self, handles: Ints, origins: Origin, order: Iterator[Ints], fetch: InTurn) -> None:
        self._handles, self._origins = handles, origins
        self._order: list[Ints] = []  # handles of blocks on their way
        self._blocks = fetch(self._asked(order))
        self._here: list[Block] = []
        self._here_handles: list[Ints] = []
        self._count = 0
        self.left = len(handles)

    def _asked(self, order: Iterator[Ints]) -> Iterator[Origin]:
        for some in order:
            for at in range(0, len(some), ROWS_AT_A_TIME):
                handles = some[at : at + ROWS_AT_A_TIME]
                self._order.append(handles)
                yield self.origins(handles)

    def origins(self, handles: Ints) -> Origin:
        """Origins of these rows."""
        return Origin(self._origins.ids[np.searchsorted(self._handles, handles)])

    def take(self, count: int) -> Block:
        """The next rows that leave."""
        return self._take(count)[1]

    def rest(self) -> Block:
        """All rows that are left, by handle."""
        handles, rows = self._take(self.left)
        return rows.take(np.argsort(handles))

    def _take(self, count: int) -> tuple[Ints, Block]:
        while self._count < count:
            block = next(self._blocks)
            self._here.append(block)
            self._here_handles.append(self._order.pop(0))
            self._count += len(block)
        rows, handles = concat_blocks(self._here), np.concatenate(self._here_handles)
        self._here = [rows.slice(count, len(rows))] if count < len(rows) else []
        self._here_handles = [handles[count:]] if count < len(rows) else []
        self._count -= count
        self.left -= count
        return handles[:count], rows.slice(0, count)

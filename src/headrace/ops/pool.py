"""Rows of many blocks, held without copying and gathered in any order.

A shuffle buffer of 8192 records taken from blocks of 64 has rows in more than a thousand blocks at a time. Neither a copy
per push nor a `take` per block would do: the pool keeps the blocks as they came, with one table of row starts and ends,
and gathers an output block by slicing each row once. Every row has a handle, the number of its arrival.

Blocks whose rows have mostly left still hold memory. `keep()` copies the survivors together; the owner calls it when
`stored` is a few times what it holds, so each row is copied less than once on average.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.core.block import ORIGIN_WIDTH, Block, Column, Ints, Origin, Ragged, Text, column_form, concat_blocks

_WASTE: Final = 2
_SLACK: Final = 1024


class RowPool:
    """Rows by handle. Handles are dealt in order from `first` up and stay valid until `keep()` leaves them out."""

    def __init__(self, lane: int, first: int = 0) -> None:
        """Hold nothing; the first row gets handle `first`."""
        self._lane = lane
        self.clear(first)

    def clear(self, first: int = 0) -> None:
        """Forget every row."""
        self._blocks: list[Block] = []
        self._first_row = _Matrix(1)  # of each block, in rows stored
        self._objects = 0  # blocks whose payload is Python objects
        self._fields: dict[str, _Field] = {}
        self._ids: _Matrix | None = _Matrix(ORIGIN_WIDTH)  # None once a block of packed rows is held
        self._kept: Ints = np.empty(0, np.int64)  # handles of the rows that survived the last keep(), ascending
        self._dense_from = first  # handles from here on lie one after the other behind the kept rows
        self.stored = 0

    @property
    def next_handle(self) -> int:
        """Handle that the next row will get."""
        return self._dense_from + self.stored - len(self._kept)

    def add(self, block: Block) -> int:
        """Hold the rows of `block`; return the handle of the first."""
        handle = self.next_handle
        self._store(block)
        return handle

    def wasteful(self, held: int) -> bool:
        """True if much more is stored than the `held` rows that are still wanted."""
        return self.stored > _WASTE * held + _SLACK

    def keep(self, handles: Ints) -> None:
        """Forget all rows but these (ascending), copying them together."""
        rest = self.take(handles) if len(handles) else None
        self.restore(handles, rest, self.next_handle)

    def restore(self, handles: Ints, rows: Block | None, next_handle: int) -> None:
        """Hold just `rows` under `handles` (ascending)."""
        self.clear(next_handle)
        if rows is not None and len(rows):
            self._kept = handles
            self._store(rows)

    def origins(self, handles: Ints) -> Origin:
        """Origins of these rows."""
        return self._origins(self._rows(handles)) if len(handles) else Origin.empty()

    def take(self, handles: Ints) -> Block:
        """These rows, in this order, as one block. `handles` is not empty."""
        rows = self._rows(handles)
        if len(self._blocks) == 1:
            return self._blocks[0].take(rows)
        owners, local = self._places(rows)
        if not self._uniform():
            return concat_blocks([self._blocks[b].slice(r, r + 1) for b, r in zip(owners, local, strict=True)])
        origin = self._origins(rows)
        if self._blocks[0].rows is not None:
            objects = [block.rows or [] for block in self._blocks]
            return Block(self._lane, origin, None, [objects[b][r] for b, r in zip(owners, local, strict=True)])
        columns = {name: column.gather(rows, owners, local) for name, column in self._fields.items()}
        return Block(self._lane, origin, columns)

    def pieces(self, handles: Ints) -> tuple[dict[str, list[NDArray[Any]]], Ints]:
        """Views of these rows, field by field, and their lengths; for pools of equally long ragged columns."""
        rows = self._rows(handles)
        owners, _ = self._places(rows)
        lengths = np.zeros(len(rows), np.int64)
        views: dict[str, list[NDArray[Any]]] = {}
        for name, column in self._fields.items():
            views[name], lengths = column.views(rows, owners)
        return views, lengths

    def _store(self, block: Block) -> None:
        if not len(block):
            return
        self._blocks.append(replace(block, drops=()) if block.drops else block)
        self._first_row.append(np.asarray([[self.stored]]))
        self._objects += block.rows is not None
        self.stored += len(block)
        if block.origin.rows is not None:
            self._ids = None
        elif self._ids is not None:
            self._ids.append(block.origin.ids)
        for name, column in (block.columns or {}).items():
            self._fields.setdefault(name, _Field(column)).append(column)

    def _rows(self, handles: Ints) -> Ints:
        """Places of these handles among the rows stored."""
        dense = handles - self._dense_from + len(self._kept)
        if not len(self._kept):
            return dense
        return np.where(handles >= self._dense_from, dense, np.searchsorted(self._kept, handles))

    def _places(self, rows: Ints) -> tuple[list[int], list[int]]:
        """Block and row in it, for each row stored."""
        first = self._first_row.rows[:, 0]
        owner = first.searchsorted(rows, side="right") - 1
        return owner.tolist(), (rows - first[owner]).tolist()

    def _origins(self, rows: Ints) -> Origin:
        if self._ids is not None:
            return Origin(self._ids.rows[rows])
        owners, local = self._places(rows)
        return Origin.concat([self._blocks[b].origin.slice(r, r + 1) for b, r in zip(owners, local, strict=True)])

    def _uniform(self) -> bool:
        """True if every block has the same fields in the same form."""
        if self._objects:
            return self._objects == len(self._blocks)
        return all(len(column.parts) == len(self._blocks) for column in self._fields.values())


class _Matrix:
    """Rows of int64 that grow at the end."""

    def __init__(self, width: int) -> None:
        self._space = np.empty((_SLACK, width), np.int64)
        self._used = 0

    @property
    def rows(self) -> Ints:
        return self._space[: self._used]

    def append(self, rows: Ints) -> None:
        need = self._used + len(rows)
        if need > len(self._space):
            grown = np.empty((2 * need, self._space.shape[1]), np.int64)
            grown[: self._used] = self.rows
            self._space = grown
        self._space[self._used : need] = rows
        self._used = need


class _Field:
    """One column over all blocks. Columns of another form than the first are left out, so `parts` comes short."""

    def __init__(self, column: Column) -> None:
        self._form = column_form(column)
        self._spans = _Matrix(2) if isinstance(column, (Ragged, Text)) else None
        self.parts: list[Any] = []  # values, bytes, arrays or lists, one a block

    def append(self, column: Column) -> None:
        if column_form(column) != self._form:
            return
        if isinstance(column, (Ragged, Text)):
            assert self._spans is not None
            self._spans.append(np.array([column.offsets[:-1], column.offsets[1:]]).T)
        self.parts.append(
            column.values if isinstance(column, Ragged) else column.data if isinstance(column, Text) else column
        )

    def gather(self, rows: Ints, owners: list[int], local: list[int]) -> Column:
        """Rows stored, each sliced out of its block once."""
        parts = self.parts
        if self._form is list:
            return [parts[b][r] for b, r in zip(owners, local, strict=True)]
        if self._spans is None:
            return np.concatenate([parts[b][r : r + 1] for b, r in zip(owners, local, strict=True)])
        views, lengths = self.views(rows, owners)
        offsets = np.zeros(len(rows) + 1, np.int64)
        lengths.cumsum(out=offsets[1:])
        joined = np.concatenate(views)
        return Text(joined, offsets) if self._form is Text else Ragged(joined, offsets)

    def views(self, rows: Ints, owners: list[int]) -> tuple[list[NDArray[Any]], Ints]:
        """Each row as a view, and the lengths."""
        assert self._spans is not None
        starts, ends = self._spans.rows[rows].T
        parts = self.parts
        return [parts[b][a:z] for b, a, z in zip(owners, starts.tolist(), ends.tolist(), strict=True)], ends - starts

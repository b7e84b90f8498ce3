"""fetch: from sample pointers to payload. Implicit, always first.

A block of pointers is grouped by shard, each group is read in one call, and the rows are put back in the order of the
block. Only the fields that some operator can read are decoded (`fields`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.core.block import (
    DATASET,
    ROW,
    SHARD,
    Block,
    Column,
    Drop,
    Ints,
    Origin,
    Ragged,
    Text,
    column_form,
    concat_blocks,
    concat_columns,
    take_column,
)
from headrace.core.op import BadRows, Fields, Worker

AT_HAND: Final = frozenset({"memory", "npy"})
"""Formats whose rows are copied, not decoded."""


class Reader(Protocol):
    """Reads rows of one dataset; safe to use from several threads."""

    def read(
        self, shard: int, rows: Ints, fields: Fields = None, bad: BadRows | None = None
    ) -> dict[str, Column] | list[Any]:
        """Payload of `rows` in that order, without those reported to `bad`."""
        ...

    def close(self) -> None:
        """Let go of files and buffers."""
        ...


class Openable(Protocol):
    """A dataset, as far as fetch is concerned."""

    def raw_bytes(self) -> Ints:
        """Stored bytes of each shard."""
        ...

    def total(self) -> int:
        """Rows in all."""
        ...

    def open(self, options: Any = None) -> Reader:
        """Open for reading."""
        ...


class SharedReaders:
    """One reader per dataset, opened on first use and shared by the threads of a process."""

    def __init__(self, datasets: Mapping[int, Openable], options: Any = None) -> None:
        self._datasets, self._options = datasets, options
        self._open: dict[int, Reader] = {}
        self._lock = threading.Lock()

    @property
    def at_hand(self) -> bool:
        """Whether every dataset is in memory or memory-mapped: fetching then costs less than handing it to a worker."""
        return bool(self._datasets) and all(getattr(d, "format", "") in AT_HAND for d in self._datasets.values())

    @property
    def every_row(self) -> bool:
        """Whether no dataset leaves rows out. One that does not say so may."""
        return all(getattr(d, "every_row", False) for d in self._datasets.values())

    @property
    def row_bytes(self) -> float:
        """Stored bytes of an average row, of the dataset with the largest; 0 if that is not known."""
        return max((d.raw_bytes().sum() / max(1, d.total()) for d in self._datasets.values()), default=0.0)

    def __getitem__(self, dataset: int) -> Reader:
        reader = self._open.get(dataset)
        if reader is None:
            with self._lock:
                reader = self._open.get(dataset)
                if reader is None:
                    reader = self._open[dataset] = self._datasets[dataset].open(self._options)
        return reader

    def close(self) -> None:
        """Close every reader that was opened."""
        with self._lock:
            for reader in self._open.values():
                reader.close()
            self._open.clear()

    def rest(self) -> None:
        """End what readers run in the background (a step pipeline's workers) until the next read."""
        for reader in list(self._open.values()):  # not under the lock: whoever holds it may be slow to open a dataset
            if (rest := getattr(reader, "rest", None)) is not None:
                rest()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedReaders, (self._datasets, self._options)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read the samples that a block points to."""

    readers: SharedReaders = field(repr=False)
    fields: Fields = None
    name: str = "fetch"

    def describe(self) -> dict[str, Any]:
        """Nothing: what is fetched is the curriculum's concern, and projection is not data."""
        return {}

    def needs(self, downstream: Fields) -> Fields:
        """Whatever is asked for."""
        return downstream

    def projected(self, fields: Fields) -> Fetch:
        """The same, decoding only `fields`."""
        return replace(self, fields=fields)

    def worker(self) -> Worker:
        """A function that fills blocks of pointers."""
        readers, fields = self.readers, self.fields

        def fetch(block: Block, bad: BadRows) -> Block:
            return _fill(block, bad, readers, fields)

        return fetch


def _fill(block: Block, bad: BadRows, readers: SharedReaders, fields: Fields) -> Block:
    ids = block.origin.ids
    if not len(ids):
        return block.with_columns({})
    parts: list[Block] = []
    placed: list[Ints] = []
    left_out: list[Ints] = []
    for index in _by_shard(ids):
        dataset, shard = int(ids[index[0], DATASET]), int(ids[index[0], SHARD])
        refused = BadRows()
        payload = readers[dataset].read(shard, ids[index, ROW], fields, refused)
        if refused.rows or refused.left_out:
            for at, error in zip(refused.rows, refused.errors, strict=True):
                bad.add(int(index[at]), error)
            if refused.left_out:
                left_out.append(index[refused.left_out])
            index = np.delete(index, refused.rows + refused.left_out)
        origin = block.origin.take(index)
        part = Block(block.lane, origin)
        parts.append(part.with_columns(payload) if isinstance(payload, dict) else part.with_rows(payload))
        placed.append(index)
    out = parts[0] if len(parts) == 1 else interleave(parts, np.argsort(np.concatenate(placed), kind="stable"))
    if not left_out:
        return out
    gone = np.sort(np.concatenate(left_out))
    return out.dropping(Drop("fetch", "left out by the dataset", ids[gone]))


def interleave(parts: Sequence[Block], order: Ints) -> Block:
    """`concat_blocks(parts).take(order)`, with each byte of variable-length columns copied once."""
    columns = [part.columns for part in parts]
    if any(c is None for c in columns) or len({frozenset(c or ()) for c in columns}) > 1:
        return concat_blocks(parts).take(order)
    origin = Origin.concat([part.origin for part in parts]).take(order)
    merged: dict[str, Column] = {}
    for name in columns[0] or {}:
        merged[name] = _interleaved([c[name] for c in columns if c is not None], order)
    return Block(parts[0].lane, origin, merged, None, tuple(d for part in parts for d in part.drops))


def _interleaved(parts: Sequence[Any], order: Ints) -> Column:
    first, form = parts[0], column_form(parts[0])
    if isinstance(first, list) or any(column_form(part) != form for part in parts[1:]):
        return take_column(concat_columns(parts), order)
    match first:
        case Text():
            return _shuffled(parts, order)
        case Ragged():
            return Ragged(*_scatter([(part.values, part.offsets) for part in parts], order))
        case _:
            return _place(parts, order)


def _shuffled(parts: Sequence[Text], order: Ints) -> Column:
    """Texts in the order of their concatenation's index, as `str`: they are copied here, and decoded anyway where they are used.

    Bytes that are not UTF-8 stay bytes; who wants them as text says which row it is.
    """
    rows: list[Any]
    try:
        rows = [row for part in parts for row in part.to_str()]
        return [rows[i] for i in order.tolist()]
    except UnicodeDecodeError:
        rows = [row for part in parts for row in part.to_views()]
        return Text.from_bytes([rows[i] for i in order.tolist()])


def _place(parts: Sequence[NDArray[Any]], order: Ints) -> NDArray[Any]:
    """Rows of arrays in the order of their concatenation's index, each copied once."""
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    out = np.empty((len(order), *parts[0].shape[1:]), parts[0].dtype)
    at = 0
    for part in parts:
        out[places[at : at + len(part)]] = part
        at += len(part)
    return out


def _scatter(parts: Sequence[tuple[NDArray[Any], Ints]], order: Ints) -> tuple[NDArray[Any], Ints]:
    """Rows of ragged parts in the order of their concatenation's index."""
    pieces: list[NDArray[Any]] = []
    for values, offsets in parts:
        ends = offsets.tolist()
        pieces += [values[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)]
    placed = [pieces[i] for i in order.tolist()]
    out = np.zeros(len(placed) + 1, np.int64)
    np.cumsum([len(piece) for piece in placed], out=out[1:])
    return np.concatenate(placed), out


def _by_shard(ids: Ints) -> list[Ints]:
    """Row indices of each (dataset, shard) in the block, in stream order within a group."""
    key = (ids[:, DATASET] << 40) | ids[:, SHARD]
    if (key == key[0]).all():
        return [np.arange(len(key))]
    order = np.argsort(key, kind="stable")
    breaks = np.flatnonzero(np.diff(key[order])) + 1
    return np.split(order, breaks)

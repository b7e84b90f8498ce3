"""What a format is: how to count the rows of files, and how to read them.

A format is one object of the class `Format` in the file of its name. Reading gives columns, or payload objects, in the
order of the rows asked for. Rows that cannot be read go to `bad` by their index in `rows` and are left out of the result;
without `bad` the first of them is raised.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from headrace.core.block import Column, Ints
from headrace.core.op import BadRows
from headrace.errors import ConfigError
from headrace.io.options import StoreOptions
from headrace.io.store import Entry, Store, open_store

T = TypeVar("T")
Payload = dict[str, Column] | list[Any]


class Reader(Protocol):
    """Rows of one dataset by number. Safe to call from several threads at once."""

    def read(self, shard: int, rows: Ints, fields: frozenset[str] | None, bad: BadRows | None = None) -> Payload:
        """Rows of a shard in the order of `rows` (repeats allowed), only the top-level `fields` (None: all)."""
        ...

    def close(self) -> None:
        """Let go of files and memory. Reads in progress end well."""
        ...


class Format(Protocol):
    """One file format."""

    name: str
    suffixes: tuple[str, ...]

    def count(self, store: Store, entries: Sequence[Entry], options: StoreOptions) -> Ints:
        """Rows of each file, int64. A file that cannot be read is an error with its path, size and reason."""
        ...

    def open(self, dataset: str, table: ShardTable, options: StoreOptions) -> Reader:
        """A reader over the files of a table."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable:
    """The files of one dataset: a few bytes a shard, cheap to send to a worker. The shard id is the position."""

    root: str
    names: tuple[str, ...]
    sizes: Ints
    stamps: Ints
    counts: Ints

    def store(self, options: StoreOptions) -> Store:
        """The store that holds the files."""
        return open_store(self.root, options)

    def entry(self, shard: int) -> Entry:
        """One file as it was when the dataset was made."""
        return Entry(self.names[shard], int(self.sizes[shard]), int(self.stamps[shard]))


def open_limit(descriptors: int) -> int:
    """How many shards a reader may keep open, at so many file descriptors each: a sixteenth of the process's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, min(1024, (1024 if soft < 0 else soft) // 16 // descriptors))


def is_run(rows: Ints) -> bool:
    """True for consecutive rising numbers (the usual case, worth telling apart); False for none."""
    n = len(rows)
    return n > 0 and int(rows[-1]) - int(rows[0]) == n - 1 and bool((rows[1:] - rows[:-1] == 1).all())


def check_shard_rows(dataset: str, names: Sequence[str], counts: Ints, shard: int, rows: Ints) -> bool:
    """Rows must exist: an index outside is an error of the caller, never data. Returns `is_run(rows)`."""
    if not 0 <= shard < len(names):
        raise ConfigError(f"dataset {dataset!r} has no shard {shard}; it has {len(names)}, numbered from 0")
    run = is_run(rows)
    if len(rows):
        low, high = (rows[0], rows[-1]) if run else _extent(rows)
        if low < 0 or high >= counts[shard]:
            raise ConfigError(
                f"dataset {dataset!r}, shard {names[shard]!r} has no row {low if low < 0 else high}; it has "
                f"{counts[shard]}, numbered from 0"
            )
    return run


def _extent(rows: Ints) -> tuple[int, int]:
    """Smallest and largest; for a few rows a list is faster than two reductions."""
    values = rows.tolist() if len(rows) <= 64 else [rows.min(), rows.max()]
    return min(values), max(values)


def sorted_runs(rows: Ints) -> tuple[list[tuple[int, int]], Ints | None]:
    """Cut rows into runs of consecutive numbers: (first, stop) in rising order, and the sort order (None: as given).

    A row asked for twice ends up in two runs, so that nobody shares its objects.

    >>> sorted_runs(np.array([7, 3, 4, 4]))
    ([(3, 5), (4, 5), (7, 8)], array([1, 2, 3, 0]))
    """
    n = len(rows)
    if n == 0:
        return [], None
    order: Ints | None = None
    if bool((rows[1:] < rows[:-1]).any()):
        order = np.argsort(rows, kind="stable")
        rows = rows[order]
    breaks = np.flatnonzero(rows[1:] - rows[:-1] != 1) + 1
    firsts = rows[np.concatenate([[0], breaks])].tolist()
    lasts = rows[np.concatenate([breaks - 1, [n - 1]])].tolist()
    return [(a, b + 1) for a, b in zip(firsts, lasts, strict=True)], order


def map_files(entries: Sequence[Entry], look: Callable[[Entry], T]) -> list[T]:
    """`look(entry)` for each file, on a few threads; the first error in name order is raised."""
    if len(entries) <= 1:
        return [look(entry) for entry in entries]
    with ThreadPoolExecutor(min(len(entries), 2 * (os.cpu_count() or 1)), "headrace-count") as pool:
        return list(pool.map(look, entries))

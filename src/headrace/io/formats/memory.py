"""Rows that are Python objects in memory: for tests, small data, and data made on the spot."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.arguments import shown
from headrace.core.block import MISSING, Column, Ints, lookup
from headrace.core.op import BadRows
from headrace.errors import ConfigError
from headrace.io.formats.base import Payload

_IMMUTABLE = (str, int, float, bool, bytes, type(None))


class InMemoryShard:
    """Rows of one shard, each a mapping. The list is kept, not copied; do not change it while a run reads it."""

    __slots__ = ("_plain", "rows")

    def __init__(self, rows: Sequence[Any]) -> None:
        """Wrap the rows."""
        if isinstance(rows, (str, bytes, Mapping)) or not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise ConfigError(f"InMemoryShard takes a list of rows, found {shown(rows)}")
        self.rows = rows
        self._plain: bool | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]

    def getsamples(self, rows: Sequence[int]) -> list[Any]:
        """Rows by number."""
        return [self.rows[row] for row in rows]

    def raw_bytes(self) -> int:
        """Bytes of the values, estimated from the first 100 rows."""
        sample = [self.rows[i] for i in range(min(100, len(self.rows)))]
        used = sum(_value_bytes(row) for row in sample)
        return used * len(self.rows) // len(sample) if sample else 0

    def close(self) -> None:
        """Nothing to let go."""

    def __repr__(self) -> str:
        return f"InMemoryShard({len(self)} rows)"

    @property
    def plain(self) -> bool:
        """True if no row holds anything that could be changed in place, so that a shallow copy is a copy."""
        if self._plain is None:
            self._plain = all(
                isinstance(row, dict) and all(isinstance(value, _IMMUTABLE) for value in row.values())
                for row in self.rows
            )
        return self._plain


def _value_bytes(row: Any) -> int:
    values = row.values() if isinstance(row, Mapping) else [row]
    return sum(len(value) if isinstance(value, (str, bytes)) else sys.getsizeof(value) for value in values)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTable:
    """The shards of an in-memory dataset."""

    ids: Ints
    names: tuple[str, ...]
    counts: Ints
    sizes: Ints
    shards: dict[int, InMemoryShard]

    @classmethod
    def of(cls, dataset: str, shards: Any) -> MemoryTable:
        """Order by id and count."""
        if not isinstance(shards, Mapping):
            raise ConfigError(
                f"dataset {dataset!r}: from_dict takes {{shard id: InMemoryShard(rows)}}, found {shown(shards)}; for a list of "
                "rows write {0: InMemoryShard(rows)}"
            )
        for key, shard in shards.items():
            if isinstance(key, bool) or not isinstance(key, (int, np.integer)) or key < 0:
                raise ConfigError(f"dataset {dataset!r}: shard id {key!r} must be an int, zero or more")
            if not isinstance(shard, InMemoryShard):
                raise ConfigError(
                    f"dataset {dataset!r}: shard {key} is a {type(shard).__name__}, not an InMemoryShard; wrap its rows: "
                    "InMemoryShard(rows)"
                )
        ordered = {int(key): shards[key] for key in sorted(shards)}
        arrays = (
            np.array(list(ordered), np.int64),
            np.array([len(s) for s in ordered.values()], np.int64),
            np.array([s.raw_bytes() for s in ordered.values()], np.int64),
        )
        for array in arrays:
            array.flags.writeable = False
        return cls(arrays[0], tuple(map(str, ordered)), arrays[1], arrays[2], ordered)


class MemoryReader:
    """Reads rows as copies, so that a user's function that changes its input changes no data."""

    def __init__(self, dataset: str, table: MemoryTable) -> None:
        """Read from `table`."""
        self._dataset = dataset
        self._table = table

    def read(self, shard: int, rows: Ints, fields: frozenset[str] | None, bad: BadRows | None = None) -> Payload:
        """Columns for mappings, or copies of the rows for `fields=None`."""
        found = self._table.shards.get(shard)
        if found is None:
            raise ConfigError(
                f"dataset {self._dataset!r} has no shard {shard}; it has {', '.join(self._table.names[:20])}"
            )
        index = rows.tolist()
        data = found.rows
        if index and (rows.min() < 0 or rows.max() >= len(data)):
            raise ConfigError(f"dataset {self._dataset!r}, shard {shard} has {len(data)} rows; asked for {index}")
        plain = found.plain
        if fields is None:
            return [data[i].copy() for i in index] if plain else [copy.deepcopy(data[i]) for i in index]
        columns: dict[str, Column] = {}
        for name in sorted(fields):
            column = [data[i].get(name, MISSING) for i in index] if plain else [lookup(data[i], name) for i in index]
            if column and any(value is not MISSING for value in column):
                columns[name] = column if plain else [copy.deepcopy(value) for value in column]
        return columns

    def close(self) -> None:
        """Nothing to let go."""

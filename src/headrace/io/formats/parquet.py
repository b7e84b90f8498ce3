"""Parquet: a file is a shard, a row group is the piece that is decoded, and only the wanted columns are.

Counting reads footers only. Small consecutive row groups are decoded together (opening costs 40 microseconds each).
Columns are matched by name in each shard on its own, so shards may differ: text may be string, large_string or dictionary,
and a column that a shard lacks is absent (`MISSING`) in its rows, whatever shard comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.core.block import Column, Ints, concat_columns, take_column
from headrace.core.op import BadRows
from headrace.errors import DataChangedError, FormatError, HeadraceError
from headrace.io.formats.arrow import Stored, store_column, stored_bytes, take_rows
from headrace.io.formats.base import Payload, ShardTable, check_shard_rows, map_files
from headrace.io.group_cache import GroupCache
from headrace.io.options import StoreOptions
from headrace.io.row_error import RowError, report
from headrace.io.store import Entry, LocalFile, Store

UNIT_BYTES = 4 << 20
_METADATA_BYTES = 64 << 20
_METADATA_FACTOR = 8
"""Parsed metadata takes several times its size in the file."""


class ParquetFormat:
    """See the module."""

    name = "parquet"
    suffixes = (".parquet",)

    def count(self, store: Store, entries: Sequence[Entry], options: StoreOptions) -> Ints:
        """Rows by the footers."""
        return np.array(map_files(entries, lambda entry: _footer(store, entry).num_rows), np.int64)

    def open(self, dataset: str, table: ShardTable, options: StoreOptions) -> ParquetReader:
        """A reader."""
        return ParquetReader(dataset, table, options)


FORMAT = ParquetFormat()


def _source(store: Store, entry: Entry) -> Any:
    """What pyarrow reads from; the file must be unchanged."""
    file = store.open(entry)
    if isinstance(file, LocalFile):
        return file.path
    return pa.PythonFile(file, mode="r")


def _footer(store: Store, entry: Entry) -> pq.FileMetaData:
    """Read and check the footer."""
    try:
        return pq.read_metadata(_source(store, entry))
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, HeadraceError):
            raise
        raise FormatError(
            f"{store.path(entry.name)} ({entry.size} bytes) is not a whole Parquet file: {error}. Copy or write it anew, or "
            "take it out of the dataset"
        ) from error


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard's footer, and its row groups joined to units: unit `u` is groups `groups[u]:groups[u+1]`."""

    entry: Entry
    metadata: pq.FileMetaData
    groups: Ints
    starts: Ints

    @classmethod
    def of(cls, entry: Entry, metadata: pq.FileMetaData) -> _Shard:
        rows, groups, total, held = [0], [0], 0, 0
        for g in range(metadata.num_row_groups):
            group = metadata.row_group(g)
            if held and held + group.total_byte_size > UNIT_BYTES:
                groups.append(g)
                rows.append(total)
                held = 0
            total += group.num_rows
            held += group.total_byte_size
        if metadata.num_row_groups:
            groups.append(metadata.num_row_groups)
            rows.append(total)
        return cls(entry, metadata, np.array(groups), np.array(rows))


class ParquetReader:
    """Rows of Parquet shards by way of decoded units in a cache."""

    def __init__(self, dataset: str, table: ShardTable, options: StoreOptions) -> None:
        """Nothing is opened before the first read."""
        self._dataset = dataset
        self._table = table
        self._store = table.store(options)
        self._threads = options.parquet.use_threads
        cache = options.parquet.rg_cache
        self._units: GroupCache[dict[str, Stored]] = GroupCache(int(cache.limit_bytes) if cache.enabled else 0)
        self._shards: GroupCache[_Shard] = GroupCache(_METADATA_BYTES)
        if options.arrow.cpu_threads is not None:
            pa.set_cpu_count(options.arrow.cpu_threads)
        if options.arrow.io_threads is not None:
            pa.set_io_thread_count(options.arrow.io_threads)

    def read(self, shard: int, rows: Ints, fields: frozenset[str] | None, bad: BadRows | None = None) -> Payload:
        """Columns of the wanted fields that the shard has."""
        check_shard_rows(self._dataset, self._table.names, self._table.counts, shard, rows)
        if not len(rows):
            return {}
        opened = self._shards.get(shard, 0, lambda: self._open(shard))
        order: Ints | None = None
        if bool((rows[1:] < rows[:-1]).any()):
            order = np.argsort(rows, kind="stable")
            rows = rows[order]
        units = np.searchsorted(opened.starts, rows, "right") - 1
        edges = np.flatnonzero(np.diff(units, prepend=-1, append=-1))
        parts: list[dict[str, Column]] = []
        kept: list[Ints] = []
        errors: list[RowError] = []
        for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            unit = int(units[a])
            local = rows[a:b] - int(opened.starts[unit])
            positions = np.arange(a, b) if order is None else order[a:b]
            try:
                stored = self._unit(shard, opened, unit, fields, b - a)
                parts.append({name: take_rows(column, local) for name, column in stored.items()})
                kept.append(positions)
            except FormatError as error:
                path = self._store.path(opened.entry.name)
                errors += [
                    RowError(f"dataset {self._dataset!r}, row {row}: {error}", row=row, path=path, position=position)
                    for row, position in zip(rows[a:b].tolist(), positions.tolist(), strict=True)
                ]
        report(errors, bad)
        return _join(parts, kept, order is not None)

    def close(self) -> None:
        """Let go of what is decoded."""
        self._units.clear()
        self._shards.clear()

    def schema(self, shard: int) -> pa.Schema:
        """Arrow schema of one shard."""
        return self._shards.get(shard, 0, lambda: self._open(shard)).metadata.schema.to_arrow_schema()

    def _open(self, shard: int) -> tuple[_Shard, int, int]:
        entry = self._table.entry(shard)
        metadata = _footer(self._store, entry)
        if metadata.num_rows != int(self._table.counts[shard]):
            raise DataChangedError(
                f"{self._store.path(entry.name)} has {metadata.num_rows} rows, and {self._table.counts[shard]} when the "
                "dataset was made; make the dataset anew"
            )
        return _Shard.of(entry, metadata), _METADATA_FACTOR * metadata.serialized_size, 1

    def _unit(
        self, shard: int, opened: _Shard, unit: int, fields: frozenset[str] | None, served: int
    ) -> dict[str, Stored]:
        def decode() -> tuple[dict[str, Stored], int, int]:
            stored = self._decode(opened, unit, fields)
            rows = int(opened.starts[unit + 1] - opened.starts[unit])
            return stored, sum(stored_bytes(column) for column in stored.values()), rows

        return self._units.get((shard, unit, fields), served, decode)

    def _decode(self, opened: _Shard, unit: int, fields: frozenset[str] | None) -> dict[str, Stored]:
        """Decode the wanted columns of a unit."""
        first, stop = int(opened.groups[unit]), int(opened.groups[unit + 1])
        names = opened.metadata.schema.to_arrow_schema().names
        wanted = [name for name in names if fields is None or name in fields]
        if not wanted:
            return {}
        path = self._store.path(opened.entry.name)
        try:
            with pq.ParquetFile(_source(self._store, opened.entry), metadata=opened.metadata) as file:
                table = file.read_row_groups(list(range(first, stop)), columns=wanted, use_threads=self._threads)
            return {name: store_column(table.column(name)) for name in wanted}
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, HeadraceError):
                raise
            raise FormatError(
                f"{path}, row groups {first}-{stop - 1}, columns {wanted}: {error}. Copy or write the file anew (smaller row "
                "groups help where a column is too large for one), or take it out of the dataset"
            ) from error


def _join(parts: list[dict[str, Column]], kept: list[Ints], shuffled: bool) -> dict[str, Column]:
    """Parts of one read, in the order asked for."""
    if not parts:
        return {}
    columns = {name: concat_columns([part[name] for part in parts]) for name in parts[0]}
    if not shuffled:
        return columns
    inverse = np.argsort(np.concatenate(kept), kind="stable")
    return {name: take_column(column, inverse) for name, column in columns.items()}

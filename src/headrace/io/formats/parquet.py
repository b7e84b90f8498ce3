"""Parquet: a file is a shard, a row group is the piece that is decoded, and only the wanted columns are.

Counting reads footers only. Small consecutive row groups are decoded together (opening costs 40 microseconds each).
Columns are matched by name in each shard on its own, so shards may differ: text may be string, large_string or dictionary,
and a column that a shard lacks is absent (`MISSING`) in its rows, whatever shard comes first.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.core.block import Column, Ints, concat_columns, take_column
from headrace.core.op import BadRows
from headrace.errors import DataChangedError, FormatError, HeadraceError
from headrace.io.buffers import BufferPool
from headrace.io.formats.arrow import Stored, slice_rows, store_column, stored_bytes, take_rows, unsound_rows
from headrace.io.formats.base import Payload, ShardTable, check_shard_rows, map_files, open_limit
from headrace.io.group_cache import GroupCache
from headrace.io.options import StoreOptions
from headrace.io.row_error import RowError, report
from headrace.io.store import Entry, File, SeekableFile, Store

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


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """A file opened for decoding by one thread at a time."""

    file: File
    parquet: pq.ParquetFile


def _source(file: File) -> Any:
    """What pyarrow reads from."""
    return file.local_path or pa.PythonFile(SeekableFile(file), mode="r")


def _footer(store: Store, entry: Entry) -> pq.FileMetaData:
    """Read and check the footer."""
    try:
        return pq.read_metadata(_source(store.open(entry)))
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, HeadraceError):
            raise
        raise FormatError(
            f"{store.path(entry.name)} ({entry.size} bytes) is not a whole Parquet file: {error}. Copy or write it anew, or "
            "take it out of the dataset"
        ) from error


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard's footer. Row group `g` has rows `rows[g]:rows[g+1]`; unit `u` is the groups `units[u]:units[u+1]`."""

    shard: int
    entry: Entry
    metadata: pq.FileMetaData
    columns: tuple[str, ...]
    rows: list[int]
    units: list[int]
    starts: list[int]

    @classmethod
    def of(cls, shard: int, entry: Entry, metadata: pq.FileMetaData) -> _Shard:
        rows, units, held = [0], [0], 0
        for g in range(metadata.num_row_groups):
            group = metadata.row_group(g)
            if held and held + group.total_byte_size > UNIT_BYTES:
                units.append(g)
                held = 0
            held += group.total_byte_size
            rows.append(rows[-1] + group.num_rows)
        units.append(metadata.num_row_groups)
        columns = tuple(metadata.schema.to_arrow_schema().names)
        return cls(shard, entry, metadata, columns, rows, units, [rows[g] for g in units])


@dataclass(frozen=True, slots=True)
class _Unit:
    """Decoded columns of neighbouring row groups, and what is wrong with each row whose text is not UTF-8."""

    columns: dict[str, Stored]
    unsound: dict[int, str]


@dataclass(slots=True)
class _Reading:
    """One call of `read`: rising `rows` of a shard, and what has been got of them so far."""

    shard: _Shard
    rows: Ints
    order: Ints | None
    run: bool
    fields: frozenset[str] | None
    parts: list[dict[str, Column]] = field(default_factory=list)
    errors: list[RowError] = field(default_factory=list)

    def join(self) -> dict[str, Column]:
        """The parts in the order asked for; failed rows are in no part."""
        parts = self.parts
        if not parts:
            return {}
        columns = parts[0] if len(parts) == 1 else {k: concat_columns([part[k] for part in parts]) for k in parts[0]}
        if self.order is None:
            return columns
        failed = np.array([error.position for error in self.errors], np.int64)
        inverse = np.argsort(self.order[~np.isin(self.order, failed)], kind="stable")
        return {name: take_column(column, inverse) for name, column in columns.items()}


class ParquetReader:
    """Rows of Parquet shards by way of decoded units in a cache."""

    def __init__(self, dataset: str, table: ShardTable, options: StoreOptions) -> None:
        """Nothing is opened before the first read."""
        self._dataset = dataset
        self._table = table
        self._store = table.store(options)
        self._pool = BufferPool()
        self._limit = open_limit(2)
        self._lock = threading.Lock()
        self._files: OrderedDict[int, list[_OpenFile]] = OrderedDict()
        self._threads = options.parquet.use_threads
        cache = options.parquet.rg_cache
        self._units: GroupCache[_Unit] = GroupCache(int(cache.limit_bytes) if cache.enabled else 0)
        self._shards: GroupCache[_Shard] = GroupCache(_METADATA_BYTES)
        if options.arrow.cpu_threads is not None:
            pa.set_cpu_count(options.arrow.cpu_threads)
        if options.arrow.io_threads is not None:
            pa.set_io_thread_count(options.arrow.io_threads)

    def read(self, shard: int, rows: Ints, fields: frozenset[str] | None, bad: BadRows | None = None) -> Payload:
        """Columns of the wanted fields that the shard has."""
        run = check_shard_rows(self._dataset, self._table.names, self._table.counts, shard, rows)
        if not len(rows):
            return {}
        opened = self._shards.get(shard, 0, lambda: self._open(shard))
        order: Ints | None = None
        if not run and bool((rows[1:] < rows[:-1]).any()):
            order = np.argsort(rows, kind="stable")
            rows = rows[order]
        reading = _Reading(opened, rows, order, run, fields)
        a, n = 0, len(rows)
        while a < n:
            unit = bisect_right(opened.starts, int(rows[a])) - 1
            stop = opened.starts[unit + 1]
            b = n if rows[-1] < stop else int(np.searchsorted(rows, stop))
            self._gather(reading, a, b, range(opened.units[unit], opened.units[unit + 1]))
            a = b
        report(reading.errors, bad)
        return reading.join()

    def _gather(self, reading: _Reading, a: int, b: int, groups: range) -> None:
        """Rows `a:b` of the reading, which lie in these row groups. A damaged group costs its own rows only."""
        opened, start = reading.shard, reading.shard.rows[groups.start]
        try:
            unit = self._decoded(opened, groups, reading.fields, b - a)
        except FormatError as error:
            if len(groups) == 1:
                reading.errors += self._row_errors(reading, error, range(a, b))
                return
            for g in groups:
                c = a + int(np.searchsorted(reading.rows[a:b], opened.rows[g + 1]))
                if c > a:
                    self._gather(reading, a, c, range(g, g + 1))
                a = c
            return
        if reading.run and not unit.unsound:
            first = int(reading.rows[a]) - start
            reading.parts.append({k: slice_rows(c, first, first + b - a, self._pool) for k, c in unit.columns.items()})
            return
        local = reading.rows[a:b] - start
        if unit.unsound:
            local = self._leave_out_unsound(reading, unit, local, a)
        if len(local):
            reading.parts.append({k: take_rows(c, local) for k, c in unit.columns.items()})

    def _leave_out_unsound(self, reading: _Reading, unit: _Unit, local: Ints, a: int) -> Ints:
        """Errors for the rows of the unit that have no value; the others."""
        sound = np.array([row not in unit.unsound for row in local.tolist()], np.bool_)
        path = self._store.path(reading.shard.entry.name)
        for i in np.flatnonzero(~sound).tolist():
            error = FormatError(
                f"{path}, {unit.unsound[int(local[i])]}. Write it anew (as binary, if it is not text), or read on without the row "
                'with on_error="skip"'
            )
            reading.errors += self._row_errors(reading, error, range(a + i, a + i + 1))
        return local[sound]

    def _row_errors(self, reading: _Reading, error: FormatError, at: range) -> list[RowError]:
        """One error for each of these rows wanted."""
        path, taken = self._store.path(reading.shard.entry.name), slice(at.start, at.stop)
        positions = np.asarray(at) if reading.order is None else reading.order[taken]
        return [
            RowError(f"dataset {self._dataset!r}, row {row}: {error}", row=row, path=path, position=position)
            for row, position in zip(reading.rows[taken].tolist(), positions.tolist(), strict=True)
        ]

    def close(self) -> None:
        """Let go of what is decoded."""
        with self._lock:
            self._files.clear()
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
        return _Shard.of(shard, entry, metadata), _METADATA_FACTOR * metadata.serialized_size, 1

    def _take_file(self, opened: _Shard) -> _OpenFile:
        """A file that no other thread uses, unchanged since the dataset was made."""
        with self._lock:
            idle = self._files.get(opened.shard)
            kept = idle.pop() if idle else None
        if kept is not None:
            kept.file.check()
            return kept
        file = self._store.open(opened.entry)
        return _OpenFile(
            file, pq.ParquetFile(_source(file), metadata=opened.metadata, pre_buffer=file.local_path is None)
        )

    def _give_file(self, shard: int, file: _OpenFile) -> None:
        """Keep it for the next unit; the shards read longest ago are closed."""
        with self._lock:
            self._files.setdefault(shard, []).append(file)
            self._files.move_to_end(shard)
            while sum(map(len, self._files.values())) > self._limit:
                self._files.popitem(last=False)

    def _decoded(self, opened: _Shard, groups: range, fields: frozenset[str] | None, served: int) -> _Unit:
        """Wanted columns of neighbouring row groups, from the cache or the file."""

        def decode() -> tuple[_Unit, int, int]:
            unit = self._decode(opened, groups, fields)
            size = sum(stored_bytes(column) for column in unit.columns.values())
            return unit, size, opened.rows[groups.stop] - opened.rows[groups.start]

        return self._units.get((opened.shard, groups.start, groups.stop, fields), served, decode)

    def _decode(self, opened: _Shard, groups: range, fields: frozenset[str] | None) -> _Unit:
        """Decode the wanted columns."""
        wanted = [name for name in opened.columns if fields is None or name in fields]
        if not wanted:
            return _Unit({}, {})
        path = self._store.path(opened.entry.name)
        if twice := next((name for name in wanted if wanted.count(name) > 1), None):
            raise FormatError(
                f"{path} has {wanted.count(twice)} columns named {twice!r}. Write it anew with one of them"
            )
        try:
            file = self._take_file(opened)
            table = file.parquet.read_row_groups(list(groups), columns=wanted, use_threads=self._threads)
            self._give_file(opened.shard, file)
            unsound = {
                row: f"column {name!r} holds text that is not UTF-8 ({reason})"
                for name in wanted
                for row, reason in unsound_rows(table.column(name)).items()
            }
            return _Unit({name: store_column(table.column(name)) for name in wanted}, unsound)
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, HeadraceError):
                raise
            raise FormatError(
                f"{path}, row groups {groups.start}-{groups.stop - 1}, columns {wanted}: {error}. Copy or write the file "
                "anew (smaller row groups help where a column is too large for one), or take it out of the dataset"
            ) from error

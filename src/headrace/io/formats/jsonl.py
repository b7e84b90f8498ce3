"""JSONL: one JSON object a line, plain or compressed.

A run of consecutive rows is one read and one `decode_lines` call on a struct that has only the wanted keys; other keys are
skipped whatever their type. Rules (each tested):

* only byte 0x0A ends a record; a carriage return before it, blank lines and a byte-order mark at the start are not data;
* integers are exact, however long (up to Python's limit of 4300 digits, beyond which the row is an error);
* `NaN` and `Infinity`, which Python writes though JSON has no such words, are read; a lone surrogate in a wanted field is
  an error, since it is not Unicode;
* a field that a row lacks is `MISSING`, a null is None; other types come as they are;
* a wanted field that makes the row nested more than `MOST_NESTED` deep is an error. Decoders give up at a depth that hangs on who
  calls them, and so do copying and pickling what they give; the limit is well below.
"""

from __future__ import annotations

import _thread
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from headrace.core.block import MISSING, Column, Ints, lookup
from headrace.core.op import BadRows
from headrace.errors import ConfigError
from headrace.io.compress import compression_of
from headrace.io.formats.base import Payload, ShardTable, check_shard_rows, map_files, open_limit, sorted_runs
from headrace.io.local_copy import index_compressed, open_decompressed
from headrace.io.newline_index import NewlineIndex, check_rows
from headrace.io.options import StoreOptions
from headrace.io.row_error import RowError, report
from headrace.io.row_index import build_index_of, find_index
from headrace.io.store import Entry, File, Store

PIECE_BYTES = 8 << 20
MOST_NESTED = 200
"""Containers inside one another, the row's own object among them."""
_TOO_DEEP = f"it is nested more than {MOST_NESTED} deep"
_CONTAINERS = frozenset({dict, list})
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class JsonlFormat:
    """See the module."""

    name = "jsonl"
    suffixes = tuple(s + c for s in (".jsonl", ".ndjson", ".json") for c in ("", ".gz", ".zst", ".zstd", ".bz2", ".xz"))

    def count(self, store: Store, entries: Sequence[Entry], options: StoreOptions) -> Ints:
        """Rows by the newline index, built where there is none yet."""

        def rows(entry: Entry) -> int:
            if not entry.size:
                return 0
            return _index(store, entry, options).rows

        return np.array(map_files(entries, rows), np.int64)

    def open(self, dataset: str, table: ShardTable, options: StoreOptions) -> JsonlReader:
        """A reader."""
        return JsonlReader(dataset, table, options)


FORMAT = JsonlFormat()


def _index(store: Store, entry: Entry, options: StoreOptions) -> NewlineIndex:
    """The kept index, or a new one."""
    index = find_index(store, entry, options)
    if index is not None:
        return index
    kind = compression_of(entry.name)
    return index_compressed(store, entry, options, kind) if kind else build_index_of(store, entry, options)


def _data(store: Store, entry: Entry, options: StoreOptions) -> File:
    """The file's rows as bytes: itself, a decompressed copy, or ranges of a remote file."""
    if kind := compression_of(entry.name):
        return open_decompressed(store, entry, options, kind)
    file = store.open(entry)
    if file.local_path is not None:
        return file
    from headrace.io.object_store import BlockFile  # loaded already: the file came from there

    return BlockFile(file, int(options.read_block_bytes))


@dataclass(frozen=True, slots=True)
class _Shard:
    """An open shard: its bytes and where the rows are in them."""

    name: str
    file: File
    index: NewlineIndex


@dataclass(frozen=True, slots=True)
class _Decoder:
    """Decoding for one choice of fields."""

    fields: tuple[str, ...] | None
    many: Callable[[bytes], list[Any]]
    one: Callable[[bytes], Any]

    @classmethod
    def make(cls, fields: frozenset[str] | None) -> _Decoder:
        if fields is None:
            whole = msgspec.json.Decoder(dict[str, Any])

            def one_whole(line: bytes) -> Any:
                try:
                    return whole.decode(line)
                except _DECODE_ERRORS:
                    return _second_opinion(line, None)

            return cls(None, whole.decode_lines, one_whole)
        names = tuple(sorted(fields))
        slots = [f"f{i}" for i in range(len(names))]
        row = msgspec.defstruct(
            "Row", [(slot, Any, MISSING) for slot in slots], rename=dict(zip(slots, names, strict=True)), gc=False
        )
        decoder = msgspec.json.Decoder(row)

        def one(line: bytes) -> Any:
            try:
                return decoder.decode(line)
            except _DECODE_ERRORS:
                value = _second_opinion(line, names)
                return row(*(value.get(name, MISSING) for name in names))

        return cls(names, decoder.decode_lines, one)

    def values(self, objects: Sequence[Any]) -> Iterable[Any]:
        """Every value of every row."""
        if self.fields is None:
            return chain.from_iterable(map(dict[str, Any].values, objects))
        return chain.from_iterable(map(attrgetter(f"f{i}"), objects) for i in range(len(self.fields)))

    def columns(self, objects: list[Any]) -> Payload:
        """Decoded objects as columns; a field that no row has is left out."""
        if self.fields is None:
            return objects
        columns: dict[str, Column] = {}
        for i, name in enumerate(self.fields):
            column = list(map(attrgetter(f"f{i}"), objects))
            if column and (column[0] is not MISSING or any(value is not MISSING for value in column)):
                columns[name] = column
        for name in [name for name in columns if "." in name]:
            _fill_nested(columns, name)
        return columns


def _is_deep(values: Iterable[Any]) -> bool:
    """True if a row with these values is nested more than `MOST_NESTED` deep."""
    level = [value for value in values if type(value) in _CONTAINERS]
    for _ in range(MOST_NESTED - 1):
        if not level:
            return False
        inner = chain.from_iterable(value.values() if type(value) is dict else value for value in level)
        level = [value for value in inner if type(value) in _CONTAINERS]
    return bool(level)


def _any_deep(decoder: _Decoder, objects: list[Any], data: bytes, index: NewlineIndex, first: int) -> bool:
    """True if one of these rows, from `first` on, is. Only rows with containers in them and as many brackets are looked into."""
    if _CONTAINERS.isdisjoint(map(type, decoder.values(objects))):
        return False
    opening = np.flatnonzero((np.frombuffer(data, np.uint8) | 0x20) == ord("{"))  # with this bit `[` is `{`
    starts = index.starts(np.arange(first, first + len(objects) + 1))
    many = np.flatnonzero(np.diff(np.searchsorted(opening, starts - starts[0])) > MOST_NESTED)
    return any(_is_deep(decoder.values([objects[i]])) for i in many.tolist())


def _with_all_the_stack(decode: Callable[[bytes], Any], line: bytes) -> Any:
    """`decode(line)` in a thread of its own, so that how deep it may go does not hang on who calls."""
    out: list[Any] = []
    done = threading.Lock()
    done.acquire()

    def run() -> None:
        try:
            out.append(decode(line))
        except Exception as error:  # noqa: BLE001  handed to the caller
            out.append(error)
        finally:
            done.release()

    _thread.start_new_thread(run, ())  # fewer calls than `threading` begins with
    with done:
        if isinstance(out[0], Exception):
            raise out[0]
        return out[0]


def _one_of(decoder: _Decoder, line: bytes) -> Any:
    try:
        return decoder.one(line)
    except RecursionError:
        return _with_all_the_stack(decoder.one, line)


def _second_opinion(line: bytes, fields: tuple[str, ...] | None) -> dict[str, Any]:
    """What Python's own decoder makes of a line that the fast one refused; ValueError with the reason."""
    value = json.loads(line.decode("utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"a row must be an object, this line is of type {type(value).__name__}")
    for name, item in value.items():
        if fields is None or name in fields:
            try:
                json.dumps({name: item}, ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError:
                raise ValueError(f"field {name!r} holds a lone surrogate, which is not Unicode text") from None
    return value


def _fill_nested(columns: dict[str, Column], name: str) -> None:
    """A dotted name is a key of some rows and a path in others: look it up in the rows that lack the key."""
    column, head = columns[name], columns.get(name.partition(".")[0])
    if isinstance(column, list) and isinstance(head, list) and any(value is MISSING for value in column):
        rest = name.partition(".")[2]
        columns[name] = [lookup(h, rest) if v is MISSING else v for v, h in zip(column, head, strict=True)]


class JsonlReader:
    """Rows of JSONL shards. Few files are open at a time (`open_limit`); one in use stays open until its read is over."""

    def __init__(self, dataset: str, table: ShardTable, options: StoreOptions) -> None:
        """Nothing is opened before the first read."""
        self._dataset = dataset
        self._table = table
        self._options = options
        self._store = table.store(options)
        self._max_line = int(options.jsonl.max_line_bytes)
        self._limit = open_limit(2)
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self._decoders: dict[frozenset[str] | None, _Decoder] = {}

    def read(self, shard: int, rows: Ints, fields: frozenset[str] | None, bad: BadRows | None = None) -> Payload:
        """Columns of the wanted fields, or dicts for `fields=None`."""
        run = check_shard_rows(self._dataset, self._table.names, self._table.counts, shard, rows)
        decoder = self._decoders.get(fields)
        if decoder is None:
            decoder = self._decoders[fields] = _Decoder.make(fields)
        if not len(rows):
            return decoder.columns([])
        opened = self._shard(shard)
        opened.file.check()
        runs, order = ([(int(rows[0]), int(rows[-1]) + 1)], None) if run else sorted_runs(rows)
        objects: list[Any] = []
        errors: list[RowError] = []
        for first, stop in runs:
            self._run(opened, decoder, first, stop, objects, errors)
        if errors or order is not None:
            objects = _restore_order(objects, errors, order)
            report(errors, bad)
        return decoder.columns(objects)

    def close(self) -> None:
        """Forget open shards; each file closes when its last read is over."""
        with self._lock:
            self._open.clear()

    def _shard(self, shard: int) -> _Shard:
        with self._lock:
            opened = self._open.get(shard)
            if opened is not None:
                self._open.move_to_end(shard)
                return opened
        opened = self._open_shard(self._table.entry(shard), int(self._table.counts[shard]))
        with self._lock:
            opened = self._open.setdefault(shard, opened)
            while len(self._open) > self._limit:
                self._open.popitem(last=False)
        return opened

    def _open_shard(self, entry: Entry, rows: int) -> _Shard:
        try:
            file = _data(self._store, entry, self._options)
        except ConfigError:  # the cache is full of copies: let go of ours that are idle, and try once more
            self.close()
            file = _data(self._store, entry, self._options)
        index = _index(self._store, entry, self._options)
        check_rows(index, rows, file.path)
        return _Shard(entry.name, file, index)

    def _run(
        self, shard: _Shard, decoder: _Decoder, first: int, stop: int, objects: list[Any], errors: list[RowError]
    ) -> None:
        """Decode rows `first:stop` and append one object each (the error in place of one that fails)."""
        index = shard.index
        begin, end = index.start(first), index.start(stop)
        if end - begin > PIECE_BYTES and stop - first > 1:
            for a, b in _pieces(index, first, stop):
                self._run(shard, decoder, a, b, objects, errors)
            return
        if end - begin <= self._max_line:
            data = shard.file.read(begin, end)
            if index.is_plain(first, stop):
                try:
                    decoded = decoder.many(data)
                    if len(decoded) == stop - first and not _any_deep(decoder, decoded, data, index, first):
                        objects.extend(decoded)
                        return
                except _DECODE_ERRORS:
                    pass  # one of the lines; find out which
        for row in range(first, stop):
            try:
                objects.append(self._one(shard, decoder, row))
            except RowError as error:
                error.position = len(objects)
                objects.append(error)
                errors.append(error)

    def _one(self, shard: _Shard, decoder: _Decoder, row: int) -> Any:
        """Decode one row, or say where it is and what is wrong with it."""
        index = shard.index
        begin, end = index.start(row), index.start(row + 1)
        cut = row == index.rows - 1 and not index.ends_in_newline
        if end - begin > self._max_line:
            reason, head = f"the line has {end - begin} bytes, more than max_line_bytes={self._max_line}", b""
        else:
            line = shard.file.read(begin, end)
            head = line[:40]
            try:
                value = _one_of(decoder, line)
                if not _is_deep(decoder.values([value])):
                    return value
                reason = _TOO_DEEP
            except RecursionError:
                reason = _TOO_DEEP
            except json.JSONDecodeError as error:
                reason = f"{error.msg} at character {error.pos + 1} of the line"
                if cut and head.startswith(b"{") and error.msg != "Extra data":
                    reason = f"the file is cut off: it ends at byte {end}, inside this record ({reason})"
            except ValueError as error:
                reason = str(error)
                if cut and isinstance(error, UnicodeDecodeError) and error.reason == "unexpected end of data":
                    reason = f"the file is cut off: it ends at byte {end}, inside a character"
        raise RowError(
            f"dataset {self._dataset!r}, shard {shard.name!r}, row {row}: {reason}. In {shard.file.path}, line "
            f"{index.line(row)}, bytes {begin}-{end}"
            + (" of the decompressed data" if compression_of(shard.name) else "")
            + (f", beginning {head.decode('utf-8', 'replace')!r}" if head else "")
            + '. Mend or remove the line, or read on without it with on_error="skip"',
            row=row,
            path=shard.file.path,
            offset=begin,
        )


def _pieces(index: NewlineIndex, first: int, stop: int) -> list[tuple[int, int]]:
    """Cut a run so that a piece has at most `PIECE_BYTES` (or one row)."""
    starts = index.starts(np.arange(first, stop + 1))
    pieces, a = [], 0
    while a < stop - first:
        b = max(a + 1, int(np.searchsorted(starts, starts[a] + PIECE_BYTES, "right")) - 1)
        pieces.append((first + a, first + b))
        a = b
    return pieces


def _restore_order(objects: list[Any], errors: list[RowError], order: Ints | None) -> list[Any]:
    """Objects in the order asked for, failed ones left out; errors get their place among the rows asked for."""
    if order is not None:
        for error in errors:
            error.position = int(order[error.position])
        inverse = np.empty(len(order), np.int64)
        inverse[order] = np.arange(len(order))
        objects = [objects[i] for i in inverse.tolist()]
    return [item for item in objects if not isinstance(item, RowError)] if errors else objects

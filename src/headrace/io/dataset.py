"""Datasets: what there is to read, as a frozen description.

A `Dataset` knows its shards, how many rows each has, and nothing of their content; it is a few bytes a shard and cheap to
send to a worker, which opens the files itself (`open`). Shards are ordered by name, bytewise, so neither the file system's
order nor the order of a list ever matters.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from headrace.core.block import Ints
from headrace.errors import ConfigError, MissingDataError
from headrace.io.detect import choose_format, common_root, format_named, format_of
from headrace.io.formats.base import Reader, ShardTable
from headrace.io.formats.memory import InMemoryShard, MemoryReader, MemoryTable
from headrace.io.options import StoreOptions
from headrace.io.store import Entry, Store, is_http, is_url, open_store

Options = StoreOptions | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A named set of shards.

    >>> data = Dataset.from_dict("toy", {0: InMemoryShard([{"text": "a"}, {"text": "b"}])})
    >>> data.total(), data.counts().tolist(), data.shard_names
    (2, [2], ('0',))
    """

    name: str
    format: str
    table: ShardTable | MemoryTable
    options: StoreOptions

    @classmethod
    def from_path(
        cls, name: str, path: str | os.PathLike[str], fmt: str | None = None, options: Options = None
    ) -> Dataset:
        """A folder (searched with its subfolders), a file, or a URL of either.

        Hidden files, folders whose names begin with a dot or an underscore, and files of no known format are left out (with
        a warning where the name says `.jsonl.tmp` or the like). A folder with files of several formats is an error; `fmt`
        chooses. A single file may have any suffix if `fmt` says what it is.
        """
        _check_name(name)
        settings = StoreOptions.from_any(options)
        place = _checked_path(name, path)
        one = is_url(place) and (format_of(place) is not None or (fmt is not None and is_http(place)))
        with _named(name, place):
            if one:
                store, entries, one = _file_at(place, settings)
            elif is_url(place) or os.path.isdir(place):
                store = open_store(place, settings)
                entries = store.scan()
            else:
                one = True
                store = open_store(os.path.dirname(os.path.abspath(place)), settings)
                entries = [store.stat(os.path.basename(os.path.abspath(place)))]
        return cls._of_entries(name, store.root, entries, fmt, settings, named=one)

    @classmethod
    def from_files(
        cls, name: str, paths: Sequence[str | os.PathLike[str]], fmt: str | None = None, options: Options = None
    ) -> Dataset:
        """Just these files, all of them; with `fmt` their suffixes do not matter.

        Shards are named by path below the files' common folder, and ordered by name.
        """
        _check_name(name)
        settings = StoreOptions.from_any(options)
        if isinstance(paths, (str, bytes, os.PathLike)):
            raise ConfigError(
                f"dataset {name!r}: from_files takes a list of paths, found one: {paths!r}; see from_path"
            )
        if not paths:
            raise ConfigError(f"dataset {name!r}: the list of files is empty")
        root, names = common_root([_checked_path(name, path) for path in paths])
        store = open_store(root, settings)
        entries: list[Entry] = []
        for file in names:
            with _named(name, store.path(file)):
                entries.append(store.stat(file))
        entries.sort(key=lambda entry: os.fsencode(entry.name))
        return cls._of_entries(name, store.root, entries, fmt, settings, named=True)

    @classmethod
    def from_dict(cls, name: str, shards: Mapping[int, InMemoryShard]) -> Dataset:
        """Rows in memory, by shard id. Ids need not be consecutive; shards are ordered by id."""
        _check_name(name)
        return cls(name, "memory", MemoryTable.of(name, shards), StoreOptions())

    @classmethod
    def _of_entries(
        cls, name: str, root: str, entries: list[Entry], fmt: str | None, options: StoreOptions, named: bool
    ) -> Dataset:
        chosen, files = choose_format(name, root, entries, fmt, named)
        store = open_store(root, options)
        counts = chosen.count(store, files, options)
        arrays = [np.array([getattr(e, f) for e in files], np.int64) for f in ("size", "stamp")]
        for array in (*arrays, counts):
            array.flags.writeable = False
        table = ShardTable(root, tuple(e.name for e in files), arrays[0], arrays[1], counts)
        return cls(name, chosen.name, table, options)

    def ids(self) -> Ints:
        """Shard ids, int64, rising."""
        if isinstance(self.table, MemoryTable):
            return self.table.ids
        return np.arange(len(self.table.names), dtype=np.int64)

    def counts(self) -> Ints:
        """Rows of each shard in the order of `ids()`, int64, read-only."""
        return self.table.counts

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the shards, in the order of `ids()`."""
        return self.table.names

    def total(self) -> int:
        """Rows in all."""
        return int(self.counts().sum())

    def max_count(self) -> int:
        """Rows of the largest shard."""
        return int(self.counts().max(initial=0))

    def shard_count(self) -> int:
        """Number of shards."""
        return len(self.table.names)

    def __len__(self) -> int:
        return self.total()

    @property
    def every_row(self) -> bool:
        """Whether each row is a record or an error. False: reading may leave rows out, so how many there are shows only then."""
        return True

    def raw_bytes(self) -> Ints:
        """Bytes of each shard as stored (an estimate for rows in memory), int64."""
        return self.table.sizes

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint compares: name, format, shard names and row counts. Content is not hashed."""
        return self.fingerprint_of_first(self.shard_count())

    def fingerprint_of_first(self, shards: int) -> dict[str, Any]:
        """What `fingerprint()` would say if the dataset had its first `shards` shards only."""
        shard_names, rows = self.shard_names[:shards], self.counts()[:shards]
        names = xxhash.xxh3_128(b"\0".join(os.fsencode(n) for n in shard_names)).hexdigest()
        counts = xxhash.xxh3_128(rows.astype("<i8").tobytes()).hexdigest()
        return {
            "name": self.name,
            "format": self.format,
            "shards": len(shard_names),
            "rows": int(rows.sum()),
            "shard_names": names,
            "shard_rows": counts,
        }

    def open(self, options: Options = None) -> Reader:
        """A reader, safe to use from several threads. `options` overlay those the dataset was made with."""
        settings = self.options if options is None else self.options.merge(StoreOptions.from_any(options))
        if isinstance(self.table, MemoryTable):
            return MemoryReader(self.name, self.table)
        return format_named(self.format).open(self.name, self.table, settings)

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {self.format}, {self.shard_count()} shards, {self.total()} rows)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Dataset:
        return self


def _file_at(url: str, settings: StoreOptions) -> tuple[Store, list[Entry], bool]:
    """The file of a URL, or what is below a folder of such a name (`out.parquet/`, as several engines write)."""
    folder, _, file = url.rpartition("/")
    store = open_store(folder, settings)
    try:
        return store, [store.stat(file)], True
    except FileNotFoundError:
        below = open_store(url, settings)
        entries = below.scan() if below.listable else []
        if not entries:
            raise
        return below, entries, False


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a dataset needs a name (weights, seeds and checkpoints go by it), found {name!r}")


def _checked_path(name: str, path: Any) -> str:
    try:
        place = os.fspath(path)
    except TypeError:
        place = None
    if not isinstance(place, str) or not place:
        more = "; for several files there is Dataset.from_files" if isinstance(path, (list, tuple)) else ""
        raise ConfigError(f"dataset {name!r}: give the path of a folder or file, found {path!r}{more}")
    if is_http(place) and "?" in place:
        raise ConfigError(
            f"dataset {name!r}: {place.partition('?')[0]}?... has a query, as links have that are signed for one request; they are "
            "not read, since a run asks again and again for as long as it lasts. Name the object itself (s3://, gs://, az://, with "
            "credentials in the environment), or copy the file"
        )
    return place


@contextmanager
def _named(name: str, place: str) -> Generator[None]:
    """What is not there is said to be missing from this dataset, with the nearest that is there."""
    try:
        yield
    except FileNotFoundError:
        where = place if is_url(place) else os.path.abspath(place)
        hint = "check the URL" if is_url(place) else _nearest(where)
        if any(sign in os.path.basename(where) for sign in "*?["):
            hint = "patterns are not filled in; give a folder, or the files with Dataset.from_files(name, glob.glob(pattern))"
        if is_url(name) or os.path.exists(name):
            hint = f"{name!r} is one: the dataset's name comes first, then its path"
        raise MissingDataError(f"dataset {name!r}: {where} does not exist; {hint}") from None


def _nearest(path: str) -> str:
    """What there is instead of a local path that does not exist."""
    import difflib  # only a slip of the pen pays for it

    missing = path
    while not os.path.exists(path) and path != os.path.dirname(path):
        path, missing = os.path.dirname(path), path
    try:
        names = os.listdir(path)
    except OSError:  # a hint only: a folder that may not be listed, or a file
        names = []
    near = difflib.get_close_matches(os.path.basename(missing), names, n=1)
    if near:
        return f"did you mean {os.path.join(path, near[0])!r}?"
    return f"{path!r} does, on this machine, and holds no {os.path.basename(missing)!r}"

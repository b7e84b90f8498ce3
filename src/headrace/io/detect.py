"""Which format files have, and which files of a folder belong to a dataset."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from headrace.errors import ConfigError, UnknownOptionError
from headrace.io.compress import SUFFIXES, compression_of
from headrace.io.formats.base import Format
from headrace.io.store import Entry, is_url

_SUFFIXES: Final = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".npy": "npy"}
FORMATS: Final = ("jsonl", "parquet", "npy")
_INDEX_FILES: Final = frozenset({"index.json", "_index.json"})
_UNREADABLE: Final = frozenset({".lz4", ".sz", ".snappy", ".br", ".lzma", ".lzo", ".z", ".zip", ".7z", *SUFFIXES})
"""Compressions: after the suffix of a format, one that the format is not read with."""
_CHECKSUMS: Final = (".crc", ".md5", ".sha1", ".sha256", ".sha512")
_log = logging.getLogger("headrace")


def format_named(name: str) -> Format:
    """A format by name; its module is loaded here, so that nobody pays for one that is not used."""
    if name not in FORMATS:
        raise UnknownOptionError("format", name, FORMATS)
    return import_module(f"headrace.io.formats.{name}").FORMAT


def format_of(name: str) -> str | None:
    """The format that a file's suffix says, or None.

    >>> format_of("a/b.jsonl.zst"), format_of("c.parquet"), format_of("README.md")
    ('jsonl', 'parquet', None)
    """
    stem, suffix = os.path.splitext(name.lower())
    if suffix in SUFFIXES:
        found = _SUFFIXES.get(os.path.splitext(stem)[1])
        return found if found == "jsonl" else None
    return _SUFFIXES.get(suffix)


def choose_format(
    dataset: str, root: str, entries: Sequence[Entry], fmt: str | None, named: bool = False
) -> tuple[Format, list[Entry]]:
    """The format of a dataset and the files that belong to it: all of them if the user named each (`named`)."""
    if fmt is not None:
        format_named(fmt)
    groups: dict[str, list[Entry]] = {}
    others: list[str] = []
    for entry in entries:
        found = format_of(entry.name)
        if found is None and _unreadable(entry.name):
            raise ConfigError(
                f"dataset {dataset!r}: {entry.name!r} of {root} is compressed in a way that is not read; JSONL may end in "
                f"{', '.join(SUFFIXES)}, Parquet and npy are read as they are. Write it anew, or take it out of the folder"
            )
        if named:
            found = found or fmt
        elif os.path.basename(entry.name) in _INDEX_FILES:
            found = None
        if found is None:
            others.append(entry.name)
        else:
            groups.setdefault(found, []).append(entry)
    if named and (stray := others + [e.name for kind, files in groups.items() if kind != (fmt or kind) for e in files]):
        raise ConfigError(
            f"dataset {dataset!r}: {stray[0]!r} of {root} is not {'of a known format' if fmt is None else fmt}; known suffixes "
            f"are {', '.join(sorted(_SUFFIXES))}, JSONL also with {', '.join(SUFFIXES)}. "
            + ("A file with another suffix needs fmt=..." if fmt is None else "Give it another dataset")
        )
    if fmt is None and len(groups) > 1:
        shown = "; ".join(f"{len(files)} of {name} (as {files[0].name!r})" for name, files in sorted(groups.items()))
        raise ConfigError(
            f"dataset {dataset!r}: {root} holds files of several formats: {shown}. Choose with fmt=..., or give the files "
            "with Dataset.from_files"
        )
    name = fmt or next(iter(groups), None)
    if name is None or not groups.get(name):
        kind = f"no {name} files" if name else "no files of a known format"
        seen = ", ".join(repr(entry.name) for entry in entries[:3]) or "nothing"
        raise ConfigError(
            f"dataset {dataset!r}: {root} holds {kind} ({len(entries)} files: {seen}); known suffixes are "
            f"{', '.join(sorted(_SUFFIXES))}, JSONL also with {', '.join(SUFFIXES)}"
        )
    files = groups[name]
    _refuse_doubles(dataset, root, files, named)
    _tell_of_others(dataset, root, others)
    return format_named(name), files


def _unreadable(name: str) -> bool:
    stem, suffix = os.path.splitext(name.lower())
    return suffix in _UNREADABLE and os.path.splitext(stem)[1] in _SUFFIXES


def _tell_of_others(dataset: str, root: str, others: Sequence[str]) -> None:
    """What is left out may be a shard that nobody finished writing, or nothing."""
    doubtful = [
        name
        for name in others
        if any(f"{suffix}." in name.lower() for suffix in _SUFFIXES) and not name.lower().endswith(_CHECKSUMS)
    ]
    if doubtful:
        _log.warning(
            "dataset %r: %s holds %d files that are left out by their names and may be unfinished shards: %s",
            dataset,
            root,
            len(doubtful),
            ", ".join(doubtful[:5]) + (" ..." if len(doubtful) > 5 else ""),
        )


def _refuse_doubles(dataset: str, root: str, files: Sequence[Entry], named: bool) -> None:
    """The same shard as `a.jsonl` and `a.jsonl.gz` would be read twice; so would a stray `.json` beside `.jsonl`."""
    stems: dict[str, str] = {}
    for entry in files:
        stem = os.path.splitext(entry.name)[0] if compression_of(entry.name) else entry.name
        if stem in stems:
            raise ConfigError(
                f"dataset {dataset!r}: {root} holds {stems[stem]!r} and {entry.name!r}, one shard twice. Remove one, or "
                "give the files with Dataset.from_files"
            )
        stems[stem] = entry.name
    suffixes = {os.path.splitext(stem.lower())[1]: stem for stem in stems}
    if ".json" in suffixes and len(suffixes) > 1 and not named:
        raise ConfigError(
            f"dataset {dataset!r}: {root} holds {suffixes['.json']!r} beside .jsonl or .ndjson shards, and a .json file may "
            "be something else than rows. Give the files with Dataset.from_files, or a path that holds only the shards"
        )


def common_root(paths: Sequence[str]) -> tuple[str, list[str]]:
    """The folder that all paths share, and each path's name below it. A file given twice is an error."""
    urls = [is_url(path) for path in paths]
    if any(urls) and not all(urls):
        raise ConfigError("local files and URLs cannot be mixed in one dataset; make two and mix them")
    if all(urls):
        schemes = {path.partition("://")[0] for path in paths}
        if len(schemes) > 1:
            raise ConfigError(f"one dataset cannot mix {', '.join(sorted(schemes))}; make one for each and mix them")
        scheme = schemes.pop()
        rests = [path.partition("://")[2] for path in paths]
        buckets = sorted({rest.partition("/")[0] for rest in rests})
        if len(buckets) > 1:
            places = " and ".join(f"{scheme}://{bucket}" for bucket in buckets[:2])
            raise ConfigError(f"one dataset cannot mix files of {places}; make one for each and mix them")
        base = os.path.commonpath([os.path.dirname(rest) for rest in rests])
        root, names = f"{scheme}://{base}", [os.path.relpath(rest, base or ".") for rest in rests]
    else:
        full = [os.path.abspath(path) for path in paths]
        root = os.path.commonpath([os.path.dirname(path) for path in full])
        names = [os.path.relpath(path, root) for path in full]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"the file {twice!r} of {root} is given twice; give it once (weights and passes repeat data)")
    return root, names

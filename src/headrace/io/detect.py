"""Which format files have, and which files of a folder belong to a dataset."""

from __future__ import annotations

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


def choose_format(dataset: str, root: str, entries: Sequence[Entry], fmt: str | None) -> tuple[Format, list[Entry]]:
    """The format of a dataset and the files that belong to it."""
    if fmt is not None:
        format_named(fmt)
    if fmt is not None and len(entries) == 1 and format_of(entries[0].name) is None:
        return format_named(fmt), list(entries)  # one file, named by the user: the suffix does not matter
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        if (found := format_of(entry.name)) and os.path.basename(entry.name) not in _INDEX_FILES:
            groups.setdefault(found, []).append(entry)
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
    _refuse_doubles(dataset, root, files)
    return format_named(name), files


def _refuse_doubles(dataset: str, root: str, files: Sequence[Entry]) -> None:
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
    if ".json" in suffixes and len(suffixes) > 1:
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

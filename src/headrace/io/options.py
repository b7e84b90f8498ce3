"""Settings of reading: frozen, and checked where they are born.

None of them changes which rows are read or in which order; they say where copies and indexes are kept and how much
memory and disk may be used for them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from headrace.errors import ConfigError, UnknownOptionError

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(value: int | str | None, name: str) -> int | None:
    """Bytes from an int or a string with a binary unit.

    >>> parse_bytes("64mb", "limit_bytes"), parse_bytes("1.5 GiB", "limit_bytes"), parse_bytes(10, "limit_bytes")
    (67108864, 1610612736, 10)
    """
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([bkmgt]?)(?:i?b)?\s*", value.lower())
        if match is None:
            raise ConfigError(f"{name}={value!r} is not a size; write bytes as a number, or like '750gb' or '64 MiB'")
        value = int(float(match[1]) * _UNITS[match[2]])
    if isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name}={value!r} is not a size; it must be a number of bytes, zero or more")
    return value


class _Options:
    """What all option classes share: making one from anything, and overlaying."""

    @classmethod
    def from_any(cls, value: Self | Mapping[str, Any] | bool | None) -> Self:
        """None or False give the defaults, a mapping gives its keys; an instance is taken as it is."""
        if value is None or value is False:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{cls.__name__} cannot be made from {value!r}; give a mapping, an instance or None")
        known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for key in value:
            if key not in known:
                raise UnknownOptionError(f"{cls.__name__} option", str(key), known)
        nested = {k: _NESTED[k].from_any(v) if k in _NESTED else v for k, v in value.items()}
        return cls(**nested)

    def merge(self, other: Self) -> Self:
        """These settings, overlaid by those of `other` that differ from the defaults."""
        default, changes = type(self)(), dict[str, Any]()
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if isinstance(theirs, _Options):
                changes[f.name] = mine.merge(theirs)
            elif theirs != getattr(default, f.name):
                changes[f.name] = theirs
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class CacheOptions(_Options):
    """Where indexes and local copies live, and how many bytes the copies may take.

    `root` is a folder (default: the environment's `HEADRACE_CACHE`, else `~/.cache/headrace`). `limit_bytes` bounds the
    decompressed and downloaded copies; None means half of what the disk has free. `enabled` keeps whole copies of remote
    shards; decompressed copies of local compressed JSONL are always kept, since rows are read at random.
    `index_beside` keeps newline indexes in the data folder (as `.NAME.headrace-index`) instead of in `root`.
    `download_retry` and `download_timeout` (seconds) apply to every request to an object store.
    """

    enabled: bool = False
    root: str | None = None
    limit_bytes: int | str | None = None
    index_beside: bool = False
    download_retry: int = 12
    download_timeout: float = 180.0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        object.__setattr__(self, "limit_bytes", parse_bytes(self.limit_bytes, "CacheOptions.limit_bytes"))
        if self.download_retry < 0:
            raise ConfigError(f"CacheOptions.download_retry={self.download_retry} must be zero or more")
        if self.download_timeout <= 0:
            raise ConfigError(f"CacheOptions.download_timeout={self.download_timeout} must be above zero (seconds)")


@dataclass(frozen=True, slots=True)
class ArrowOptions(_Options):
    """Sizes of Arrow's own thread pools in this process; None leaves them alone."""

    cpu_threads: int | None = None
    io_threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("cpu_threads", "io_threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"ArrowOptions.{name}={value} must be one or more")


@dataclass(frozen=True, slots=True)
class ParquetRGCacheOptions(_Options):
    """Decoded row groups kept in memory, shared by the threads of one reader.

    A row group whose rows have all been read once is let go first, so reading straight through stays small whatever the
    limit. With `enabled=False` every read decodes anew.
    """

    enabled: bool = True
    limit_bytes: int | str = 256 << 20

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        object.__setattr__(self, "limit_bytes", parse_bytes(self.limit_bytes, "ParquetRGCacheOptions.limit_bytes") or 0)


@dataclass(frozen=True, slots=True)
class ParquetOptions(_Options):
    """How Parquet is decoded. `use_threads` lets one row group's columns decode in parallel."""

    use_threads: bool = False
    rg_cache: ParquetRGCacheOptions = field(default_factory=ParquetRGCacheOptions)


@dataclass(frozen=True, slots=True)
class JsonlOptions(_Options):
    """Limits of JSONL. A line longer than `max_line_bytes` is an error of that row, not a full memory."""

    max_line_bytes: int | str = 1 << 30

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        limit = parse_bytes(self.max_line_bytes, "JsonlOptions.max_line_bytes")
        if not limit:
            raise ConfigError("JsonlOptions.max_line_bytes must be above zero")
        object.__setattr__(self, "max_line_bytes", limit)


@dataclass(frozen=True, slots=True)
class StoreOptions(_Options):
    """Everything about reading in one object.

    >>> StoreOptions.from_any({"cache": {"limit_bytes": "64mb"}}).cache.limit_bytes
    67108864
    """

    cache: CacheOptions = field(default_factory=CacheOptions)
    arrow: ArrowOptions = field(default_factory=ArrowOptions)
    parquet: ParquetOptions = field(default_factory=ParquetOptions)
    jsonl: JsonlOptions = field(default_factory=JsonlOptions)
    read_block_bytes: int | str = 4 << 20
    """Bytes asked of an object store at a time."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        size = parse_bytes(self.read_block_bytes, "StoreOptions.read_block_bytes")
        if not size or size < 4096:
            raise ConfigError(f"StoreOptions.read_block_bytes={self.read_block_bytes!r} must be at least 4096")
        object.__setattr__(self, "read_block_bytes", size)


_NESTED: dict[str, Any] = {
    "cache": CacheOptions,
    "arrow": ArrowOptions,
    "parquet": ParquetOptions,
    "rg_cache": ParquetRGCacheOptions,
    "jsonl": JsonlOptions,
}

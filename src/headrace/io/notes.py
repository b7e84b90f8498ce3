"""Small facts that took long to find out and stay true, kept in the cache folder under a key that says all they depend on."""

from __future__ import annotations

import contextlib
from pathlib import Path

from headrace.errors import ConfigError
from headrace.io.cache import cache_root, writing
from headrace.io.options import StoreOptions

_MOST_BYTES = 64 << 10


class Notes:
    """Notes of one kind. A folder that cannot be written only means that facts are found out anew."""

    def __init__(self, kind: str, options: StoreOptions) -> None:
        """`kind` names the folder below the cache folder."""
        self._kind, self._options = kind, options

    def get(self, key: str) -> bytes | None:
        """What was noted under a key."""
        with contextlib.suppress(OSError, ConfigError):
            data = (self._folder() / key).read_bytes()
            return data if len(data) <= _MOST_BYTES else None
        return None

    def put(self, key: str, value: bytes) -> None:
        """Note a fact."""
        with contextlib.suppress(OSError, ConfigError), writing(self._folder() / key) as file:
            file.write(value)

    def _folder(self) -> Path:
        return cache_root(self._options.cache) / self._kind

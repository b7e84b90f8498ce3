"""A place where the ranks of a run leave small messages for each other: a folder, an object-store prefix, a key-value store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from headrace.io.options import StoreOptions
from headrace.io.store import is_url


class Board(Protocol):
    """Named messages. A message is there as a whole or not at all, and may be replaced."""

    where: str
    longest_wait_s: float
    """Seconds between two looks, at most."""

    def put(self, name: str, data: bytes) -> None:
        """Leave a message."""
        ...

    def get(self, name: str) -> bytes | None:
        """A message, or None if there is none."""
        ...

    def present(self, folder: str, names: Iterable[str]) -> set[str]:
        """Those of `names` that are in `folder`."""
        ...

    def remove(self, folder: str) -> None:
        """Forget everything in a folder, if there is any."""
        ...


class FolderBoard:
    """A folder that all ranks see. Files are renamed into place; no locks, no clocks."""

    longest_wait_s = 0.1

    def __init__(self, root: str) -> None:
        """Under `root`, which is made."""
        self._root = Path(root)
        self.where = str(root)
        self._root.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, data: bytes) -> None:
        """Write beside, then rename."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)

    def get(self, name: str) -> bytes | None:
        """The file."""
        try:
            return (self._root / name).read_bytes()
        except FileNotFoundError:
            return None

    def present(self, folder: str, names: Iterable[str]) -> set[str]:
        """From one listing, which also makes network file systems look again."""
        try:
            return set(names) & set(os.listdir(self._root / folder))
        except FileNotFoundError:
            return set()

    def remove(self, folder: str) -> None:
        """Files that vanish meanwhile are as good as removed."""
        path = self._root / folder
        try:
            names = os.listdir(path)
        except FileNotFoundError:
            return
        for name in names:
            (path / name).unlink(missing_ok=True)
        try:
            path.rmdir()
        except OSError:  # someone late has just left a message here; the next round removes it
            return


class StoreBoard:
    """A prefix of an object store, through obstore."""

    longest_wait_s = 2.0

    def __init__(self, store: Any, where: str, prefix: str = "") -> None:
        """On an obstore store."""
        self._store, self.where = store, where
        self._prefix = f"{prefix}/" if prefix else ""

    def put(self, name: str, data: bytes) -> None:
        """One request; object stores replace objects as a whole."""
        import obstore

        obstore.put(self._store, self._prefix + name, data)

    def get(self, name: str) -> bytes | None:
        """One request."""
        import obstore

        try:
            return bytes(obstore.get(self._store, self._prefix + name).bytes())
        except FileNotFoundError:
            return None

    def present(self, folder: str, names: Iterable[str]) -> set[str]:
        """One listing, however many ranks there are."""
        return set(names) & {path.rpartition("/")[2] for path in self._list(folder)}

    def remove(self, folder: str) -> None:
        """One listing, one deletion."""
        import obstore

        if paths := self._list(folder):
            obstore.delete(self._store, paths)

    def _list(self, folder: str) -> list[str]:
        import obstore

        return [meta["path"] for batch in obstore.list(self._store, f"{self._prefix}{folder}/") for meta in batch]


def open_board(root: str, options: Any = None) -> Board:
    """The board at a local path, or at a URL of an object store (`io_options` as for datasets)."""
    if not is_url(root):
        return FolderBoard(root)
    from headrace.io.object_store import connect  # obstore is loaded only for URLs

    store, prefix = connect(root, StoreOptions.from_any(options))
    return StoreBoard(store, root, prefix)

"""The launcher's key-value store as a board: `aggregate_store="torch://"` or `"torch://host:port"`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from headrace.errors import ConfigError


class TorchStoreBoard:
    """A `TCPStore`, as a client: the one of the launcher (`MASTER_ADDR`, `MASTER_PORT`), unless an address is given."""

    longest_wait_s = 0.1

    def __init__(self, url: str, run_id: str, timeout_s: float) -> None:
        """Connect to the store that already runs there."""
        address = url.removeprefix("torch://").strip("/")
        host, _, port = address.partition(":")
        host, port = host or os.environ.get("MASTER_ADDR", ""), port or os.environ.get("MASTER_PORT", "")
        if not host or not port.isdigit():
            raise ConfigError(
                f"option aggregate_store={url!r}: give torch://host:port, or start with torchrun, which sets MASTER_ADDR and "
                f"MASTER_PORT (found {host or 'no host'}, {port or 'no port'})"
            )
        self.where = f"torch://{host}:{port}/{run_id}"
        client = TCPStore(
            host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        self._store = PrefixStore(f"headrace/{run_id}", client)

    def put(self, name: str, data: bytes) -> None:
        """Set a key."""
        self._store.set(name, data)  # pyright: ignore[reportArgumentType]  bytes are taken as well

    def get(self, name: str) -> bytes | None:
        """A key's value; `TCPStore.get` itself would wait for it."""
        return self._store.get(name) if self._store.check([name]) else None

    def present(self, folder: str, names: Iterable[str]) -> set[str]:
        """One question a name: the store cannot list."""
        return {name for name in names if self._store.check([f"{folder}/{name}"])}

    def remove(self, folder: str) -> None:
        """Keys that ranks and leaders write; the store has nothing else under a round."""
        for name in ("merged", "failed"):
            self._store.delete_key(f"{folder}/{name}")
        rank = 1
        while self._store.delete_key(f"{folder}/rank-{rank}"):
            rank += 1

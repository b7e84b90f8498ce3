"""Object stores by way of obstore: S3, Google Cloud Storage, Azure, HTTP, and one in memory.

Credentials come from the environment, as each service's own tools read them (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`,
`AWS_SKIP_SIGNATURE=true` for public buckets, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME` ...). Every range
is asked for with the ETag of the file as it was when the dataset was made, and the answer must carry it (not every server
minds the question), so a file replaced under the run is an error.
"""

from __future__ import annotations

import os
import posixpath
import re
import time
from datetime import timedelta
from typing import Any, cast

import obstore
import xxhash
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import MemoryStore, from_url

from headrace.errors import ConfigError, DataChangedError, FormatError
from headrace.io.group_cache import GroupCache
from headrace.io.options import StoreOptions
from headrace.io.store import Entry, File

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https", "memory")
_BLOCKS = 16
_TRIES = 3
_memory: dict[str, MemoryStore] = {}


def memory_store(name: str) -> MemoryStore:
    """The store behind `memory://name/...`: one a name, in this process only."""
    return _memory.setdefault(name, MemoryStore())


class ObjectStore:
    """A prefix of an object store."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        """Connect lazily to `url` (`s3://bucket/prefix`)."""
        scheme = url.partition("://")[0]
        self.root = url.rstrip("/")
        self._store, self._prefix = connect(url, options)
        self.listable = scheme not in ("http", "https") or not type(self._store).__name__.startswith("HTTP")

    def scan(self) -> list[Entry]:
        """Every object below the prefix, ordered by the bytes of its name."""
        if not self.listable:
            raise ConfigError(
                f"{self.root}: folders cannot be listed over HTTP; give the files with Dataset.from_files"
            )
        prefix = f"{self._prefix}/" if self._prefix else ""
        found = []
        try:
            for batch in obstore.list(self._store, prefix or None):
                for meta in batch:
                    name = meta["path"].removeprefix(prefix)
                    parts = name.split("/")
                    hidden = any(part.startswith((".", "_")) for part in parts[:-1]) or parts[-1].startswith(".")
                    if not hidden and parts[-1]:
                        found.append(_entry(name, meta))
        except (BaseError, OSError) as error:
            raise _access_error(self.root, error) from error
        return sorted(found, key=lambda entry: entry.name.encode())

    def stat(self, name: str) -> Entry:
        """One object."""
        try:
            return _entry(name, obstore.head(self._store, self._key(name)))
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.path(name)} does not exist") from None
        except (BaseError, OSError) as error:
            raise _access_error(self.path(name), error) from error

    def path(self, name: str) -> str:
        """The object's URL."""
        return f"{self.root}/{name}" if name else self.root

    def open(self, entry: Entry) -> RemoteFile:
        """Ask for the object's ETag and compare."""
        try:
            meta = obstore.head(self._store, self._key(entry.name))
        except FileNotFoundError:
            raise DataChangedError(f"{self.path(entry.name)} is gone; it was there when the dataset was made") from None
        except (BaseError, OSError) as error:
            raise _access_error(self.path(entry.name), error) from error
        now = _entry(entry.name, meta)
        if now != entry:
            raise DataChangedError(
                f"{self.path(entry.name)} changed: it has {now.size} bytes and had {entry.size}, or another ETag "
                f"({meta.get('e_tag')}). Make the dataset anew; checkpoints of the old data do not fit the new"
            )
        return RemoteFile(self._store, self._key(entry.name), self.path(entry.name), meta)

    def _key(self, name: str) -> str:
        return posixpath.join(self._prefix, name) if self._prefix else name


class RemoteFile:
    """Byte ranges of one object."""

    local_path: str | None = None

    def __init__(self, store: Any, key: str, path: str, meta: Any) -> None:
        """`meta` is what the store says of the object; every range must be of an object of which it says the same."""
        self._store = store
        self._key = key
        self._meta = meta
        self.path = path
        self.size: int = meta["size"]

    def read(self, start: int, stop: int) -> bytes:
        """One range request, or a few if the answer has not the bytes asked for."""
        if stop <= start:
            return b""
        got: list[int] = []
        while len(got) < _TRIES:
            data = self._get(start, stop)
            if len(data) == stop - start:
                return data
            got.append(len(data))
            time.sleep(0.05 * 2 ** len(got))
        raise DataChangedError(
            f"{self.path} gave {', '.join(map(str, got))} bytes in {_TRIES} answers for the range {start}-{stop}, which has "
            f"{stop - start}. A proxy that cuts off or compresses, or a file that changed under the same ETag"
        )

    def _get(self, start: int, stop: int) -> bytes:
        options: Any = {"range": (start, stop)}
        tag = self._meta.get("e_tag")
        if tag and not tag.startswith("W/"):
            options["if_match"] = tag
        try:
            answer = obstore.get(self._store, self._key, options=options)
            if _changed(self._meta, answer.meta):
                raise DataChangedError(
                    f"{self.path} was replaced while it was read: it has {answer.meta['size']} bytes and had {self.size}, or "
                    f"another ETag ({answer.meta.get('e_tag')}, not {tag}). Make the dataset anew"
                )
            return bytes(answer.bytes())
        except (PreconditionError, FileNotFoundError) as error:
            raise DataChangedError(
                f"{self.path} was replaced or removed while it was read ({_reason(error)}). Make the dataset anew"
            ) from error
        except (BaseError, OSError) as error:
            raise _access_error(f"{self.path}, bytes {start}-{stop}", error) from error

    def check(self) -> None:
        """Nothing: each range carries the ETag."""


class BlockFile:
    """A remote file read in aligned blocks, so that small neighbouring reads share a request.

    A block is let go when all its bytes have been read once; threads share blocks.
    """

    local_path: str | None = None

    def __init__(self, file: File, block_bytes: int) -> None:
        """Read `file` through blocks."""
        self._file = file
        self._block = block_bytes
        self._cache: GroupCache[bytes] = GroupCache(_BLOCKS * block_bytes)
        self.path = file.path
        self.size = file.size

    def read(self, start: int, stop: int) -> bytes:
        """Bytes `start:stop`."""
        parts = []
        for number in range(start // self._block, -(-stop // self._block)):
            first = number * self._block
            last = min(first + self._block, self.size)
            a, b = max(start, first), min(stop, last)

            def fetch(first: int = first, last: int = last) -> tuple[bytes, int, int]:
                return self._file.read(first, last), last - first, last - first

            parts.append(self._cache.get(number, b - a, fetch)[a - first : b - first])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def check(self) -> None:
        """As the file below."""
        self._file.check()


def connect(url: str, options: StoreOptions) -> tuple[Any, str]:
    """An obstore store for `url`, and the prefix that keys in it begin with."""
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        raise ConfigError(f"{url}: no store for {scheme}://; known: {', '.join(f'{s}://' for s in SCHEMES)}")
    if scheme == "memory":
        name, _, prefix = rest.strip("/").partition("/")
        return memory_store(name), prefix
    return _connect(url, scheme, options), ""


def _connect(url: str, scheme: str, options: StoreOptions) -> Any:
    client: dict[str, Any] = {"timeout": timedelta(seconds=options.cache.download_timeout)}
    config: dict[str, Any] = {}
    endpoint = (
        os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("S3_ENDPOINT_URL")
    )
    if scheme in ("s3", "s3a") and endpoint:
        config["endpoint"] = endpoint
    if scheme == "http" or (config and endpoint and endpoint.startswith("http://")):
        client["allow_http"] = True
    try:
        connect = cast(Any, from_url)  # its overloads want one type a service
        retry = {"max_retries": options.cache.download_retry}
        return connect(url, config=config or None, client_options=client, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{url}: {_reason(error)}") from error


def _entry(name: str, meta: Any) -> Entry:
    stamp = meta.get("e_tag") or meta["last_modified"].isoformat()
    return Entry(name, meta["size"], xxhash.xxh3_64_intdigest(stamp.encode()) >> 1)


def _changed(old: Any, new: Any) -> bool:
    """True if two answers are about different contents. A weak ETag equals the strong one; an answer may have none."""
    tags = [(meta.get("e_tag") or "").removeprefix("W/") for meta in (old, new)]
    if old["size"] != new["size"] or (all(tags) and tags[0] != tags[1]):
        return True
    return not any(tags) and old["last_modified"] != new["last_modified"]


def _reason(error: Exception) -> str:
    """What went wrong in one line: the library's own words, and the code and message of the server's answer."""
    text = str(error).partition("\n\nDebug source")[0]
    said = re.findall(r"<(?:Code|Message)>(.*?)</", text, re.DOTALL)
    text = text.partition("<?xml")[0] if said else text
    return " ".join(f"{text} {': '.join(said)}".split())[:1000].rstrip(": .")


def _access_error(what: str, error: Exception) -> FormatError:
    reason = _reason(error)
    clock = ", the clock of this machine (signed requests are refused if it is minutes off)" if "403" in reason else ""
    return FormatError(
        f"{what} cannot be read: {reason}. Check the name, the credentials in the environment{clock} and the endpoint "
        "(AWS_ENDPOINT_URL, AWS_SKIP_SIGNATURE=true for public buckets)"
    )

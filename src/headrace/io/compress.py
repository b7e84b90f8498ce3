"""Decompressing as a stream: gzip, zstd, bzip2 and xz, with all their members and frames.

A compressed file may be several members one after the other (as `cat a.gz b.gz` makes, and BGZF, and pzstd): they are one
stream. A file that ends inside a member is an error with its byte offset, never a short read. Memory is bounded by
`OUTPUT_BYTES` a step (for zstd by its window), whatever the ratio.
"""

from __future__ import annotations

import bz2
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

from headrace.errors import FormatError
from headrace.io.newline_index import split_chunks
from headrace.io.store import File

SUFFIXES = (".gz", ".zst", ".zstd", ".bz2", ".xz")
INPUT_BYTES = 1 << 20
OUTPUT_BYTES = 4 << 20
_ZSTD_SLICE = 16 << 10
_PADDED = ("gz", "xz")
"""Kinds whose members may be followed by zero bytes that mean nothing."""


class _Decoder(Protocol):
    """One member, in the manner of `bz2.BZ2Decompressor`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Gzip:
    """gzip, by isal where it is installed (three times faster), else by zlib."""

    def __init__(self) -> None:
        self._inner: Any = _inflater()
        self._pending = b""

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not self._pending

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        out = self._inner.decompress(self._pending + data, max_length)
        self._pending = b"" if self._inner.eof else self._inner.unconsumed_tail
        return out


class _Zstd:
    """zstd frames, skippable ones among them. Input goes in small slices, since output cannot be bounded otherwise."""

    def __init__(self) -> None:
        import zstandard  # not everybody reads zstd

        self._inner = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self._pending = b""

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not self._pending

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data + self._pending

    def decompress(self, data: bytes, max_length: int) -> bytes:
        data = self._pending + data if self._pending else data
        parts, size, at = [], 0, 0
        while at < len(data) and size < max_length and not self._inner.eof:
            part = self._inner.decompress(data[at : at + _ZSTD_SLICE])
            at += _ZSTD_SLICE
            size += len(part)
            parts.append(part)
        self._pending = data[at:]
        return b"".join(parts)


def _inflater() -> Any:
    try:
        from isal import isal_zlib  # the extra `headrace[gzip]`
    except ImportError:
        return zlib.decompressobj(31)
    return isal_zlib.decompressobj(31)


def _errors() -> tuple[type[Exception], ...]:
    found: list[type[Exception]] = [zlib.error, lzma.LZMAError, OSError, EOFError, ValueError]
    try:
        from isal import isal_zlib

        found.append(cast(type[Exception], isal_zlib.error))
    except ImportError:
        pass
    try:
        import zstandard

        found.append(zstandard.ZstdError)
    except ImportError:
        pass
    return tuple(found)


_DECODERS: dict[str, Callable[[], _Decoder]] = {
    "gz": _Gzip,
    "zst": _Zstd,
    "bz2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
}


def compression_of(name: str) -> str | None:
    """`gz`, `zst`, `bz2`, `xz` or None, by the suffix."""
    suffix = os.path.splitext(name.lower())[1]
    return {".zstd": "zst"}.get(suffix, suffix[1:]) if suffix in SUFFIXES else None


def decompressed(file: File, kind: str) -> Iterator[bytes]:
    """The data of a compressed file, in pieces. `kind` is `gz`, `zst`, `bz2` or `xz`.

    Raises FormatError with path and byte offset where the file is damaged or ends too early.
    """
    decoder: _Decoder | None = None
    at = members = 0
    for chunk in split_chunks(file.read, file.size, INPUT_BYTES):
        at += len(chunk)
        pending = chunk
        while pending or (decoder is not None and not decoder.needs_input):
            if decoder is None:
                if members and kind in _PADDED:
                    pending = pending.lstrip(b"\0")
                if not pending:
                    break
                decoder = _DECODERS[kind]()
            data = _step(decoder, pending, file, at - len(pending), kind)
            pending = b""
            if data:
                yield data
            if decoder.eof:
                pending = decoder.unused_data
                decoder = None
                members += 1
    if decoder is not None:
        raise FormatError(
            f"{file.path} is cut off: its {kind} data ends at byte {file.size} of the file, inside member {members + 1}. "
            "Copy or compress it anew"
        )


def _step(decoder: _Decoder, pending: bytes, file: File, offset: int, kind: str) -> bytes:
    try:
        return decoder.decompress(pending, OUTPUT_BYTES)
    except _errors() as error:
        raise FormatError(
            f"{file.path}: damaged {kind} data at byte {offset} or up to {INPUT_BYTES} bytes after it: {error}. Copy or "
            "compress the file anew, or take it out of the dataset"
        ) from error

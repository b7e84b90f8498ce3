"""The newline index of a JSONL file: where each row begins.

One pass over the bytes finds every line feed; only byte 0x0A ends a record. A byte-order mark at the start of the file
is not data, and lines of nothing but spaces, tabs and carriage returns are not rows. The index also notes rows that do
not begin with `{` and end with `}` ("odd" rows): a run without any can be decoded as one piece, since then no object can
span lines, and an equal count of objects and rows means exactly one object a line.

On disk and in memory a row costs four bytes: the low half of its offset. `wraps` holds the rows at which the high half
grows, so files beyond 4 GiB need nothing more.

File layout: magic, uint32 low halves `[rows + 1]` (the last is the end of data), msgpack footer, its length, magic.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.core.block import Ints
from headrace.errors import InternalError

VERSION = 1
MAGIC = b"HRNLIDX1"
CHUNK = 4 << 20
_MAP_ABOVE = 1 << 20
"""Larger index files are mapped (a map keeps a file descriptor, of which a process has few)."""
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r"
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class NewlineIndex:
    """Row starts of one file. `size` and `stamp` are those of the file indexed (of the compressed one, if it is)."""

    low: NDArray[np.uint32]
    wraps: Ints
    odd: Ints
    blanks: Ints
    size: int
    stamp: int
    ends_in_newline: bool

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.low) - 1

    @property
    def data_end(self) -> int:
        """Bytes of (decompressed) data."""
        return self.start(self.rows)

    def start(self, row: int) -> int:
        """Byte offset of a row; of the end of data for `row == rows`."""
        low = int(self.low[row])
        return low + (int(np.searchsorted(self.wraps, row, "right")) << 32) if len(self.wraps) else low

    def starts(self, rows: Ints) -> Ints:
        """Byte offsets of rows, int64."""
        low = self.low[rows].astype(np.int64)
        return low + (np.searchsorted(self.wraps, rows, "right") << 32) if len(self.wraps) else low

    def is_plain(self, first: int, stop: int) -> bool:
        """True if no row of `first:stop` is odd."""
        return not len(self.odd) or bool(np.searchsorted(self.odd, first) == np.searchsorted(self.odd, stop))

    def line(self, row: int) -> int:
        """Line number in the file, from 1, blank lines counted."""
        return row + 1 + int(np.searchsorted(self.blanks, row, "right"))


class LineScanner:
    """Finds rows in chunks of bytes. Memory is one chunk, whatever the length of a line."""

    def __init__(self) -> None:
        """Begin at the start of a file."""
        self.rows = 0
        self.odd: list[int] = []
        self.blanks: list[int] = []
        self._position = 0
        self._head = b""
        self._line_start = 0
        self._line_blank = True
        self._line_first = 0
        self._line_tail = b""

    def feed(self, data: bytes) -> Ints:
        """Take the next bytes; starts of the rows that ended in them, int64."""
        if self._position == 0:
            data = self._head + data
            if len(data) < 3 and _BOM.startswith(data):
                self._head = data
                return np.empty(0, np.int64)
            if data.startswith(_BOM):
                data = data[3:]
                self._position = self._line_start = 3
        chunk = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(chunk == 10)
        if not len(ends):
            self._continue_line(data)
            self._position += len(data)
            return np.empty(0, np.int64)
        first_end = int(ends[0])
        self._continue_line(data[:first_end])
        found = [self._end_line()]
        if len(ends) > 1:
            found.append(self._whole_lines(data, chunk, ends))
        last = int(ends[-1]) + 1
        self._line_start = self._position + last
        self._continue_line(data[last:])
        self._position += len(data)
        return np.concatenate(found)

    def finish(self) -> tuple[Ints, int, bool]:
        """Starts of a last row without newline, the end of data, and whether the last line ended in a newline."""
        if self._position == 0 and self._head and self._head != _BOM:
            head, self._head = self._head, b""
            self._continue_line(head)
            self._position = len(head)
        open_line = self._position > self._line_start
        starts = self._end_line() if open_line else np.empty(0, np.int64)
        return starts, self._position, not open_line

    def _continue_line(self, piece: bytes) -> None:
        """Add bytes to the line that is not over."""
        if not piece:
            return
        if self._line_blank:
            rest = piece.lstrip(_BLANK)
            if rest:
                self._line_blank = False
                self._line_first = piece[0] if not self._line_tail else 0
        self._line_tail = (self._line_tail + piece[-2:])[-2:]

    def _end_line(self) -> Ints:
        """Close the line that was not over."""
        if self._line_blank:
            self.blanks.append(self.rows)
            starts = np.empty(0, np.int64)
        else:
            if self._line_first != 0x7B or not self._line_tail.removesuffix(b"\r").endswith(b"}"):
                self.odd.append(self.rows)
            self.rows += 1
            starts = np.array([self._line_start], np.int64)
        self._line_blank, self._line_first, self._line_tail = True, 0, b""
        return starts

    def _whole_lines(self, data: bytes, chunk: NDArray[np.uint8], ends: Ints) -> Ints:
        """Lines that begin and end inside `data`."""
        starts, stops = ends[:-1] + 1, ends[1:]
        empty = starts == stops
        last = stops - 1
        last = np.where(~empty & (chunk[last] == 13), np.maximum(last - 1, starts), last)
        plain = ~empty & (chunk[starts] == 0x7B) & (chunk[last] == 0x7D)
        unusual = np.flatnonzero(~plain)
        if not len(unusual):
            self.rows += len(starts)
            return starts + self._position
        blank = empty.copy()
        for i in unusual[~empty[unusual]].tolist():
            line = data[starts[i] : stops[i]].strip(_BLANK)
            blank[i] = not line
            plain[i] = line.startswith(b"{") and line.endswith(b"}")
        row = self.rows + np.cumsum(~blank) - ~blank
        self.blanks.extend(row[blank].tolist())
        self.odd.extend(row[~blank & ~plain].tolist())
        self.rows += int((~blank).sum())
        return starts[~blank] + self._position


def write_index(chunks: Iterable[bytes], out: IO[bytes], stamp_of: Any) -> None:
    """Scan `chunks` and write the index. `stamp_of()` gives (size, stamp) once the chunks are through."""
    scanner, wraps, high, row = LineScanner(), list[int](), 0, 0
    out.write(MAGIC)

    def emit(starts: Ints) -> None:
        nonlocal high, row
        if not len(starts):
            return
        top = int(starts[-1]) >> 32
        while high < top:
            high += 1
            wraps.append(row + int(np.searchsorted(starts, high << 32)))
        row += len(starts)
        out.write((starts & _LOW).astype("<u4").tobytes())

    for chunk in chunks:
        emit(scanner.feed(chunk))
    last, end, closed = scanner.finish()
    emit(last)
    emit(np.array([end], np.int64))
    size, stamp = stamp_of()
    footer = msgspec.msgpack.encode(
        {
            "version": VERSION,
            "rows": scanner.rows,
            "size": size,
            "stamp": stamp,
            "closed": closed,
            "wraps": np.array(wraps, "<i8").tobytes(),
            "odd": np.array(scanner.odd, "<i8").tobytes(),
            "blanks": np.array(scanner.blanks, "<i8").tobytes(),
        }
    )
    out.write(footer + struct.pack("<I", len(footer)) + MAGIC)


def read_index(path: str) -> NewlineIndex | None:
    """Read or map an index file; None if there is none for this user, or it is not whole (it is rebuilt then)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        return read_index_of(fd)
    finally:
        os.close(fd)


def read_index_of(fd: int) -> NewlineIndex | None:
    """Read or map the index in an open file."""
    size = os.fstat(fd).st_size
    if size < 2 * len(MAGIC) + 8:
        return None
    data: Any = os.pread(fd, size, 0) if size <= _MAP_ABOVE else mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    if len(data) != size or data[: len(MAGIC)] != MAGIC or data[-len(MAGIC) :] != MAGIC:
        return None
    (length,) = struct.unpack("<I", data[-len(MAGIC) - 4 : -len(MAGIC)])
    footer = msgspec.msgpack.decode(data[-len(MAGIC) - 4 - length : -len(MAGIC) - 4])
    if footer["version"] != VERSION:
        return None
    low = np.frombuffer(data, "<u4", footer["rows"] + 1, len(MAGIC))
    wraps, odd, blanks = (np.frombuffer(footer[name], "<i8") for name in ("wraps", "odd", "blanks"))
    return NewlineIndex(low, wraps, odd, blanks, footer["size"], footer["stamp"], footer["closed"])


def split_chunks(read: Any, size: int, chunk: int = CHUNK) -> Iterator[bytes]:
    """`read(start, stop)` over a file, chunk by chunk."""
    for start in range(0, size, chunk):
        yield read(start, min(start + chunk, size))


def check_rows(index: NewlineIndex, rows: int, path: str) -> None:
    """An index must tell the row count that the dataset was made with."""
    if index.rows != rows:
        raise InternalError(f"index of {path} has {index.rows} rows, the dataset {rows}, though the file is the same")

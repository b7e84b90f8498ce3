"""Reading a file of lines from several places at once.

`split_seeks` finds the places, a `FileReader` reads from one of them, `emit` (in `emit.py`) gives each reader a process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from headrace.errors import ConfigError, DataChangedError

_CHUNK = 1 << 20


def split_seeks(path: str | os.PathLike[str], splits: int) -> list[tuple[int, int]]:
    """Cut a file of lines into `splits` parts of about equal size: `[(position in bytes, number of lines), ...]`.

    The parts cover the file exactly; a line belongs to the part in which it begins. Only a line feed ends a line,
    and a last line without one counts. A file with fewer lines than `splits` gives fewer parts, an empty one none.
    """
    if splits < 1:
        raise ConfigError(f"splits must be at least 1, got {splits}")
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        starts = [0]
        for n in range(1, splits):
            start = _next_line(file, size * n // splits)
            if starts[-1] < start < size:
                starts.append(start)
        return [
            (start, _count_lines(file, start, stop))
            for start, stop in zip(starts, [*starts[1:], size], strict=True)
            if stop > start
        ]


def _next_line(file: BinaryIO, position: int) -> int:
    """The start of the first line that begins at or after `position`."""
    if position == 0:
        return 0
    file.seek(position - 1)
    file.readline()
    return file.tell()


def _count_lines(file: BinaryIO, start: int, stop: int) -> int:
    file.seek(start)
    count, last, left = 0, b"\n", stop - start
    while left and (chunk := file.read(min(_CHUNK, left))):
        count += chunk.count(b"\n")
        last, left = chunk[-1:], left - len(chunk)
    return count + (last != b"\n")


@dataclass(frozen=True, slots=True)
class FileReader:
    """Iterates over `num_lines` lines of a file from byte `pos` on, without their line ends.

    Lines are text in `encoding`, or bytes with `encoding=None`. A line ends at a line feed only (a carriage return before
    it goes with it), never at the other characters that `str.splitlines` knows: those may be inside a JSON string. A
    byte-order mark at the start of the file is not part of the first line.
    """

    path: str | os.PathLike[str]
    pos: int = 0
    num_lines: int | None = None
    encoding: str | None = "utf-8"

    def __iter__(self) -> Iterator[str | bytes]:
        """Open the file anew, and read."""
        with open(self.path, "rb") as file:
            file.seek(self.pos)
            count = 0
            while count != self.num_lines and (line := file.readline()):
                if count == 0 and self.pos == 0:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                line = line.removesuffix(b"\n").removesuffix(b"\r")
                yield line if self.encoding is None else self._decode(line, count)
                count += 1
        if self.num_lines is not None and count < self.num_lines:
            raise DataChangedError(
                f"{os.fspath(self.path)}: expected {self.num_lines} lines from byte {self.pos} on, found {count}; "
                "the file became shorter after split_seeks looked at it. Split it again."
            )

    def _decode(self, line: bytes, count: int) -> str:
        assert self.encoding is not None
        try:
            return line.decode(self.encoding)
        except UnicodeDecodeError as error:
            error.reason += f" ({os.fspath(self.path)}, line {count} from byte {self.pos} on)"
            raise

"""Refused records: counted against a limit and, for quarantine, written to a JSONL file in stream order.

A run that was restored works through records that the run before has seen already. Those before its position are not told of here
(`account.py`). What the run before had read ahead of it comes again: a record that the file names when it is opened is not written
again. A line names the record's place in the stream, so that a record of a later pass is another one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import BinaryIO

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.core.block import CHUNK, DATASET, OFFSET, PIECE, ROW, SHARD
from headrace.core.refusal import Refusal
from headrace.errors import RecordError

_log = logging.getLogger("headrace")


class FaultLog:
    """Where the faults of a run go. `max_errors` None means any number."""

    def __init__(self, max_errors: int | None, path: str | None, locate: Callable[[list[int]], str]) -> None:
        self._max, self._path, self._locate = max_errors, path, locate
        self._file: BinaryIO | None = None
        self._before: NDArray[np.uint64] = np.empty(0, np.uint64)
        self.count = 0

    def add(self, operator: str, ids: list[int], refusal: Refusal) -> None:
        """Log a record that was refused; RecordError once there are more than `max_errors`."""
        self.count += 1
        where = self._locate(ids)
        _log.warning("%s refused a record of %s: %s", operator, where, refusal.cause)
        if refusal.payload:
            self._write(operator, ids, refusal)
        if self._max is not None and self.count > self._max:
            raise RecordError(
                f"{self.count} records were refused, more than max_errors={self._max}; the last by {operator!r} "
                f"on {where}: {refusal.cause}"
            )

    def _write(self, operator: str, ids: list[int], refusal: Refusal) -> None:
        if self._path is None:
            return
        if self._file is None:
            self._before = _lines(self._path)
            self._file = open(self._path, "ab")  # noqa: SIM115  lives as long as the run
        line = msgspec.json.encode(
            {
                "dataset": ids[DATASET],
                "shard": ids[SHARD],
                "row": ids[ROW],
                "chunk": ids[CHUNK],
                "offset": ids[OFFSET],
                "piece": ids[PIECE],
                "where": self._locate(ids),
                "operator": operator,
                "reason": refusal.cause,
                "payload": msgspec.Raw(refusal.payload),
            }
        )
        if not _holds(self._before, line):
            self._file.write(line + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Close the quarantine file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _lines(path: str) -> NDArray[np.uint64]:
    """Hashes of the records that a file names, ascending. A last line that was cut off, by a killed run, is removed."""
    if not os.path.exists(path):
        return np.empty(0, np.uint64)
    hashes: list[int] = []
    with open(path, "r+b") as file:
        whole = 0
        for line in file:
            if line.endswith(b"\n"):
                hashes.append(_record(line))
                whole += len(line)
        file.truncate(whole)
    return np.sort(np.array(hashes, np.uint64))


def _record(line: bytes) -> int:
    """Hash of what a line says before the reason, which may hold an address or a time."""
    return xxhash.xxh3_64_intdigest(line.partition(b',"reason":')[0])


def _holds(sorted_hashes: NDArray[np.uint64], line: bytes) -> bool:
    own = np.uint64(_record(line))
    at = int(np.searchsorted(sorted_hashes, own))
    return at < len(sorted_hashes) and sorted_hashes[at] == own

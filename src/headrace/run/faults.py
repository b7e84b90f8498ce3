"""Refused records: counted against a limit and, for quarantine, written to a JSONL file in stream order.

A run that was restored works through records that the run before has seen already. A line that the file holds when it is opened
is not written again; it names the record's place in the stream, so that a record of a later pass is another line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import BinaryIO

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from headrace.core.block import CHUNK, DATASET, OFFSET, PIECE, ROW, SHARD, Drop
from headrace.errors import RecordError
from headrace.run.stage import Fault

_log = logging.getLogger("headrace")


class FaultLog:
    """Where the faults of a run go. `max_errors` None means any number."""

    def __init__(self, max_errors: int | None, path: str | None, locate: Callable[[list[int]], str]) -> None:
        self._max, self._path, self._locate = max_errors, path, locate
        self._file: BinaryIO | None = None
        self._before: NDArray[np.uint64] = np.empty(0, np.uint64)
        self.count = 0

    def add(self, faults: Sequence[Fault]) -> None:
        """Log faults; RecordError once there are more than `max_errors`."""
        for fault in faults:
            self.count += 1
            ids = fault.ids.tolist()
            where = self._locate(ids)
            _log.warning("%s refused a record of %s: %s", fault.operator, where, fault.reason)
            if fault.payload:
                self._write(fault, ids)
            if self._max is not None and self.count > self._max:
                raise RecordError(
                    f"{self.count} records were refused, more than max_errors={self._max}; the last by {fault.operator!r} "
                    f"on {where}: {fault.reason}"
                )

    def add_drop(self, drop: Drop) -> None:
        """Log a record that a stateful operator refused."""
        if drop.refusal is not None:
            self.add([Fault(drop.operator, drop.refusal.cause, drop.ids[0], drop.refusal.payload)])

    def _write(self, fault: Fault, ids: list[int]) -> None:
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
                "operator": fault.operator,
                "reason": fault.reason,
                "payload": msgspec.Raw(fault.payload),
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
    """Hashes of the whole lines of a file, ascending. A last line that was cut off, by a killed run, is removed."""
    if not os.path.exists(path):
        return np.empty(0, np.uint64)
    hashes: list[int] = []
    with open(path, "r+b") as file:
        whole = 0
        for line in file:
            if line.endswith(b"\n"):
                hashes.append(xxhash.xxh3_64_intdigest(line[:-1]))
                whole += len(line)
        file.truncate(whole)
    return np.sort(np.array(hashes, np.uint64))


def _holds(sorted_hashes: NDArray[np.uint64], line: bytes) -> bool:
    own = np.uint64(xxhash.xxh3_64_intdigest(line))
    at = int(np.searchsorted(sorted_hashes, own))
    return at < len(sorted_hashes) and sorted_hashes[at] == own

"""Refused records: counted against a limit and, for quarantine, written to a JSONL file in stream order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import BinaryIO

import msgspec

from headrace.core.block import DATASET, ROW, SHARD
from headrace.errors import RecordError
from headrace.run.stage import Fault

_log = logging.getLogger("headrace")


class FaultLog:
    """Where the faults of a run go. `max_errors` None means any number."""

    def __init__(self, max_errors: int | None, path: str | None, locate: Callable[[list[int]], str]) -> None:
        self._max, self._path, self._locate = max_errors, path, locate
        self._file: BinaryIO | None = None
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

    def _write(self, fault: Fault, ids: list[int]) -> None:
        if self._path is None:
            return
        if self._file is None:
            self._file = open(self._path, "ab")  # noqa: SIM115  lives as long as the run
        line = {
            "dataset": ids[DATASET],
            "shard": ids[SHARD],
            "row": ids[ROW],
            "where": self._locate(ids),
            "operator": fault.operator,
            "reason": fault.reason,
            "payload": msgspec.Raw(fault.payload),
        }
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the quarantine file."""
        if self._file is not None:
            self._file.close()
            self._file = None

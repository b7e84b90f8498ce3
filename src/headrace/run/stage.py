"""What one worker of a stage does with a block: every operator of the stage in turn, with the policy for bad records.

Runs in a thread or a spawned process. A result carries, besides the block, what each operator did (rows, time) and the
records that were refused, so that counting, limits and quarantine happen in one place, in stream order.
"""

from __future__ import annotations

import pickle
import time
import traceback
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from headrace.core.block import CHUNK, OFFSET, PIECE, Block, Drop, Ints, Origin
from headrace.core.op import BadRows, RowFailed, Stateless, Worker
from headrace.core.refusal import Refusal
from headrace.core.tokens import PIECE_BITS
from headrace.errors import DataError, HeadraceError, RecordError
from headrace.options import OnError


class OpStat(NamedTuple):
    """What one operator did with one block."""

    rows_in: int
    rows_out: int
    busy_ns: int


class Fault(NamedTuple):
    """One refused record: where it came from, why, and (for quarantine) what it held, as JSON."""

    operator: str
    reason: str
    ids: Ints
    payload: bytes = b""
    before: int = 0
    """Rows of the stage's block that come before it."""


class RecordFault(Exception):
    """A record that an operator refused, on its way to the thread that knows the datasets' names."""

    def __init__(
        self, operator: str, ids: list[int], original: Exception | None, cause: str = "", trace: str = ""
    ) -> None:
        super().__init__(operator, ids)
        self.operator, self.ids, self.original = operator, ids, original
        self.cause = cause or f"{type(original).__name__}: {original}"
        self.trace = trace or ("" if original is None else "".join(traceback.format_exception(original)))

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordFault, (self.operator, self.ids, _sendable(self.original), self.cause, self.trace)


def _sendable(error: Exception | None) -> Exception | None:
    """The exception, if it survives the way to another process."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  our own object, to see whether it travels
    except Exception:  # noqa: BLE001  a user's exception may fail in any way; its text travels instead
        return None
    return error


@dataclass(slots=True)
class StageResult:
    """A block after a stage."""

    block: Block
    stats: list[OpStat]
    faults: list[Fault] = field(default_factory=list)
    span: tuple[int, int, int] = (0, 0, 0)
    """Chunk, offset and number of the samples that the block began with."""
    failure: RecordFault | RecordError | None = None
    """Raised after the block, which then ends before the record that failed."""


@dataclass(frozen=True, slots=True)
class StageWorker:
    """Builds the function of one stage: call it once in each worker."""

    ops: tuple[Stateless, ...]
    policies: tuple[OnError, ...]

    def __call__(self) -> StageFunction:
        """Set up the operators (tokenizers, models) and return the function."""
        return StageFunction(self.ops, self.policies)


class StageFunction:
    """From block to `StageResult`."""

    def __init__(self, ops: Sequence[Stateless], policies: Sequence[OnError]) -> None:
        self._steps: list[tuple[str, Worker, OnError]] = [
            (op.name, op.worker(), policy) for op, policy in zip(ops, policies, strict=True)
        ]
        self.where = ""

    def __call__(self, block: Block) -> StageResult:
        stats: list[OpStat] = []
        refused: list[tuple[Origin, list[int], list[Fault]]] = []
        span = (*block.origin.ids[0, [CHUNK, OFFSET]].tolist(), len(block)) if len(block) else (0, 0, 0)
        before, failure = time.perf_counter_ns(), None
        for name, function, policy in self._steps:
            self.where = name
            bad, rows_in = BadRows(stops=policy == "raise"), len(block)
            try:
                out = function(block, bad)
            except RowFailed as failed:
                raise _record_fault(name, block, failed.row, failed.error) from failed.error
            except DataError as error:
                raise _whole_block_fault(name, block, error) from error
            except HeadraceError:
                raise
            except Exception as error:  # a user's function raises anything; it gets a name and a place
                raise _whole_block_fault(name, block, error) from error
            if bad.rows and policy == "raise":
                # the records before the failed one still go out, however the stream was cut into blocks
                at = min(bad.rows)
                failure = _record_fault(name, block, at, bad.errors[bad.rows.index(at)])
                drops, out = out.drops, out.slice(0, rows_before(block.origin, [at], out.origin)[0])
                out = out.dropping(*drops)
            elif bad.rows:
                out, faults = _settle(name, policy, block, out, bad)
                refused.append((block.origin, sorted(bad.rows), faults))
            block = out
            now = time.perf_counter_ns()
            stats.append(OpStat(rows_in, len(block), now - before))
            before = now
            if not len(block):
                stats += [OpStat(0, 0, 0)] * (len(self._steps) - len(stats))
                break
        faults = [fault for each in refused for fault in _placed(*each, block.origin)]
        return StageResult(block, stats, faults, span, failure)


def _settle(name: str, policy: OnError, block: Block, out: Block, bad: BadRows) -> tuple[Block, list[Fault]]:
    """Apply the policy to the rows that `name` refused."""
    faults: list[Fault] = []
    order = np.argsort(bad.rows, kind="stable").tolist()
    payloads = block.payloads() if policy == "quarantine" and (block.columns or block.rows) else None
    drops = []
    for k in order:
        at, error = bad.rows[k], bad.errors[k]
        row = block.origin.slice(at, at + 1)
        reason = f"{policy}: {type(error).__name__}"
        refusal = Refusal.of(error, None if payloads is None else payloads[at], keep=policy == "quarantine")
        faults.append(Fault(name, refusal.cause, row.ids[0], refusal.payload))
        drops.append(Drop(name, reason, row.begun()))
    return out.dropping(*drops), faults


def _placed(origin: Origin, rows: list[int], faults: list[Fault], made: Origin) -> list[Fault]:
    before = rows_before(origin, rows, made)
    return [fault._replace(before=count) for fault, count in zip(faults, before, strict=True)]


def rows_before(origin: Origin, rows: Sequence[int], made: Origin) -> list[int]:
    """How many rows of `made` come of those of `origin` before each of `rows`. Operators keep the order of their rows."""
    known = {key: row for row, key in reversed(list(enumerate(_keys(origin))))}
    sources: list[int] = []
    for chunk, offset, piece, start in _keys(made):
        while (row := known.get((chunk, offset, piece, start))) is None and piece:
            piece >>= PIECE_BITS
        sources.append(len(origin) if row is None else row)
    return [bisect_left(sources, row) for row in rows]


def _keys(origin: Origin) -> list[tuple[int, int, int, int]]:
    """Place, piece and first token of each row: unlike those of all other rows of a block."""
    rows = origin.firsts()[:, [CHUNK, OFFSET, PIECE]].tolist()
    starts: list[int] = [0] * len(rows)
    if origin.rows is not None and origin.spans is not None and len(origin.spans):
        starts = origin.spans[np.minimum(origin.rows[:-1], len(origin.spans) - 1), 0].tolist()
    return [(chunk, offset, piece, start) for (chunk, offset, piece), start in zip(rows, starts, strict=True)]


def _record_fault(name: str, block: Block, row: int, error: Exception) -> RecordFault:
    ids = block.origin.slice(row, row + 1).ids[0].tolist()
    return RecordFault(name, ids, error)


def _whole_block_fault(name: str, block: Block, error: Exception) -> RecordFault:
    ids = block.origin.ids[0].tolist() if len(block.origin.ids) else []
    return RecordFault(name, ids, error)

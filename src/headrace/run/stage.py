"""What one worker of a stage does with a block: every operator of the stage in turn, with the policy for bad records.

Runs in a thread or a spawned process. A result carries, besides the block, what each operator did (rows, time) and the
records that were refused, so that counting, limits and quarantine happen in one place, in stream order.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.core.block import CHUNK, OFFSET, Block, Drop, Ints
from headrace.core.op import BadRows, Stateless, Worker
from headrace.errors import OperatorError
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


class RecordFault(Exception):
    """A record that an operator refused, on its way to the thread that knows the datasets' names."""

    def __init__(
        self, operator: str, ids: list[int], cause: str, trace: str, original: Exception | None = None
    ) -> None:
        super().__init__(operator, ids, cause, trace)
        self.operator, self.ids, self.cause, self.trace = operator, ids, cause, trace
        self.original = original

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordFault, (self.operator, self.ids, self.cause, self.trace)


@dataclass(slots=True)
class StageResult:
    """A block after a stage."""

    block: Block
    stats: list[OpStat]
    faults: list[Fault] = field(default_factory=list)
    span: tuple[int, int, int] = (0, 0, 0)
    """Chunk, offset and number of the samples that the block began with."""


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
        faults: list[Fault] = []
        span = (*block.origin.ids[0, [CHUNK, OFFSET]].tolist(), len(block)) if len(block) else (0, 0, 0)
        before = time.perf_counter_ns()
        for name, function, policy in self._steps:
            self.where = name
            bad, rows_in = BadRows(), len(block)
            try:
                out = function(block, bad)
            except OperatorError:
                raise
            except Exception as error:
                raise _whole_block_fault(name, block, error) from error
            if bad.rows:
                out = _settle(name, policy, block, out, bad, faults)
            block = out
            now = time.perf_counter_ns()
            stats.append(OpStat(rows_in, len(block), now - before))
            before = now
        return StageResult(block, stats, faults, span)


def _settle(name: str, policy: OnError, block: Block, out: Block, bad: BadRows, faults: list[Fault]) -> Block:
    """Apply the policy to the rows that `name` refused."""
    order = np.argsort(bad.rows, kind="stable").tolist()
    if policy == "raise":
        at, error = bad.rows[order[0]], bad.errors[order[0]]
        ids = block.origin.slice(at, at + 1).ids[0].tolist()
        raise RecordFault(name, ids, _cause(error), _trace(error), error) from error
    payloads = block.payloads() if policy == "quarantine" and (block.columns or block.rows) else None
    drops = []
    for k in order:
        at, error = bad.rows[k], bad.errors[k]
        ids = block.origin.slice(at, at + 1).ids
        reason = f"{policy}: {type(error).__name__}"
        shown = b"" if payloads is None else _json(payloads[at])
        faults.append(Fault(name, _cause(error), ids[0], shown))
        drops.append(Drop(name, reason, ids))
    return out.dropping(*drops)


def _whole_block_fault(name: str, block: Block, error: Exception) -> RecordFault:
    ids = block.origin.ids[0].tolist() if len(block.origin.ids) else []
    return RecordFault(name, ids, _cause(error), _trace(error), error)


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def _json(payload: Any) -> bytes:
    try:
        return msgspec.json.encode(payload, enc_hook=_readable)
    except (TypeError, ValueError):
        return msgspec.json.encode(repr(payload))


def _readable(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else repr(value)

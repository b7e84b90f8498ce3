"""`add_op`: a user's operator on whole records, `process_many(records) -> records`, run by any number of workers.

It may drop records, change payloads, and make several of one: `SampleRecord(record.meta.child(i), payload)`. It remembers nothing:
on the first records that a worker sees, a group must give what its halves give, or the data would depend on how the stream is cut.

With on_error "skip" or "quarantine" a group that raises is halved until the records that raise by themselves are found. They are
left out; the others are given once more, so each attempt is handed copies of the payloads. With "raise" the first such record is
looked for in the same way, once a group has failed, and named. Nothing of that group goes out: the function may have changed it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from headrace.core.block import CHUNK, OFFSET, PIECE, Block, Drop, Origin
from headrace.core.equality import same
from headrace.core.op import BadRows, Fields, RowFailed, Worker, in_parts
from headrace.errors import ConfigError, OperatorError
from headrace.ops.map import function_name, require_callable
from headrace.options import OnError, Validation
from headrace.types import SampleRecord, block_from_records, records_from_block

ProcessMany = Callable[[list[SampleRecord]], Iterable[SampleRecord]]

TAKEN: Final = frozenset(
    {
        "fetch",
        "select",
        "decode_text",
        "map_transform",
        "map_block",
        "filter",
        "tokenize",
        "tokenize_chat",
        "expand_chat",
    }
    | {"shuffle", "ensure_mixture", "pack_flat", "materialize", "batch", "map_batch"}
)
"""Names that operators of the library have."""


def check_name(method: str, name: Any) -> None:
    """ConfigError for what is no name, or the name of another operator."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{method}() needs a name, a string, found {name!r}")
    if name in TAKEN:
        raise ConfigError(f"{method}({name!r}): an operator of the library has this name; choose another")


@dataclass(frozen=True, slots=True)
class RecordOp:
    """`make()` is called once in each worker and returns its `process_many`."""

    name: str
    make: Callable[[], ProcessMany]
    title: str
    """Name of the function or class, for the recipe."""
    on_error: OnError | None = None
    """What becomes of a record that the function fails on; None is "raise", or in a pipeline what its options say."""
    validation: Validation = "strict"

    def describe(self) -> dict[str, Any]:
        """The function's name: its code is the user's to keep unchanged."""
        return {"process_many": self.title}

    def needs(self, downstream: Fields) -> Fields:
        """Everything: a function may look anywhere."""
        return None

    def worker(self) -> Worker:
        """A function over blocks that hands on their records."""
        process = self.make()
        unchecked = [self.validation != "off"]

        tolerant = self.on_error not in (None, "raise")

        def run(block: Block, bad: BadRows) -> Block:
            refuse_packed(self.name, block)
            out = self._passing(process, block, bad) if tolerant else []
            try:
                if unchecked[0] and len(block) > 1 and not bad.rows:
                    unchecked[0] = False
                    self._check(process, block)
                if not tolerant:
                    out = self._call(process, _handed_over(block))
            except _GroupFailed as failed:
                raise self._first_failing(process, block, failed.error) from failed.error
            made = block_from_records(out) if out else Block(block.lane, Origin.empty(), None, [])
            place, ids = [CHUNK, OFFSET, PIECE], block.origin.ids  # a sample counts with its first piece
            left = set(map(tuple, made.origin.ids[:, place].tolist()))
            rows = enumerate(map(tuple, ids[:, place].tolist()))
            gone = [row for row, key in rows if not key[2] and key not in left and row not in bad.rows]
            drops = (
                (*block.drops, Drop(self.name, "not handed on", ids[np.array(gone, np.int64)])) if gone else block.drops
            )
            return made.dropping(*drops) if drops else made

        return run

    def _call(self, process: ProcessMany, records: list[SampleRecord]) -> list[SampleRecord]:
        try:
            out = list(process(records))
        except Exception as error:  # a user's function raises anything; its record is looked for
            raise _GroupFailed(error) from error
        return self._checked(out)

    def _first_failing(self, process: ProcessMany, block: Block, error: Exception) -> Exception:
        """Names the first record that raises by itself what the group raised; the group, if there is none."""
        begin, end, kind = 0, len(block), type(error)
        while end - begin > 1:
            middle = (begin + end) // 2
            if self._failing(process, block.slice(begin, middle)) is None:
                begin = middle
            else:
                end = middle
        alone = self._failing(process, block.slice(begin, end))
        if alone is not None and type(alone) is kind:
            return RowFailed(begin, alone)
        dataset, shard, row = block.origin.ids[0, :3].tolist()
        return OperatorError(
            f"{self.name}({self.title}) raised {kind.__name__}: {error} on a group of {len(block)} records that begins with "
            f"dataset {dataset}, shard {shard}, row {row}, and on none of them alone"
        )

    def _failing(self, process: ProcessMany, block: Block) -> Exception | None:
        """What the function raises on copies of these records."""
        try:
            list(process(_copied(block)))
        except Exception as error:  # noqa: BLE001  a user's function raises anything; it is looked at
            return error
        return None

    def _passing(self, process: ProcessMany, block: Block, bad: BadRows) -> list[SampleRecord]:
        """What comes of the records that the function does not fail on."""

        parts = in_parts(len(block), lambda start, stop: list(process(_copied(block.slice(start, stop)))), bad)
        return self._checked([record for part in parts for record in part])

    def _checked(self, out: list[Any]) -> list[SampleRecord]:
        for record in out:
            if not isinstance(record, SampleRecord):
                raise OperatorError(
                    f"{self.name}({self.title}) gave a {type(record).__name__} ({record!r:.60}); give records, or "
                    "SampleRecord(record.meta.child(i), payload) made of one"
                )
        return out

    def _check(self, process: ProcessMany, block: Block) -> None:
        def given(start: int, stop: int) -> list[Any]:
            records = copy.deepcopy(records_from_block(block.slice(start, stop)))
            return [(record.meta.as_cursor_key(), record.payload) for record in self._call(process, records)]

        half = len(block) // 2
        if not same(given(0, len(block)), given(0, half) + given(half, len(block))):
            message = (
                f"{self.name}({self.title}) gives other records for a group than for its halves, so the data would depend on how "
                "the stream is cut. Make each from one record alone (see stateful_transform for more), or switch this check off "
                "with options(auto_validation='off')."
            )
            if self.validation == "strict":
                raise OperatorError(message)
            warnings.warn(message, RuntimeWarning, stacklevel=2)


class _GroupFailed(Exception):
    """The function failed on a group of records, where the first that it fails on is to be named."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _handed_over(block: Block) -> list[SampleRecord]:
    """Records whose fields the function may set: should it fail, the block is as it was."""
    records = records_from_block(block)
    if block.rows is not None:
        for record in records:
            if type(record.payload) is dict:
                record.payload = record.payload.copy()
    return records


def _copied(block: Block) -> list[SampleRecord]:
    records = records_from_block(block)
    for record in records:
        record.payload = copy.deepcopy(record.payload)
    return records


def refuse_packed(name: str, block: Block) -> None:
    """A packed row is many records; functions over one row of it are `map_transform` and `map_batch`."""
    if block.origin.rows is not None:
        raise ConfigError(
            f"{name}() after packing: its rows are parts of many records; call it before, or use map_transform()"
        )


def record_op(name: str, process_many: Any, on_error: OnError | None = None) -> RecordOp:
    """An operator of a function."""
    check_name("add_op", name)
    require_callable(process_many, "add_op(process_many=)")
    return RecordOp(name, lambda: process_many, function_name(process_many), on_error)


def instance_op(op: Any, name: str | None, on_error: OnError | None = None) -> RecordOp:
    """An operator of an object with `process_many`, copied for each worker and there prepared by its `setup()`, if it has one."""
    if not callable(getattr(op, "process_many", None)):
        raise ConfigError(
            f"add_op() takes a name and process_many=, or an object with a method process_many(records); found {op!r:.80}"
        )
    chosen = type(op).__qualname__ if name is None else name
    check_name("add_op", chosen)

    def make() -> ProcessMany:
        own = copy.deepcopy(op)
        if callable(getattr(own, "setup", None)):
            own.setup()
        return own.process_many

    return RecordOp(chosen, make, type(op).__qualname__, on_error)


def refuse_accumulator(name: str, settings: Sequence[str]) -> None:
    """Operators that remember are another method's."""
    if "accumulator" in settings or "requires_serial_state" in settings:
        raise ConfigError(
            f"add_op({name!r}): an operator with an accumulator of its own remembers; write it as "
            "stateful_transform(name, init_state=, push=, flush=), whose state is saved"
        )

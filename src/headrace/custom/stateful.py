"""`stateful_transform`: a user's functions over a state that sees every record of a lane in order.

    state = init_state()                        before the first record
    state, out = push(state, [record])          for each record; `out` lists what may leave now
    flush(state)                                what is left, at the end and at flush sentinels; then the state begins anew

Records are handed over one by one, so that nothing depends on the size of blocks. What leaves is the records themselves, or
`SampleRecord(record.meta.child(i), payload)` made of one. A record that never leaves is counted as dropped; nothing else is
asked of the user for it. Checkpoints hold the state (see `values.py`), or what `save` makes of it.

With on_error "skip" or "quarantine" a record that `push` fails on is left out, and the state is what it was before that record.
`push` may have changed the state half before it failed, so the state is made once more: from its last saved value, and from the
records since, whose payloads are handed over as copies for that reason. This asks of `push` what a restored run asks as well, to
give the same for the same state and record. Errors of the other functions belong to no record, and are raised whatever
`on_error` says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.block import CHUNK, OFFSET, ORIGIN_WIDTH, PIECE, Block, Drop, Ints, Origin
from headrace.core.op import Fields
from headrace.core.refusal import Refusal
from headrace.custom.stateless import check_name, refuse_packed
from headrace.custom.values import pack_value, unpack_value
from headrace.errors import ConfigError, OperatorError
from headrace.ops.map import function_name, require_callable
from headrace.options import OnError
from headrace.types import SampleRecord, block_from_records, records_from_block

Records = list[SampleRecord]


@dataclass(frozen=True, slots=True)
class StatefulTransform:
    """The functions, and what they promise.

    `preserves_cursor_order`: what leaves keeps the order in which it came. Otherwise flush sentinels apply, as with `shuffle`.
    `should_flush(state)`: after a push, whether to flush early. `transform(records)`: applied to each group that leaves.
    `save(state)` gives a value that a checkpoint can hold, `load(value)` the state again.
    `on_error`: what becomes of a record that `push` fails on. None is "raise", or in a pipeline what its options say.
    """

    name: str
    init_state: Callable[[], Any]
    push: Callable[[Any, Records], tuple[Any, Iterable[SampleRecord]]]
    flush: Callable[[Any], Iterable[SampleRecord]] | None = None
    should_flush: Callable[[Any], bool] | None = None
    transform: Callable[[Records], Iterable[SampleRecord]] | None = None
    preserves_cursor_order: bool = True
    save: Callable[[Any], Any] | None = None
    load: Callable[[Any], Any] | None = None
    on_error: OnError | None = None

    def __post_init__(self) -> None:
        """Functions that can be called, and a name."""
        check_name("stateful_transform", self.name)
        for what in ("init_state", "push"):
            require_callable(getattr(self, what), f"stateful_transform({what}=)")
        for what in ("flush", "should_flush", "transform", "save", "load"):
            if getattr(self, what) is not None:
                require_callable(getattr(self, what), f"stateful_transform({what}=)")
        if (self.save is None) != (self.load is None):
            raise ConfigError(f"{self.name}: save= and load= go together")

    @property
    def reorders(self) -> bool:
        """Flush sentinels apply where the order is not kept."""
        return not self.preserves_cursor_order

    @property
    def carries(self) -> bool:
        """Operators behind it cannot fetch again what they hold."""
        return True

    def describe(self) -> dict[str, Any]:
        """The functions' names: their code is the user's to keep unchanged."""
        functions = ("init_state", "push", "flush", "should_flush", "transform")
        named = {what: getattr(self, what) for what in functions}
        return {what: None if fn is None else function_name(fn) for what, fn in named.items()} | {
            "preserves_cursor_order": self.preserves_cursor_order
        }

    def needs(self, downstream: Fields) -> Fields:
        """Everything: a function may look anywhere."""
        return None

    def accumulator(self, lane: int) -> StatefulRun:
        """A state for one lane."""
        return StatefulRun(self, lane)


class StatefulRun:
    """The user's state in one lane, and which records have not left yet."""

    def __init__(self, spec: StatefulTransform, lane: int) -> None:
        """Begin at the first record."""
        self._spec, self._lane = spec, lane
        self._begun, self._state = False, None
        self._waiting: dict[tuple[int, int], list[int]] = {}
        """Ids of samples whose first piece has not left, by chunk and offset, in the order in which they came."""
        self._policy = spec.on_error or "raise"
        self._known: bytes | None = None
        """The state, not long ago; None before it began."""
        self._since: list[tuple[Block, int]] = []
        """Blocks and rows that were pushed since, where they may be needed again."""

    def push(self, block: Block) -> list[Block]:
        """One record after the other."""
        refuse_packed(self._spec.name, block)
        out: Records = []
        drops = list(block.drops)
        for row, (record, ids) in enumerate(zip(records_from_block(block), block.origin.ids.tolist(), strict=True)):
            if not ids[PIECE]:  # a sample counts with its first piece
                self._waiting[ids[CHUNK], ids[OFFSET]] = ids
            if not self._begun:
                self._begun, self._state = True, self._call("init_state")
            try:
                self._state, leaving = self._pushed(record)
            except _PushFailed as failed:
                drops.append(self._refused(block, row, failed.error))
                continue
            if self._policy != "raise":
                self._since.append((block, row))
            out += self._checked("push", leaving)
            if self._spec.should_flush is not None and self._call("should_flush", self._state):
                out += self._flushed()
        return self._block(out, drops)

    def flush(self) -> list[Block]:
        """What the state holds; what has not left by now is dropped."""
        out = self._flushed() if self._begun else []
        drops: list[Drop] = []
        gone = self._leave(out)
        rest = [*gone, *self._waiting.values()]
        self._waiting = {}
        if rest:
            drops.append(self._drop(rest))
        return self._made(out, drops)

    end = flush

    def held(self) -> Origin:
        """Nothing that could be fetched again: the state says it all."""
        return Origin.empty()

    def state(self) -> dict[str, Any]:
        """The user's state as bytes, and the samples that wait."""
        value = self._packed()
        self._known, self._since = value, []
        waiting = np.array(list(self._waiting.values()), np.int64).reshape(-1, ORIGIN_WIDTH)
        return {"begun": self._begun, "value": value, "waiting": waiting.tobytes()}

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """Continue from `state()`."""
        del held
        self._known, self._since = state["value"] if state["begun"] else None, []
        self._begun = bool(state["begun"])
        if self._begun:
            self._state = self._unpacked(state["value"])
        waiting = np.frombuffer(state["waiting"], np.int64).reshape(-1, ORIGIN_WIDTH).tolist()
        self._waiting = {(ids[CHUNK], ids[OFFSET]): ids for ids in waiting}

    def _packed(self) -> bytes | None:
        if not self._begun:
            return None
        state = self._state if self._spec.save is None else self._call("save", self._state)
        return pack_value(state, f"{self._spec.name}: the state")

    def _unpacked(self, value: bytes) -> Any:
        state = unpack_value(value)
        return state if self._spec.load is None else self._call("load", state)

    def _pushed(self, record: SampleRecord) -> tuple[Any, list[Any]]:
        """The state after a record, and what leaves. `_PushFailed` where the policy lets the run go on without it."""
        if self._policy != "raise":
            record.payload = copy.deepcopy(record.payload)
        try:
            result: Any = self._spec.push(self._state, [record])
            if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Iterable):
                return result[0], list(result[1])
        except Exception as error:  # a user's function raises anything; it gets a name and a place
            if self._policy != "raise":
                raise _PushFailed(error) from error
            dataset, shard, row = record.meta.sample_id
            raise OperatorError(
                f"{self._spec.name}: push() raised {type(error).__name__}: {error} (dataset {dataset}, shard {shard}, row {row}). "
                "Records that it fails on are left out with on_error='skip' or 'quarantine'"
            ) from error
        if isinstance(result, tuple) and len(result) == 2 and result[1] is None:
            return result[0], []
        raise OperatorError(f"{self._spec.name}: push() returned {result!r:.60}; return (state, list of records)")

    def _refused(self, block: Block, row: int, error: Exception) -> Drop:
        """Leave out a record, and go back to the state before it."""
        ids, keep = block.origin.ids[row : row + 1], self._policy == "quarantine"
        if not ids[0, PIECE]:
            del self._waiting[ids[0, CHUNK].item(), ids[0, OFFSET].item()]
        self._state = self._call("init_state") if self._known is None else self._unpacked(self._known)
        for before, at in self._since:
            try:
                self._state, _ = self._pushed(records_from_block(before.slice(at, at + 1))[0])
                if self._spec.should_flush is not None:
                    self._call("should_flush", self._state)
            except _PushFailed as failed:
                raise OperatorError(
                    f"{self._spec.name}: push() raised {type(failed.error).__name__}: {failed.error}, of a record that it took "
                    f"before from the same state. on_error={self._policy!r} can only go on if it gives the same for the same state "
                    "and record"
                ) from failed.error
        self._known, self._since = self._packed(), []
        refusal = Refusal.of(error, block.slice(row, row + 1).payloads()[0] if keep else None, keep=keep)
        return Drop(self._spec.name, f"{self._policy}: {type(error).__name__}", ids, refusal=refusal)

    def _flushed(self) -> Records:
        out = [] if self._spec.flush is None else self._checked("flush", self._call("flush", self._state))
        self._begun, self._state = False, None
        self._known, self._since = None, []
        return out

    def _checked(self, what: str, records: Any) -> Records:
        given: Any = [] if records is None else records
        listed: list[Any] = list(given)
        if listed and self._spec.transform is not None:
            what, listed = "transform", list(self._call("transform", listed))
        for record in listed:
            if not isinstance(record, SampleRecord):
                raise OperatorError(
                    f"{self._spec.name}: {what}() gave a {type(record).__name__} ({record!r:.60}); give records, or "
                    "SampleRecord(record.meta.child(i), payload) made of one"
                )
        return listed

    def _block(self, out: Records, drops: list[Drop]) -> list[Block]:
        if gone := self._leave(out):
            drops.append(self._drop(gone))
        return self._made(out, drops)

    def _leave(self, out: Records) -> list[list[int]]:
        """Take what leaves off the list of those that wait; and those that came before it, where the order is kept."""
        gone: list[list[int]] = []
        for record in out:
            key = (record.meta.chunk_id, record.meta.chunk_offset)
            if any(record.meta.lineage) or key not in self._waiting:
                continue
            while self._spec.preserves_cursor_order and (passed := next(iter(self._waiting))) != key:
                gone.append(self._waiting.pop(passed))
            del self._waiting[key]
        return gone

    def _drop(self, ids: list[list[int]]) -> Drop:
        rows: Ints = np.array(ids, np.int64).reshape(-1, ORIGIN_WIDTH)
        return Drop(self._spec.name, "not handed on", rows)

    def _made(self, out: Records, drops: list[Drop]) -> list[Block]:
        if not out and not drops:
            return []
        block = block_from_records(out) if out else Block(self._lane, Origin.empty(), None, [])
        return [block.dropping(*drops) if drops else block]

    def _call(self, what: str, *arguments: Any) -> Any:
        try:
            return getattr(self._spec, what)(*arguments)
        except Exception as error:  # a user's function raises anything; it gets a name and a place
            whatever = "" if self._policy == "raise" else ". It belongs to no record, so on_error has no say"
            raise OperatorError(
                f"{self._spec.name}: {what}() raised {type(error).__name__}: {error}{whatever}"
            ) from error


class _PushFailed(Exception):
    """`push` failed on a record that may be left out."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error

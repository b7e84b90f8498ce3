"""Operators changed on purpose: the old ones finish what was delivered, the new ones take over the rest.

A checkpoint rests on a cut, and some batches were delivered since. After a change those batches come from the operators as they
were before (rebuilt from the recipe), once more, so that it is known to the token what was delivered. Then:

* rows, for a changed `batch`: those that were not delivered enter the new batches first, in their order;
* documents, for a changed `pack_flat`: those that have tokens left enter the new packer first, in their order. A document goes on
  behind the last of its tokens that was delivered; the cutting algorithms can take it from there, others count what is left;
* records in a changed `shuffle` that has no changed packing or batching before it move to the new buffer at the first
  position that nothing delivered came from.

All of it is a function of the checkpoint and of what was delivered, whatever the size of blocks and windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Final, Protocol

import numpy as np

from headrace.core.block import CHUNK, OFFSET, PIECE, Block, Drop, Ints, Origin, concat_blocks
from headrace.core.checkpoint import Change
from headrace.core.message import Item, Message
from headrace.core.op import Accumulator
from headrace.core.plan import Node, Plan
from headrace.core.tokens import column_lengths, find_tokens_field
from headrace.errors import CheckpointError
from headrace.ops.pack.domains import DomainGroups

RESHAPING: Final = ("pack_flat", "batch")
"""Operators whose parameters decide the form of what is delivered: a change must show in the first batch."""

_TO_THE_END: Final = 1 << 62


def _chain(nodes: Sequence[Node], change: Change) -> tuple[Node, ...]:
    out, number = [], 0
    for node in nodes:
        if node.op.name in ("fetch", "materialize"):
            out.append(node)
            continue
        before = change.operators.get(f"{number}.{node.op.name}")
        out.append(replace(node, op=rebuilt(node.op, before)) if node.stateful and before is not None else node)
        number += 1
    return tuple(out)


def rebuilt(op: Any, parameters: Mapping[str, Any]) -> Any:
    """The operator with these parameters, as `describe()` gave them."""
    if op.describe() == parameters:
        return op
    values = dict(parameters)
    if values.get("groups") is not None:
        values["groups"] = DomainGroups(values["groups"])
    return replace(op, **values)


class Changed:
    """The chain as it was before each change, and as it is now. Only stateful operators differ.

    `transitions` names, for each change, the stage of the first operator whose new parameters show in the form of batches; None if
    there is none. Operators from there on begin anew with what was not delivered; others replace themselves in time.
    """

    def __init__(self, plan: Plan, changes: Sequence[Change]) -> None:
        self.changes = changes
        self._chains = [*(_chain(plan.nodes, change) for change in changes), plan.nodes]
        self._places = {
            i: next(p for p, node in enumerate(plan.nodes) if node is stage.nodes[0])
            for i, stage in enumerate(plan.stages)
        }
        self.transitions = [self._first_reshaped(era) for era in range(len(changes))]
        self.stages = sorted({stage for stage in self.transitions if stage is not None})

    def op(self, era: int, stage: int) -> Any:
        """The operator of a stage, after so many changes."""
        return self._chains[era][self._places[stage]].op

    def _first_reshaped(self, era: int) -> int | None:
        for stage in self._places:
            before, after = self.op(era, stage), self.op(era + 1, stage)
            if after.name in RESHAPING and before != after:
                return stage
        return None

    def before(self, stage: int) -> Sequence[Node]:
        """Operators in front of a stage, as they were at the cut."""
        return self._chains[0][: self._places[stage]]

    def accumulators(self, era: int, begin: int, lane: int) -> dict[int, Accumulator]:
        """Accumulators of the stages from `begin` on that hold nothing, after so many changes."""
        return {
            stage: self._accumulator(era, stage, lane)
            for stage, place in self._places.items()
            if stage >= begin and self._chains[era][place].stateful
        }

    def _accumulator(self, era: int, stage: int, lane: int) -> Accumulator:
        """One that replaces itself where later changes say so, up to the next that makes it begin anew."""
        following: list[tuple[int, Accumulator]] = []
        for number in range(era, len(self.changes)):
            transition = self.transitions[number]
            if transition is not None and transition <= stage:
                break
            if self.op(number, stage) != self.op(number + 1, stage):
                following.append((self.changes[number].until, self.op(number + 1, stage).accumulator(lane)))
        made: Accumulator = self.op(era, stage).accumulator(lane)
        return Successive(made, following) if following else made

    def rest_at_cut(
        self,
        stage: int,
        accumulators: Mapping[int, Accumulator],
        held: Mapping[int, Held],
        fetch: Callable[[Origin, Sequence[Node]], Block | None],
    ) -> Rest:
        """What the operators from a stage on held at the cut, as what enters the first of them."""
        if self.op(0, stage).name == "batch":
            return Rows(held[stage].rows if stage in held else None)
        packer: Any = accumulators[stage]
        packed = [held[behind].origin for behind in sorted(held, reverse=True) if behind > stage]
        documents, waiting = held_documents(packed, packer.held(), packer.begun().tolist())
        return Documents(self.op(0, stage), fetch(documents, self.before(stage)), waiting)

    def no_rest(self, era: int, stage: int) -> Rest:
        """Nothing, for the operator of a stage."""
        op = self.op(era, stage)
        return Rows(None) if op.name == "batch" else Documents(op, None, {})


class Successive:
    """An accumulator whose operator is replaced at given positions: what it holds moves to the next one."""

    def __init__(self, first: Accumulator, following: Sequence[tuple[int, Accumulator]]) -> None:
        """`following`: position in samples, and the accumulator from there on."""
        self._now, self._following = first, deque(following)

    def reach(self, position: int) -> list[Block]:
        """Replace what is due; what the new one has no room for leaves."""
        out: list[Block] = []
        while self._following and position >= self._following[0][0]:
            before, (_, self._now) = self._now, self._following.popleft()
            out += [block for rows in before.flush() for block in self._now.push(rows)]
        return out

    def push(self, block: Block) -> list[Block]:
        """As the operator in force."""
        return self._now.push(block)

    def flush(self) -> list[Block]:
        """As the operator in force."""
        return self._now.flush()

    def end(self) -> list[Block]:
        """As the operator in force."""
        return self._now.end()

    def held(self) -> Origin:
        """As the operator in force."""
        return self._now.held()

    def state(self) -> dict[str, Any]:
        """As the operator in force."""
        return self._now.state()

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """As the operator in force."""
        self._now.restore(state, held)


class Recorder:
    """Passes messages on and keeps them, so that they can be passed on again."""

    def __init__(self, stream: Iterator[Message]) -> None:
        self._stream = stream
        self.kept: list[Message] = []

    def messages(self) -> Iterator[Message]:
        """The stream from here on."""
        for message in self._stream:
            self.kept.append(message)
            yield message

    def take_until_last(self, wanted: Callable[[Block], bool]) -> list[Block]:
        """Blocks passed on, up to the last one that is wanted. What came behind it comes again."""
        last = max((i for i, m in enumerate(self.kept) if isinstance(m, Block) and wanted(m)), default=-1)
        taken = [message for message in self.kept[: last + 1] if isinstance(message, Block)]
        self._stream, self.kept = chain(self.kept[last + 1 :], self._stream), []
        return taken


@dataclass(frozen=True, slots=True)
class Held:
    """What a stateful operator held at the cut."""

    origin: Origin
    rows: Block | None


class Rest(Protocol):
    """What is to enter the first reshaped operator before the stream goes on."""

    def without(self, delivered: Sequence[Origin], recorder: Recorder) -> Rest:
        """The rest once this was delivered, of what was here and of what the recorder passed on, which is put back."""
        ...

    def enter(self, accumulator: Any) -> list[Block]:
        """Give it to the operator as it is now; what leaves it at once."""
        ...


class Run(Protocol):
    """Makes the part of a lane from one stage on: up to stage `end`, or to what is delivered."""

    def __call__(
        self,
        begin: int,
        accumulators: Mapping[int, Accumulator],
        stream: Iterator[Message],
        first: Sequence[Block] = (),
        end: int | None = None,
    ) -> Iterator[Message]:
        """A stream through these stages; `first` has left the operator of stage `begin` already."""
        ...


class Transitions:
    """Takes a lane through its changes, one after the other: what was delivered, once more, then what replaces it."""

    def __init__(
        self, changed: Changed, lane: int, run: Run, accumulators: dict[int, Accumulator], rests: dict[int, Rest]
    ) -> None:
        """`rests`: what was held at the cut, for each stage that a change makes begin anew."""
        self._changed, self._lane, self._run = changed, lane, run
        self._accumulators, self._rests = accumulators, rests
        self._delivered: dict[int, list[Origin]] = {stage: [] for stage in rests}
        self._recorders: dict[int, Recorder] = {}

    def messages(self, stream: Iterator[Message]) -> Iterator[Message]:
        """What is delivered behind the last change. `stream` enters the first stage that begins anew."""
        begin = self._changed.stages[0]
        self._recorders[begin] = Recorder(stream)
        running = self._run_from(begin, [])
        for era, change in enumerate(self._changed.changes):
            self._deliver_again(running, change.taken)
            transition = self._changed.transitions[era]
            if transition is not None:
                running.close()  # type: ignore[attr-defined]
                running = self._run_from(transition, self._begin_anew(era, transition))
        return running

    def _run_from(self, begin: int, first: list[Block]) -> Iterator[Message]:
        """The lane from one stage on, recorded in front of each later one that may begin anew."""
        stream = self._recorders[begin].messages()
        for stage in self._changed.stages:
            if stage > begin:
                recorder = self._recorders[stage] = Recorder(self._run(begin, self._accumulators, stream, first, stage))
                begin, stream, first = stage, recorder.messages(), []
        return self._run(begin, self._accumulators, stream, first)

    def _deliver_again(self, running: Iterator[Message], taken: int) -> None:
        items = (message.origin for message in running if isinstance(message, (Block, Item)))
        again = list(islice(items, taken))
        if len(again) < taken:
            raise CheckpointError(
                f"lane {self._lane}: {taken} batches were delivered before a change of the run, and only {len(again)} came again; "
                "the data or an operator has changed"
            )
        for delivered in self._delivered.values():
            delivered += again

    def _begin_anew(self, era: int, transition: int) -> list[Block]:
        """Give the operators from a stage on what was not delivered; what leaves the first of them at once."""
        rest = self._rests[transition].without(self._delivered[transition], self._recorders[transition])
        self._accumulators |= self._changed.accumulators(era + 1, transition, self._lane)
        for stage in self._changed.stages:
            if stage >= transition:
                self._delivered[stage] = []
                self._rests[stage] = rest if stage == transition else self._changed.no_rest(era + 1, stage)
        return rest.enter(self._accumulators[transition])


# ---------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------


def row_keys(origin: Origin) -> list[bytes]:
    """Each row as bytes: its records, and the tokens it takes of each."""
    records = origin.ids[:, [CHUNK, OFFSET, PIECE]]
    if origin.rows is None:
        return [row.tobytes() for row in np.ascontiguousarray(records)]
    spans = np.zeros((len(records), 2), np.int64) if origin.spans is None else origin.spans
    segments = np.ascontiguousarray(np.hstack([records, spans]))
    ends = origin.rows.tolist()
    return [segments[a:b].tobytes() for a, b in zip(ends[:-1], ends[1:], strict=True)]


@dataclass(frozen=True)
class Rows:
    """Rows for `batch`."""

    rows: Block | None

    def without(self, delivered: Sequence[Origin], recorder: Recorder) -> Rows:
        """Those that were not delivered."""
        gone = {key for origin in delivered for key in row_keys(origin)}

        def left(block: Block) -> Block:
            keep = [row for row, key in enumerate(row_keys(block.origin)) if key not in gone]
            return block if len(keep) == len(block) else block.take(np.asarray(keep, np.int64))

        given = recorder.take_until_last(lambda block: len(left(block)) < len(block))
        rest = [left(block) for block in (self.rows, *given) if block is not None]
        rest = [block for block in rest if len(block)]
        return Rows(concat_blocks(rest) if rest else None)

    def enter(self, accumulator: Any) -> list[Block]:
        """As any rows."""
        return [] if self.rows is None else accumulator.push(self.rows)


# ---------------------------------------------------------------------------------------------------
# Documents
# ---------------------------------------------------------------------------------------------------

Key = tuple[int, int, int]
"""Chunk, offset and piece of a record."""
Spans = dict[Key, list[tuple[int, int]]]
"""Token ranges by record."""


def record_keys(ids: Ints) -> list[Key]:
    """Chunk, offset and piece of each record."""
    return [(c, o, p) for c, o, p in ids[:, [CHUNK, OFFSET, PIECE]].tolist()]


def spans_of(origins: Iterable[Origin]) -> Spans:
    """The segments of packed rows, by record."""
    out: Spans = {}
    for origin in origins:
        spans = np.zeros((len(origin.ids), 2), np.int64) if origin.spans is None else origin.spans
        for key, (start, length) in zip(record_keys(origin.ids), spans.tolist(), strict=True):
            out.setdefault(key, []).append((start, start + length))
    return out


def held_documents(packed: Sequence[Origin], opened: Origin, begun: Sequence[int]) -> tuple[Origin, Spans]:
    """Documents that wait in packed rows and in the packer, each once in the order of the stream, and which tokens of them do.

    `packed`: rows held behind the packer, those nearest to delivery first; `opened`: documents in the packer.
    """
    waiting = spans_of(packed)
    for key, start in zip(record_keys(opened.ids), begun, strict=True):
        waiting.setdefault(key, []).append((start, _TO_THE_END))
    ids = np.concatenate([*(origin.ids for origin in packed), opened.ids])
    _, first = np.unique(ids[:, [CHUNK, OFFSET, PIECE]], axis=0, return_index=True)
    return Origin(ids[np.sort(first)]), waiting


def unbroken_from(waiting: Sequence[tuple[int, int]], length: int) -> int:
    """First token from which on all of a document's `length` tokens wait."""
    start = length
    for begin, end in sorted(waiting, key=lambda span: -span[1]):
        if end < start:
            break
        start = min(start, begin)
    return start


@dataclass(frozen=True)
class Documents:
    """Documents for the packer `op`, and which of their tokens wait. `begun`: tokens at the beginning that do not."""

    op: Any
    rows: Block | None
    waiting: Spans
    begun: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    lost: int = 0

    def without(self, delivered: Sequence[Origin], recorder: Recorder) -> Documents:
        """Those with tokens left behind the last one delivered. Others that wait, between tokens delivered, count as lost."""
        gone = spans_of(delivered)
        given = recorder.take_until_last(lambda block: any(key in gone for key in record_keys(block.origin.ids)))
        blocks = [block for block in (self.rows, *given) if block is not None and len(block)]
        if not blocks:
            return Documents(self.op, None, {})
        rows = concat_blocks(blocks)
        keys, lengths = record_keys(rows.origin.ids), document_lengths(self.op, rows)
        begun, lost = np.zeros(len(rows), np.int64), 0
        for i, (key, length) in enumerate(zip(keys, lengths.tolist(), strict=True)):
            waiting = [(a, min(b, length)) for a, b in self.waiting.get(key, [(0, length)])]
            out = gone.get(key, [])
            begun[i] = max(unbroken_from(waiting, length), max((end for _, end in out), default=0))
            lost += sum(max(0, min(b, int(begun[i])) - a) for a, b in waiting) - sum(b - a for a, b in out)
        left = np.flatnonzero(begun < lengths)
        still = {keys[i]: [(int(begun[i]), _TO_THE_END)] for i in left.tolist()}
        return Documents(self.op, rows.take(left), still, begun[left], lost)

    def enter(self, accumulator: Any) -> list[Block]:
        """Begun ones go on where they were."""
        if self.rows is None:
            return []
        drop = Drop(
            self.op.name, "between tokens delivered before packing was changed", self.rows.origin.ids[:0], self.lost
        )
        out: list[Block] = accumulator.adopt(self.rows, self.begun)
        return [*out, self.rows.slice(0, 0).dropping(drop)] if self.lost else out


def document_lengths(op: Any, rows: Block) -> Ints:
    """Tokens of each document as the packer `op` counts them."""
    name = find_tokens_field(rows.as_columns()) if op.tokens_field == "auto" else op.tokens_field
    lengths = None if name is None else column_lengths(rows.column(name), len(rows))
    return np.zeros(len(rows), np.int64) if lengths is None else lengths

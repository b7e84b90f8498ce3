"""Operators changed on purpose: the old ones finish what was delivered, the new ones take over the rest.

A checkpoint rests on a cut, and some batches were delivered since. After a change those batches come from the operators as they
were before (rebuilt from the recipe), once more, so that it is known to the token what was delivered. Then:

* what was not delivered enters the first operator whose new parameters decide the form of batches (`undelivered.py`);
* records in a changed `shuffle` that stands before that one, or alone, move to the new buffer at the first position that nothing
  delivered came from.

All of it is a function of the checkpoint and of what was delivered, whatever the size of blocks and windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, Protocol

from headrace.core.block import Block, Origin
from headrace.core.checkpoint import Change
from headrace.core.message import Item, Message
from headrace.core.op import Accumulator
from headrace.core.plan import Node, Plan, in_recipe
from headrace.errors import CheckpointError
from headrace.ops.pack.domains import DomainGroups
from headrace.run.account import Account
from headrace.run.undelivered import Documents, Held, Recorder, Rest, Rows, held_documents

RESHAPING: Final = ("pack_flat", "batch")
"""Operators whose parameters decide the form of what is delivered: a change must show in the first batch."""


def _chain(nodes: Sequence[Node], change: Change) -> tuple[Node, ...]:
    names = {id(node): name for name, node in in_recipe(nodes).items()}

    def as_it_was(node: Node) -> Node:
        before = change.operators.get(names.get(id(node), ""))
        return replace(node, op=rebuilt(node.op, before)) if node.stateful and before is not None else node

    return tuple(map(as_it_was, nodes))


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
        self,
        changed: Changed,
        lane: int,
        run: Run,
        accumulators: dict[int, Accumulator],
        rests: dict[int, Rest],
        account: Account,
    ) -> None:
        """`rests`: what was held at the cut, for each stage that a change makes begin anew."""
        self._changed, self._lane, self._run, self._account = changed, lane, run, account
        self._accumulators, self._rests = accumulators, rests
        self._delivered: dict[int, list[Origin]] = {stage: [] for stage in rests}
        self._recorders: dict[int, Recorder] = {}

    def messages(self, stream: Iterator[Message]) -> Iterator[Message]:
        """What is delivered behind the last change. `stream` enters the first stage that begins anew."""
        begin = self._changed.stages[0]
        self._recorders[begin] = Recorder(stream)
        running = self._run_from(begin, [])
        for era, change in enumerate(self._changed.changes):
            coming = [stage for stage in self._changed.transitions[era:] if stage is not None]
            self._account.void_from = min(coming, default=None)
            self._deliver_again(running, change.taken)
            transition = self._changed.transitions[era]
            if transition is not None:
                running.close()  # type: ignore[attr-defined]
                running = self._run_from(transition, self._begin_anew(era, transition))
        self._account.void_from = None
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
        for origin in again:
            self._account.deliver(origin)
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

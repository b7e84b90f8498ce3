"""Operators behind a `stateful_transform`: what they hold cannot be fetched again, so their checkpoints carry it.

Elsewhere a checkpoint names held records and a restore reads them anew. What a user's function made of a state is not there to be
read, so here the rows travel, and a checkpoint is as large as they are: part of a batch, open rows, a shuffle buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.core.block import Block, Origin, concat_blocks
from headrace.core.op import Accumulator, Fields
from headrace.core.plan import Node
from headrace.custom.values import pack_rows, unpack_rows
from headrace.errors import InternalError


@dataclass(frozen=True)
class Carrying:
    """A stateful operator, with checkpoints of its own kind. Everything else is the operator's."""

    op: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "op":
            raise AttributeError(name)
        return getattr(self.op, name)

    @property
    def name(self) -> str:
        """The operator's."""
        return self.op.name

    def describe(self) -> dict[str, Any]:
        """The operator's parameters."""
        return self.op.describe()

    def needs(self, downstream: Fields) -> Fields:
        """What the operator needs."""
        return self.op.needs(downstream)

    def accumulator(self, lane: int) -> CarryingRun:
        """The operator's, with a record of what it holds."""
        return CarryingRun(self.op.name, self.op.accumulator(lane))


def carried(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The chain, with stateful operators behind a `stateful_transform` carrying what they hold."""
    out: list[Node] = []
    carrying = False
    for node in nodes:
        own = getattr(node.op, "carries", False)
        out.append(replace(node, op=Carrying(node.op)) if carrying and node.stateful and not own else node)
        carrying = carrying or own
    return tuple(out)


class CarryingRun:
    """An accumulator, and the rows that were pushed since its checkpoint was last taken, or are held since before."""

    def __init__(self, name: str, inner: Accumulator) -> None:
        """Hold nothing."""
        self._name, self._inner = name, inner
        self._rows: list[Block] = []

    def push(self, block: Block) -> list[Block]:
        """As the operator does."""
        if len(block):
            self._rows.append(block)
        return self._inner.push(block)

    def flush(self) -> list[Block]:
        """As the operator does."""
        return self._inner.flush()

    def end(self) -> list[Block]:
        """As the operator does."""
        return self._inner.end()

    def held(self) -> Origin:
        """Nothing to be fetched."""
        return Origin.empty()

    def state(self) -> dict[str, Any]:
        """The operator's state, and the rows that it holds."""
        rows = self._kept(self._inner.held())
        self._rows = [] if rows is None else [rows]
        packed = None if rows is None else pack_rows(rows, f"{self._name}: a record")
        return {"inner": self._inner.state(), "rows": packed}

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """Give the operator its rows back."""
        del held
        rows = None if state["rows"] is None else unpack_rows(state["rows"])
        self._rows = [] if rows is None else [rows]
        self._inner.restore(state["inner"], rows)

    def _kept(self, held: Origin) -> Block | None:
        """The rows named by `held`, in its order, of those that were pushed."""
        if not len(held):
            return None
        whole = concat_blocks(self._rows)
        place = {_key(whole.origin, row): row for row in range(len(whole))}
        try:
            index = [place[_key(held, row)] for row in range(len(held))]
        except KeyError as error:
            raise InternalError(f"{self._name} holds a row that it was never given") from error
        kept = whole.take(np.array(index, np.int64))
        kept.drops = ()
        return kept


def _key(origin: Origin, row: int) -> bytes:
    one = origin.slice(row, row + 1)
    return one.ids.tobytes() + (b"" if one.spans is None else one.spans.tobytes())

"""The operator contract, written once; if an operator differs from this page, it is a bug.

An operator is a frozen description that users build with `Pipeline.<method>()`. What runs is made from it:

* a **stateless** operator gives `worker()`: called once in every worker (thread or process), it returns a function from
  block to block. The function may look at nothing but the block, so any grouping of the stream into blocks gives the same
  records. It reports rows it cannot use to `bad` and leaves them out of its result; the policy (`on_error`) is not its concern.
* a **stateful** operator gives `accumulator(lane)`: one object per lane that sees every record in order, on one thread.
    - `push(block) -> list[Block]`   what may leave now. Must not depend on how the stream is cut into blocks.
    - `flush() -> list[Block]`       everything held leaves (or is counted as dropped); the object is as new.
    - `end() -> list[Block]`         the stream is over. Usually the same as `flush`.
    - `held() -> Origin`             origins of the input rows held now, in the order `restore` wants them back.
    - `state() -> dict`              what else is needed, msgpack-able and small (ints, strings, bytes). Not payloads.
    - `restore(state, held)`         `held` holds the rows named by `held()`, fetched again, or None if there are none.
  After `restore(state(), held rows)` a fresh accumulator must continue exactly as the old one would have.

Whoever drops a record says so: `block.dropping(Drop(...))` on a block it returns (an empty block will do).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from headrace.core.block import Block, Origin
from headrace.errors import OperatorError

T = TypeVar("T")

Fields = frozenset[str] | None
"""Names of payload fields; None means all of them."""


@dataclass(slots=True)
class BadRows:
    """Rows of one block that an operator could not use: index in its input block, and the reason.

    Rows in `left_out` are no errors: their source has nothing for them.
    """

    rows: list[int] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    stops: bool = False
    """Whether nothing behind the first of `rows` is wanted."""

    def add(self, row: int, error: Exception) -> None:
        """Report input row `row`."""
        self.rows.append(row)
        self.errors.append(error)

    def stop_at(self, row: int, error: Exception) -> bool:
        """Report input row `row`; whether to give only what is before it."""
        self.add(row, error)
        return self.stops

    def leave_out(self, row: int) -> None:
        """Input row `row` has no record."""
        self.left_out.append(row)


class RowFailed(Exception):
    """Raised by a worker that cannot use a row and, unlike with `BadRows`, cannot give the others without it."""

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__(row, error)
        self.row, self.error = row, error


Worker = Callable[[Block, BadRows], Block]


def in_parts(count: int, run: Callable[[int, int], T], bad: BadRows) -> list[T]:
    """Results of `run(start, stop)` over all rows, in order.

    Where it raises, the rows are halved until those that it fails on alone are found, which go to `bad`. If nothing behind the
    first of these is wanted, there is nothing behind it.
    """
    refused = len(bad.rows)

    def attempt(start: int, stop: int) -> list[T]:
        if bad.stops and len(bad.rows) > refused:
            return []
        try:
            return [run(start, stop)]
        except OperatorError:
            raise
        except Exception as error:  # noqa: BLE001  a user's code may raise anything; the policy decides
            if stop - start == 1:
                bad.add(start, error)
                return []
        half = (start + stop) // 2
        return attempt(start, half) + attempt(half, stop)

    return attempt(0, count)


class Operator(Protocol):
    """What every operator description has."""

    @property
    def name(self) -> str:
        """Shown by explain() and in errors."""
        ...

    def describe(self) -> dict[str, Any]:
        """Every parameter that decides data (not parallelism), msgpack-able: part of the recipe's fingerprint."""
        ...

    def needs(self, downstream: Fields) -> Fields:
        """Fields this operator's input must have, given those wanted of its output (projection push-down)."""
        ...


class Stateless(Operator, Protocol):
    """An operator whose work on a record depends on nothing but the record."""

    def worker(self) -> Worker:
        """Build what one worker needs (a tokenizer, a model) and return its function."""
        ...


class Accumulator(Protocol):
    """The stateful part of an operator, for one lane."""

    def push(self, block: Block) -> list[Block]:
        """Take rows, return what may leave."""
        ...

    def flush(self) -> list[Block]:
        """Return everything held and become as new."""
        ...

    def end(self) -> list[Block]:
        """Return the last rows of the stream."""
        ...

    def held(self) -> Origin:
        """Origins of the input rows held."""
        ...

    def state(self) -> dict[str, Any]:
        """Small msgpack-able state beside the held rows."""
        ...

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """Continue from `state()` and the rows of `held()`."""
        ...


class Stateful(Operator, Protocol):
    """An operator that remembers."""

    def accumulator(self, lane: int) -> Accumulator:
        """A fresh accumulator for one lane."""
        ...

    @property
    def reorders(self) -> bool:
        """True if it reorders or regroups records, so that flush sentinels apply."""
        ...


class Assembler(Protocol):
    """A stateful operator whose output rows are made of pieces of its input rows."""

    def assemble(self, records: Block, origin: Origin) -> Block:
        """Rebuild the output rows named by `origin` from `records`, its input rows in any order (each at least once)."""
        ...

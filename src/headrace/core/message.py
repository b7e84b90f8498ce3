"""What flows between stages: blocks and cuts.

A `Cut` is a barrier at a fixed position of a lane's sample stream (Chandy and Lamport 1985, as stream processors use it).
A stage that meets a cut has released everything before it; a stateful stage adds its state as the cut passes. A cut with
`flush` first makes every stateful operator emit what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.core.block import Block, Origin
from headrace.core.size import object_bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """A barrier in one lane before sample `offset` of chunk `chunk`, `position` samples from the lane's beginning.

    `states` holds one entry per stateful operator passed. At `end` the stream as it was ends, and goes on with a curriculum that
    was changed: operators do what they do at the end.
    """

    lane: int
    chunk: int
    offset: int
    position: int
    flush: bool = False
    end: bool = False
    states: tuple[Any, ...] = ()

    def with_state(self, state: Any) -> Cut:
        """The cut after one more stateful operator."""
        return replace(self, states=(*self.states, state))


@dataclass(frozen=True, slots=True)
class End:
    """The lane has no more samples; operators emit what they hold. To a consumer: it has no more batches.

    `last` is its last batch, if somebody wants to repeat it.
    """

    lane: int
    last: Block | Item | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """What a user's function made of a finished batch, and the samples that went into it."""

    lane: int
    value: Any
    origin: Origin

    def nbytes(self) -> int:
        """Bytes of the value, roughly, for queue bounds."""
        return object_bytes(self.value)


Message = Block | Item | Cut | End

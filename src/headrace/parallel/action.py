"""One step of a pipeline schedule, and its text form.

An action says *which stage* does *what* to *which microbatch*. The text is the one that torch's pipeline runtime
reads: `2F0` (forward of microbatch 0 on stage 2), `1B3`, `3SEND_F1`, `1UNSHARD`, `(0F3;7B1)OVERLAP_F_B`.

Facts that surprise:

* A full backward `B` is the input gradient `I` followed by the weight gradient `W` of the same microbatch; a schedule may
  use `B` for some microbatches and `I` + `W` for others, never both for one.
* `SEND_F 2 of stage 1` is received by `RECV_F 2 of stage 2`: a send carries the number of the stage that computed the tensor,
  a receive the number of the stage that will use it.
* Messages carry no tag. Two swapped receives do not hang, they deliver the wrong tensor: hence `headrace.parallel.check`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from headrace.errors import ScheduleError


class Kind(StrEnum):
    """What an action does; the value is its spelling in text."""

    F = "F"  # forward
    I = "I"  # gradient with respect to the input  # noqa: E741
    W = "W"  # gradient with respect to the weights
    B = "B"  # both gradients
    OVERLAP_F_B = "OVERLAP_F_B"  # a forward and a backward, of two microbatches, that may overlap
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"  # gather the sharded parameters of a stage
    RESHARD = "RESHARD"  # drop the gathered copy
    REDUCE_GRAD = "REDUCE_GRAD"  # reduce the stage's gradients over its data-parallel group


COMPUTE = frozenset({Kind.F, Kind.I, Kind.W, Kind.B, Kind.OVERLAP_F_B})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
PER_STAGE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})

_WORDS = "|".join(sorted((k.value for k in Kind if k is not Kind.OVERLAP_F_B), key=len, reverse=True))
_SIMPLE = re.compile(rf"(\d+)({_WORDS})(\d*)")
_COMPOUND = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """Stage, kind, microbatch; for `OVERLAP_F_B` the two `parts`, with stage -1 and no microbatch of its own.

    A named tuple, because a schedule of 64 stages and 1024 microbatches has 131072 of them.

    >>> Action(2, Kind.F, 0)
    2F0
    >>> Action.parse("(0F3;7B1)OVERLAP_F_B").parts
    (0F3, 7B1)
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __repr__(self) -> str:
        """The text form, which is what a person wants to see in a list of actions."""
        return str(self)

    def __str__(self) -> str:
        """The text that torch's runtime reads; `Action.parse` reads it back."""
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        mb = "" if self.microbatch is None else self.microbatch
        return f"{self.stage}{self.kind.value}{mb}"

    @property
    def is_compute(self) -> bool:
        """Whether this action computes, rather than communicates or manages memory."""
        return self.kind in COMPUTE

    def leaves(self) -> tuple[Action, ...]:
        """The parts of a compound action, or the action itself."""
        return self.parts or (self,)

    @staticmethod
    def parse(text: str) -> Action:
        """Read one action; the whole text must be one, so `2F0x` and `3INCOMING` are errors and not `2F0` and `3I`."""
        text = text.strip()
        if match := _COMPOUND.fullmatch(text):
            parts = tuple(Action.parse(part) for part in match[1].split(";"))
            return overlap(*parts)
        match = _SIMPLE.fullmatch(text)
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action; write stage, kind, microbatch, such as 2F0, 1B3, 3SEND_F1, 1UNSHARD "
                "or (0F3;7B1)OVERLAP_F_B"
            )
        kind = Kind(match[2])
        if (kind in PER_STAGE) == bool(match[3]):
            need = "takes no microbatch" if kind in PER_STAGE else "needs a microbatch"
            example = f"{match[1]}{kind.value}" if kind in PER_STAGE else f"{match[1]}{kind.value}0"
            raise ScheduleError(f"{text!r}: {kind.value} {need}; write {example}")
        return Action(int(match[1]), kind, int(match[3]) if match[3] else None)


def overlap(*parts: Action) -> Action:
    """Join a forward and a backward of two different microbatches into one action that may overlap them."""
    kinds = [part.kind for part in parts]
    if len(parts) != 2 or kinds[0] is not Kind.F or kinds[1] not in (Kind.B, Kind.I):
        raise ScheduleError(f"OVERLAP_F_B joins one forward and one backward, in this order; got {list(parts)}")
    return Action(-1, Kind.OVERLAP_F_B, None, parts)


def leaves(row: tuple[Action, ...] | list[Action]) -> Iterator[Action]:
    """Every action of a row, with the compound ones replaced by their parts."""
    for action in row:
        if action.parts:
            yield from action.parts
        else:
            yield action

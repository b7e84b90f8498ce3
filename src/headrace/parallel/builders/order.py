"""The frame that most schedules share: some forwards first, then forward and backward by turns, then the rest.

A schedule of this family is told by four things for each rank: the order of its forwards, the order of its backwards,
how many forwards it runs ahead (`warmup`), and whether the weight gradients follow at once (a full backward), or
`delay` backwards later.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.parallel.action import Action, Kind

Slot = tuple[int, int]  # stage, microbatch


def one_by_one(
    forwards: Sequence[Slot], backwards: Sequence[Slot], warmup: int, delay: int | None = None
) -> list[Action]:
    """The row of one rank: `warmup` forwards, then one forward and one backward by turns, then the backwards left.

    With `delay` the backward is split: the weight gradient of a microbatch runs after the input gradient of the one
    `delay` places later, so that it fills what would be idle time at the end.
    """
    warmup = min(warmup, len(forwards))
    backward = Kind.B if delay is None else Kind.I
    row = [Action(stage, Kind.F, mb) for stage, mb in forwards[:warmup]]
    ahead = len(forwards) - warmup
    for turn, (stage, mb) in enumerate(backwards):
        if turn < ahead:
            row.append(Action(forwards[warmup + turn][0], Kind.F, forwards[warmup + turn][1]))
        row.append(Action(stage, backward, mb))
        if delay is not None and turn >= delay:
            late_stage, late_mb = backwards[turn - delay]
            row.append(Action(late_stage, Kind.W, late_mb))
    if delay:
        row.extend(Action(stage, Kind.W, mb) for stage, mb in backwards[max(0, len(backwards) - delay) :])
    return row


def in_groups(stages: Sequence[int], num_microbatches: int, group: int) -> list[Slot]:
    """Depth first: `group` microbatches through the first stage, the same through the next, then the next group."""
    starts = range(0, num_microbatches, group)
    return [(stage, mb) for start in starts for stage in stages for mb in range(start, start + group)]

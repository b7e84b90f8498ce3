"""From computing actions to a schedule with its communication: what an engine runs.

`lower(schedule)` adds, in the order in which torch's runtime would add them: UNSHARD and RESHARD (gather a stage's sharded
parameters before use, drop them after), REDUCE_GRAD after the last backward of a stage, and SEND and RECV.

Four orders of receives are offered:

* "asap" (the default): a receive is posted at the moment its send is made, in one global order. Every send and its receive
  stand at the same place of that order, so it cannot deadlock on any transport.
* "deferred": a receive waits until its value is needed, or until a send to a peer of higher rank. This is what torch's
  `defer_pp_recv` does; it deadlocks on strict transports in most cases, which `prove` shows.
* "late": a receive directly before its use, after the sends. It deadlocks when a send blocks until it is received.
* "even-odd": as "late", but where two neighbours each have a message for the other, even ranks send first and odd ranks receive
  first: the classical cure for blocking sends. For one stage a rank; round a ring of odd length it would not be enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Literal

from headrace.errors import ScheduleError
from headrace.parallel.action import RECEIVES, SENDS, Action, Kind
from headrace.parallel.schedule import Schedule

Order = Literal["asap", "deferred", "late", "even-odd"]


def lower(schedule: Schedule, *, order: Order = "asap", max_unsharded: int = 3, sharding: bool = True) -> Schedule:
    """Add communication, and sharding actions unless `sharding` is false; at most `max_unsharded` stages gathered at once.

    >>> from headrace.parallel.builders import build
    >>> print(lower(build("1f1b", 2, 1), sharding=False).to_csv())
    0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD
    1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD
    <BLANKLINE>
    """
    if schedule.is_lowered:
        raise ScheduleError(f"schedule {schedule.name!r} holds communication already; lower a compute-only schedule")
    rows: list[list[Action]] = [list(row) for row in schedule.rows]
    if sharding:
        rows = [with_unshard(row, max_unsharded) for row in rows]
    rows = [with_reduce(row, schedule.num_microbatches) for row in rows]
    rows = with_messages(schedule, rows)
    if order == "deferred":
        rows = [_deferred(schedule, rank, row) for rank, row in enumerate(rows)]
    elif order != "asap":
        rows = [_late(row) for row in rows]
    if order == "even-odd":
        rows = _even_odd(schedule, rows)
    return replace(schedule, rows=tuple(tuple(row) for row in rows))


def with_unshard(row: Sequence[Action], limit: int) -> list[Action]:
    """Gather the next `limit` different stages that the row will use; drop those that are not among them."""
    soon: list[int] = []
    soons: list[list[int]] = []
    for action in reversed(row):
        now = list(dict.fromkeys(leaf.stage for leaf in action.leaves()))
        soon = now + [stage for stage in soon if stage not in now]
        soons.append(soon)
    result: list[Action] = []
    gathered: list[int] = []
    for action in row:
        soon = soons.pop()[:limit]
        for stage in [s for s in gathered if s not in soon]:
            gathered.remove(stage)
            result.append(Action(stage, Kind.RESHARD))
        for stage in [s for s in soon if s not in gathered]:
            gathered.append(stage)
            result.append(Action(stage, Kind.UNSHARD))
        result.append(action)
    return result + [Action(stage, Kind.RESHARD) for stage in sorted(gathered)]


def with_reduce(row: Sequence[Action], num_microbatches: int) -> list[Action]:
    """Reduce a stage's gradients over its replicas right after its last weight gradient."""
    result: list[Action] = []
    done: dict[int, int] = {}
    for action in row:
        result.append(action)
        for leaf in action.leaves():
            if leaf.kind in (Kind.B, Kind.W):
                done[leaf.stage] = done.get(leaf.stage, 0) + 1
                if done[leaf.stage] == num_microbatches:
                    result.append(Action(leaf.stage, Kind.REDUCE_GRAD))
    return result


def message_of(schedule: Schedule, leaf: Action) -> tuple[Action, Action] | None:
    """The send and the receive that carry the result of a computation, or None if it stays on its rank."""
    stage, place = leaf.stage, schedule.stage_to_rank
    if leaf.kind is Kind.F and stage + 1 < schedule.num_stages and place[stage + 1] != place[stage]:
        return Action(stage, Kind.SEND_F, leaf.microbatch), Action(stage + 1, Kind.RECV_F, leaf.microbatch)
    if leaf.kind in (Kind.B, Kind.I) and stage > 0 and place[stage - 1] != place[stage]:
        return Action(stage, Kind.SEND_B, leaf.microbatch), Action(stage - 1, Kind.RECV_B, leaf.microbatch)
    return None


def peer(schedule: Schedule, action: Action) -> int:
    """The rank at the other end of a send or receive."""
    ahead = action.kind in (Kind.SEND_F, Kind.RECV_B)
    return schedule.stage_to_rank[action.stage + (1 if ahead else -1)]


def need_of(schedule: Schedule, leaf: Action) -> tuple[int, str, int | None] | None:
    """The result that a computation waits for, as (stage, "F" or "B", microbatch)."""
    if leaf.kind is Kind.F:
        return (leaf.stage - 1, "F", leaf.microbatch) if leaf.stage else None
    if leaf.kind in (Kind.B, Kind.I):
        if leaf.stage + 1 < schedule.num_stages:
            return (leaf.stage + 1, "B", leaf.microbatch)
        return (leaf.stage, "F", leaf.microbatch)
    return None


def with_messages(schedule: Schedule, rows: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Add sends and receives "asap": ranks take turns, one action each; a send puts its receive into the peer's row."""
    result: list[list[Action]] = [[] for _ in rows]
    position = [0] * len(rows)
    made: set[tuple[int, str, int | None]] = set()
    left = [rank for rank in range(len(rows)) if rows[rank]]
    while left:
        moved = False
        for rank in left:
            action = rows[rank][position[rank]]
            needs = [need_of(schedule, leaf) for leaf in action.leaves()] if action.is_compute else []
            if any(need is not None and need not in made for need in needs):
                continue
            moved = True
            position[rank] += 1
            result[rank].append(action)
            for leaf in action.leaves():
                if leaf.kind in (Kind.F, Kind.B, Kind.I):
                    made.add((leaf.stage, "F" if leaf.kind is Kind.F else "B", leaf.microbatch))
                if message := message_of(schedule, leaf):
                    result[rank].append(message[0])
                    result[peer(schedule, message[0])].append(message[1])
        if not moved:
            rank = left[0]
            raise ScheduleError(
                f"schedule {schedule.name!r} cannot be lowered: rank {rank} waits at {rows[rank][position[rank]]} "
                f"(position {position[rank]}) for a result that never comes; prove() shows the cycle or the missing action"
            )
        left = [rank for rank in left if position[rank] < len(rows[rank])]
    return result


def _deferred(schedule: Schedule, rank: int, row: Sequence[Action]) -> list[Action]:
    """Hold each receive back until its use, or until a send to the same peer if that has the higher rank."""
    result: list[Action] = []
    held: list[Action] = []
    for action in row:
        if action.kind in RECEIVES:
            held.append(action)
            continue
        if action.kind in SENDS and rank < peer(schedule, action):
            flush = [r for r in held if peer(schedule, r) == peer(schedule, action)]
        else:
            flush = [r for leaf in action.leaves() for r in held if feeds(r, leaf)]
        result += flush
        held = [r for r in held if r not in flush]
        result.append(action)
    return result + held


def feeds(receive: Action, leaf: Action) -> bool:
    """Whether a computation uses what a receive brings."""
    kinds = (Kind.F,) if receive.kind is Kind.RECV_F else (Kind.B, Kind.I)
    return leaf.kind in kinds and (leaf.stage, leaf.microbatch) == (receive.stage, receive.microbatch)


def _late(row: Sequence[Action]) -> list[Action]:
    """Receives directly before their use."""
    receives = [action for action in row if action.kind in RECEIVES]
    result: list[Action] = []
    for action in row:
        if action.kind in RECEIVES:
            continue
        wanted = [r for leaf in action.leaves() for r in receives if action.is_compute and feeds(r, leaf)]
        receives = [r for r in receives if r not in wanted]
        result += [*wanted, action]
    return result


def _even_odd(schedule: Schedule, rows: list[list[Action]]) -> list[list[Action]]:
    """On odd ranks, receive before sending wherever the neighbour makes what it sends before it needs what it gets."""
    if schedule.num_stages != schedule.num_ranks:
        raise ScheduleError(
            f'order "even-odd" is for one stage a rank; {schedule.name!r} has {schedule.num_stages} stages on '
            f'{schedule.num_ranks} ranks: use order="asap", which no transport can deadlock'
        )
    position = {
        (leaf.stage, leaf.kind is Kind.F, leaf.microbatch): place
        for row in rows
        for place, action in enumerate(row)
        for leaf in action.leaves()
        if leaf.kind in (Kind.F, Kind.B, Kind.I)
    }
    result = [list(row) for row in rows]
    for row in result[1::2]:
        for i in range(len(row) - 1):
            send, receive = row[i], row[i + 1]
            if (
                send.kind not in SENDS
                or receive.kind not in RECEIVES
                or peer(schedule, send) != peer(schedule, receive)
            ):
                continue
            other = peer(schedule, send)
            made = position[other, receive.kind is Kind.RECV_F, receive.microbatch]
            needed = position[other, send.kind is Kind.SEND_F, send.microbatch]
            if made < needed:
                row[i], row[i + 1] = receive, send
    return result


def messages(schedule: Schedule, row: Sequence[Action]) -> Iterator[tuple[int, Action]]:
    """The sends and receives of a row with their positions."""
    return ((i, a) for i, a in zip(count(), row, strict=False) if a.kind in SENDS or a.kind in RECEIVES)

"""The static proof that a schedule can run, and runs the right tensors into the right places.

`prove(schedule)` checks, in this order, and stops at the first that fails:

1. complete: every stage computes every microbatch forward once and backward once (a full backward, or an input and a
   weight gradient), and in this order; a schedule of forwards only is an evaluation and needs no backward
2. communicated: every result that crosses ranks is sent once, after it is made, and received once, before it is used
3. matched: messages carry no tag, so the k-th send from rank a to rank b meets the k-th receive; each must be the same tensor
4. sharded: parameters are gathered when used, and every stage's gradients are reduced once, after its last backward
5. free of deadlock on three transports: buffered, per-peer rendezvous, one communicator
6. within the cap: no rank holds more microbatches in flight than allowed

A compute-only schedule is lowered first. A failure is a `ScheduleError` that names rank, stage and microbatch, shows the rows,
and for a deadlock the shortest cycle of waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import ScheduleError
from headrace.parallel.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from headrace.parallel.lower import lower, message_of, need_of, peer
from headrace.parallel.memory import peak_in_flight
from headrace.parallel.schedule import Schedule
from headrace.parallel.transport import TRANSPORTS, Message, Transport, by_tensor, deadlock, pair_up, runs_in_step


@dataclass(frozen=True)
class Proof:
    """What was proved; `lowered` is the schedule with communication that an engine may run."""

    lowered: Schedule
    num_computations: int
    num_messages: int
    in_flight: tuple[int, ...]
    transports: tuple[Transport, ...]

    def __str__(self) -> str:
        """The proof in words."""
        s = self.lowered
        return (
            f"schedule {s.name!r}: {s.num_stages} stages on {s.num_ranks} ranks, {s.num_microbatches} microbatches\n"
            f"  complete        {self.num_computations} computations, each once and in order\n"
            f"  matched         {self.num_messages} messages, each to its receiver\n"
            f"  no deadlock     on {', '.join(self.transports)} transport\n"
            f"  in flight       at most {', '.join(map(str, self.in_flight))} microbatches by rank"
        )


def prove(
    schedule: Schedule, *, cap: int | Sequence[int] | None = None, transports: Sequence[Transport] = TRANSPORTS
) -> Proof:
    """Prove a schedule or raise `ScheduleError`; `cap` bounds the microbatches in flight (for one rank, or for each).

    >>> from headrace.parallel.builders import build
    >>> print(prove(build("1f1b", 2, 4), cap=2))
    schedule '1f1b': 2 stages on 2 ranks, 4 microbatches
      complete        16 computations, each once and in order
      matched         8 messages, each to its receiver
      no deadlock     on buffered, per-peer, single transport
      in flight       at most 2, 1 microbatches by rank
    """
    given = schedule
    _complete(schedule)
    if not schedule.is_lowered:
        schedule = _lowered(schedule)
    _communicated(schedule)
    matched = _matched(schedule)
    _sharded(schedule, given)
    if not runs_in_step(schedule, matched):
        for transport in transports:
            if cycle := deadlock(schedule, transport, matched):
                raise ScheduleError(_cycle_message(schedule, transport, cycle))
    held = peak_in_flight(schedule).ranks
    _within(schedule, held, cap)
    return Proof(
        schedule,
        sum(len(a.leaves()) for row in schedule.rows for a in row if a.is_compute),
        len(matched),
        held,
        tuple(transports),
    )


def _lowered(schedule: Schedule) -> Schedule:
    """Lower; a schedule that cannot be has a cycle among its computations, whatever the transport."""
    try:
        return lower(schedule)
    except ScheduleError:
        rows = [[x for a in row for x in _with_own_messages(schedule, a)] for row in schedule.rows]
        naive = Schedule.from_rows(schedule.name, rows, schedule.num_microbatches)
        raise ScheduleError(_cycle_message(naive, "any", deadlock(naive, "buffered", by_tensor(naive)))) from None


def _with_own_messages(schedule: Schedule, action: Action) -> list[Action]:
    """An action with its receives directly before and its sends directly after."""
    before: list[Action] = []
    after: list[Action] = []
    for leaf in action.leaves():
        stage, place = leaf.stage, schedule.stage_to_rank
        if leaf.kind is Kind.F and stage and place[stage - 1] != place[stage]:
            before.append(Action(stage, Kind.RECV_F, leaf.microbatch))
        if leaf.kind in (Kind.B, Kind.I) and stage + 1 < schedule.num_stages and place[stage + 1] != place[stage]:
            before.append(Action(stage, Kind.RECV_B, leaf.microbatch))
        if message := message_of(schedule, leaf):
            after.append(message[0])
    return [*before, action, *after]


def _complete(schedule: Schedule) -> None:
    """Every (stage, microbatch) forward and backward, once, in order, on its rank."""
    if schedule.num_microbatches < 1:
        raise ScheduleError(f"schedule {schedule.name!r} has no microbatches; a step needs at least one")
    seen: dict[tuple[int, int], dict[Kind, int]] = {}
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            if action.kind not in COMPUTE:
                continue
            for leaf in action.leaves():
                _note(schedule, seen, leaf, (rank, position))
    evaluation = schedule.is_forward_only
    for stage in range(schedule.num_stages):
        for mb in range(schedule.num_microbatches):
            kinds = set(seen.get((stage, mb), {}))
            good = ({Kind.F},) if evaluation else ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W})
            if kinds not in good:
                raise ScheduleError(_missing(schedule, stage, mb, kinds))


def _note(
    schedule: Schedule, seen: dict[tuple[int, int], dict[Kind, int]], leaf: Action, place: tuple[int, int]
) -> None:
    """Take note of one computation; refuse it twice, out of range, or before what it follows."""
    rank, position = place
    mb = leaf.microbatch
    if mb is None or mb >= schedule.num_microbatches:
        raise ScheduleError(
            f"{_at(schedule, rank, position)} is of microbatch {mb}, but the step has "
            f"{schedule.num_microbatches}, numbered from 0; raise num_microbatches or remove the action"
        )
    if schedule.stage_to_rank[leaf.stage] != rank:
        raise ScheduleError(
            f"{_at(schedule, rank, position)}: stage {leaf.stage} lives on "
            f"rank {schedule.stage_to_rank[leaf.stage]}; move it to that row"
        )
    kinds = seen.setdefault((leaf.stage, mb), {})
    if leaf.kind in kinds:
        raise ScheduleError(
            f"{_at(schedule, rank, position)} was already run at position {kinds[leaf.kind]}; remove one of the two"
        )
    before = {Kind.I: Kind.F, Kind.B: Kind.F, Kind.W: Kind.I}.get(leaf.kind)
    if before is not None and before not in kinds:
        raise ScheduleError(
            f"{_at(schedule, rank, position)} comes before {leaf.stage}{before}{mb}\n{_row(schedule, rank, position)}\n"
            f"run {leaf.stage}{before}{mb} first"
        )
    kinds[leaf.kind] = position


def _missing(schedule: Schedule, stage: int, mb: int, kinds: set[Kind]) -> str:
    """What a stage lacks, or has too much of, for one microbatch."""
    rank = schedule.stage_to_rank[stage]
    have = ", ".join(f"{stage}{k}{mb}" for k in sorted(kinds)) or "nothing"
    if Kind.B in kinds and kinds & {Kind.I, Kind.W}:
        advice = "has a full backward and a split one; keep one of them"
    elif Kind.F not in kinds:
        advice = f"lacks {stage}F{mb}; add it to rank {rank}"
    elif Kind.I in kinds:
        advice = f"lacks {stage}W{mb}; add it after {stage}I{mb}"
    else:
        advice = f"lacks a backward; add {stage}B{mb}, or {stage}I{mb} and {stage}W{mb}, to rank {rank}"
    return f"schedule {schedule.name!r} is incomplete: stage {stage} on rank {rank} runs {have} of microbatch {mb}, and {advice}"


def _communicated(schedule: Schedule) -> None:
    """Every crossing result sent once after it is made and received once before use, and nothing else."""
    wanted: dict[tuple[int, Action], str] = {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            for leaf in action.leaves() if action.is_compute else ():
                if message := message_of(schedule, leaf):
                    wanted[rank, message[0]] = f"the result of {leaf}"
                    wanted[peer(schedule, message[0]), message[1]] = f"the result of {leaf} of rank {rank}"
    for rank, row in enumerate(schedule.rows):
        made: set[Action] = set()
        for position, action in enumerate(row):
            if action.kind in SENDS or action.kind in RECEIVES:
                if wanted.pop((rank, action), None) is None:
                    raise ScheduleError(
                        f"{_at(schedule, rank, position)} moves a tensor twice, or one that stays on its rank; remove it"
                    )
                if action.kind in SENDS and not _made_before(action, made):
                    raise ScheduleError(
                        f"{_at(schedule, rank, position)} sends what is not made yet; "
                        f"move it after the computation\n{_row(schedule, rank, position)}"
                    )
            elif action.is_compute:
                _made_here(schedule, (rank, position), made)
                made.update(action.leaves())
                late = next((a for (r, a) in _needs(schedule, rank, action) if (r, a) in wanted), None)
                if late is not None:
                    raise ScheduleError(
                        f"{_at(schedule, rank, position)} uses what {late} brings, which comes later or never; "
                        f"put {late} before it\n"
                        f"{_row(schedule, rank, position)}"
                    )
    if wanted:
        (rank, action), what = next(iter(wanted.items()))
        raise ScheduleError(
            f"schedule {schedule.name!r}: {action} is missing on rank {rank}, so {what} never arrives; add it, "
            "or load the schedule compute-only and let lower() add all communication"
        )


def _made_here(schedule: Schedule, place: tuple[int, int], made: set[Action]) -> None:
    """What a computation takes from another stage of its own rank must have run before: no message waits for it."""
    rank, position = place
    for leaf in schedule.rows[rank][position].leaves():
        need = need_of(schedule, leaf)
        if need is None or schedule.stage_to_rank[need[0]] != rank:
            continue
        kinds = (Kind.F,) if need[1] == "F" else (Kind.B, Kind.I)
        if not any(Action(need[0], kind, need[2]) in made for kind in kinds):
            raise ScheduleError(
                f"{_at(schedule, rank, position)} uses what {need[0]}{kinds[0]}{need[2]} on the same rank makes, which comes "
                f"later\n{_row(schedule, rank, position)}"
            )


def _needs(schedule: Schedule, rank: int, action: Action) -> list[tuple[int, Action]]:
    """The receives that a computation must come after."""
    return [(rank, a) for a in _with_own_messages(schedule, action) if a.kind in RECEIVES]


def _made_before(send: Action, made: set[Action]) -> bool:
    """Whether the computation that a send carries has run."""
    kinds = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.B, Kind.I)
    return any(Action(send.stage, kind, send.microbatch) in made for kind in kinds)


def _matched(schedule: Schedule) -> list[Message]:
    """The k-th send between two ranks is the tensor that the k-th receive expects."""
    matched, _ = pair_up(schedule)
    for message in matched:
        (a, i), (b, j) = message.send, message.receive
        send, receive = schedule.rows[a][i], schedule.rows[b][j]
        forward = send.kind is Kind.SEND_F
        right = Action(send.stage + (1 if forward else -1), Kind.RECV_F if forward else Kind.RECV_B, send.microbatch)
        if receive != right:
            raise ScheduleError(
                f"schedule {schedule.name!r} would corrupt gradients without an error: messages carry no tag, and {send} of "
                f"rank {a} meets {receive} of rank {b}, not {right}\n{_row(schedule, a, i)}\n{_row(schedule, b, j)}\n"
                f"receive on rank {b} in the order in which rank {a} sends"
            )
    return matched


def _sharded(schedule: Schedule, given: Schedule) -> None:
    """Parameters gathered where used; gradients of every stage reduced once, after its last backward."""
    backward = not schedule.is_forward_only
    for rank, row in enumerate(schedule.rows):
        gathers = any(a.kind is Kind.UNSHARD for a in row)
        gathered: set[int] = set()
        last = {leaf.stage: i for i, a in enumerate(row) for leaf in a.leaves() if leaf.kind in (Kind.B, Kind.W)}
        reduced: dict[int, int] = {}
        for position, action in enumerate(row):
            if action.kind is Kind.UNSHARD:
                gathered.add(action.stage)
            elif action.kind is Kind.RESHARD:
                if action.stage not in gathered:
                    raise ScheduleError(
                        f"{_at(schedule, rank, position)} drops parameters that are not gathered; remove it"
                    )
                gathered.discard(action.stage)
            elif action.kind is Kind.REDUCE_GRAD:
                if action.stage in reduced or position < last.get(action.stage, -1):
                    raise ScheduleError(
                        f"{_at(schedule, rank, position)} must come once, after the last backward of stage {action.stage}"
                    )
                reduced[action.stage] = position
            elif action.is_compute and gathers:
                bare = [leaf.stage for leaf in action.leaves() if leaf.stage not in gathered]
                if bare:
                    raise ScheduleError(
                        f"{_at(schedule, rank, position)} uses stage {bare[0]} while it is sharded; put {bare[0]}UNSHARD before it"
                    )
        unreduced = [stage for stage in schedule.stages_of(rank) if stage not in reduced]
        if given.is_lowered and backward and unreduced:
            raise ScheduleError(
                f"schedule {schedule.name!r}: rank {rank} never reduces the gradients of stage {unreduced[0]}, and the engine "
                f"would leave replicas apart without an error; add {unreduced[0]}REDUCE_GRAD after its last backward"
            )


def _within(schedule: Schedule, held: tuple[int, ...], cap: int | Sequence[int] | None) -> None:
    """No rank holds more than its cap."""
    if cap is None:
        return
    caps = [cap] * len(held) if isinstance(cap, int) else list(cap)
    if len(caps) != len(held):
        raise ScheduleError(f"{len(caps)} caps for {len(held)} ranks; give one for each rank, or one number")
    for rank, (have, allowed) in enumerate(zip(held, caps, strict=True)):
        if have > allowed:
            raise ScheduleError(
                f"schedule {schedule.name!r}: rank {rank} holds {have} microbatches in flight, its cap is {allowed}; "
                "take a schedule that holds less (1f1b, v-half, v-min), or raise the cap"
            )


def _cycle_message(schedule: Schedule, transport: str, cycle: list[str]) -> str:
    """The cycle, one wait a line, and the rows that take part."""
    ranks = sorted({int(word) for line in cycle for word in _ranks_in(line)})
    chain = "\n    waits for ".join([*cycle, cycle[0]])
    rows = "\n".join(_row(schedule, rank) for rank in ranks)
    return (
        f"schedule {schedule.name!r} deadlocks on {_article(transport)} transport; the shortest cycle of waits:\n    {chain}\n"
        f"rows:\n{rows}\n"
        'exchange the order of these actions on one rank; lower(schedule, order="asap") orders all messages safely'
    )


def _article(transport: str) -> str:
    """The transport with its article."""
    return "any" if transport == "any" else f"a {transport}"


def _ranks_in(line: str) -> list[str]:
    """The ranks that a line of a cycle names."""
    words = line.split()
    return [after for word, after in zip(words, words[1:], strict=False) if word == "rank"]


def _at(schedule: Schedule, rank: int, position: int) -> str:
    """A place for a message."""
    return f"schedule {schedule.name!r}, rank {rank}, position {position}: {schedule.rows[rank][position]}"


def _row(schedule: Schedule, rank: int, position: int | None = None) -> str:
    """A row for a message: around a position, or its beginning."""
    row = schedule.rows[rank]
    low = max(0, position - 4) if position is not None else 0
    shown = row[low : low + 12] if position is not None else row[:24]
    cells = [f">{a}<" if low + i == position else str(a) for i, a in enumerate(shown)]
    dots = ("... " if low else "", " ..." if low + len(shown) < len(row) else "")
    return f"  rank {rank}: {dots[0]}{' '.join(cells)}{dots[1]}"

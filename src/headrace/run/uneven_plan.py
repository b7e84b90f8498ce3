"""How a run's finite data end, chosen once when it starts: from the options, the curriculum and the chain.

What a member must know of the other groups' lanes comes from the first of these that applies:

1. nothing: the curriculum has no end, or each group may end by itself ("keep");
2. itself: it computes every lane;
3. the curriculum: every row of its datasets is a record, and rows are neither dropped, cut nor packed on their way, so lengths of
   lanes are arithmetic;
4. a board that all ranks see: `aggregate_dir`, `aggregate_store`, the launcher's store where torch.distributed is initialised,
   or the node's own folder where all ranks share one engine.

Otherwise a ConfigError says what to set: a group that guessed would leave the others waiting in a collective.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.core.checkpoint import LaneState
from headrace.core.lanes import Topology
from headrace.core.plan import Plan
from headrace.core.uneven import Steps, batches_in, standing_of
from headrace.errors import ConfigError
from headrace.options import RuntimeOptions
from headrace.run.board import Board, FolderBoard
from headrace.run.uneven import Agreement, DropStream, Known, PadStream, Stream, Take
from headrace.run.uneven_board import BoardAgreement

OpenBoard = Callable[[], Board]

_sessions: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)
"""Iterations of a run that each member of this process has begun; all members count alike."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of those that must agree: rank (or group, where ranks are not known), or a loader worker of it."""

    number: int
    count: int
    text: str

    def who(self, number: int) -> str:
        """For messages."""
        return f"{self.text} {number}"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ends. `stream(take)` follows an engine."""

    rule: str
    topology: Topology
    position: int
    steps: Steps
    agreement: Agreement
    lengths: Mapping[int, int] = field(default_factory=dict)
    """Batches of each lane, where they are known beforehand."""

    def stream(self, take: Take) -> Stream:
        """The messages that reach the loop."""
        if self.rule == "keep":
            return Stream(take)
        make = DropStream if self.rule == "drop" else PadStream
        return make(take, self.topology, self.position, self.steps, self.agreement, self.lengths)


@dataclass(frozen=True, slots=True)
class Run:
    """What the choice is made from."""

    plan: Plan
    options: RuntimeOptions
    topology: Topology
    work_source: Any
    position: int
    start: Mapping[int, LaneState] = field(default_factory=dict)
    part: tuple[int, int] | None = None
    node: tuple[str, int] | None = None
    """A folder that the ranks of this node share, and how many they are, where they share an engine."""


def plan_ending(run: Run, open_board: OpenBoard | None) -> Ending:
    """Choose. `open_board` opens the board that the options name, if they name one."""
    rule = run.options.uneven or ("drop" if run.topology.rank_groups > 1 else "keep")
    steps = _steps(run)
    if rule == "keep" or endless(run.work_source):
        return Ending("keep", run.topology, run.position, steps, Known())
    if rule == "pad":
        _refuse_pad(run.plan)
    alone = len(run.topology.computed) == run.topology.lanes
    if not alone and (lengths := lane_lengths(run)) is not None:
        known = Known(standing_of(lengths, run.topology))
        return Ending(rule, run.topology, run.position, steps, known, lengths)
    agreement = Known() if alone else _meeting(run, open_board)
    return Ending(rule, run.topology, run.position, steps, agreement)


def _steps(run: Run) -> Steps:
    groups, size = run.topology.rank_groups, run.options.batches_per_step
    if size is not None and size % groups:
        raise ConfigError(
            f"option batches_per_step={size} with {groups} groups: every group delivers the same number of batches of a step, "
            f"so give a multiple of {groups}"
        )
    return Steps(size or groups, 0 if run.topology.mapping == "contiguous" else run.position % groups)


def _refuse_pad(plan: Plan) -> None:
    if any(node.post_batch for node in plan.nodes):
        raise ConfigError(
            "option uneven='pad' with map_batch(): a batch of your function's making cannot be masked; set uneven='drop', or "
            "call the function in the loop"
        )


def endless(work_source: Any) -> bool:
    """Whether the curriculum says that it never ends."""
    return getattr(work_source, "total_samples", 0) == math.inf


def _meeting(run: Run, open_board: OpenBoard | None) -> Agreement:
    """All members, on a board."""
    topology = run.topology
    member = _member(run)
    board = _board(run.node, member, open_board)
    if board is None:
        raise ConfigError(
            f"this curriculum ends, and group {topology.group} of {topology.groups} cannot know by itself where the other groups' "
            "data end, so some would wait for others for ever. Give all ranks a place to agree: options(aggregate_dir=...), a "
            "folder or object-store URL that all see, or aggregate_store='torch://' (found by itself where torch.distributed is "
            "initialised). Or let the curriculum go on (stop_after_passes=None), or end each group by itself (uneven='keep')"
        )
    session = f"end-{next(_sessions[run.options.run_id, member.number])}"
    return BoardAgreement(board, session, member.number, member.count, run.options.aggregate_timeout_s, member.who)


# ---------------------------------------------------------------------------------------------------
# Lengths by arithmetic
# ---------------------------------------------------------------------------------------------------


def lane_lengths(run: Run) -> dict[int, int] | None:
    """Batches of every lane, where rows are neither left out, dropped nor made on their way; else None."""
    total_of = getattr(run.work_source, "samples_of_lane", None)
    nodes = run.plan.nodes
    if total_of is None or not all(keeps_rows(node.op, node.on_error or run.options.on_error) for node in nodes):
        return None
    lanes = run.topology.lanes
    if any(_changed_on_purpose(run.work_source, lanes, lane, state) for lane, state in run.start.items()):
        return None
    samples = {lane: total_of(lane, lanes) for lane in range(lanes)}
    batch = next((node.op for node in nodes if node.op.name == "batch"), None)
    if batch is None:
        return samples
    flushed = run.plan.flush_every * int(run.work_source.chunk_size_hint())
    return {lane: batches_in(n, batch.microbatch_size, batch.drop_last, flushed) for lane, n in samples.items()}


def _changed_on_purpose(work_source: Any, lanes: int, lane: int, state: LaneState) -> bool:
    """Whether the curriculum or operators have been others before: then the length is not what they would give."""
    if state.ever_changed:
        return True
    fresh = work_source.lane(lane, lanes).state().get("eras")
    return any(source.get("eras") != fresh for source in state.sources.values())


def keeps_rows(op: Any, on_error: str) -> bool:
    """Whether an operator hands on exactly one row for each row."""
    if on_error != "raise":
        return False
    match op.name:
        case "fetch":
            return bool(op.readers.every_row)
        case "select" | "materialize" | "decode_text" | "shuffle" | "batch":
            return True
        case "map_transform":
            return not op.drop_none
        case _:
            return False


# ---------------------------------------------------------------------------------------------------
# Who takes part, and where they meet
# ---------------------------------------------------------------------------------------------------


def _member(run: Run) -> Member:
    rank, world, text = run.options.global_rank, run.options.world_size, "rank"
    if world == 1:
        rank, world = torch_rank() or (rank, world)
    if world == 1:
        rank, world, text = run.options.group, run.options.groups, "group"
    if run.part is None:
        return Member(rank, world, text)
    part, parts = run.part
    return Member(rank * parts + part, world * parts, f"loader worker ({text} x {parts} + worker)")


def torch_rank() -> tuple[int, int] | None:
    """Rank and world size where the program has initialised torch.distributed. Never imports torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_rank()), int(distributed.get_world_size())


def _board(node: tuple[str, int] | None, member: Member, open_board: OpenBoard | None) -> Board | None:
    if open_board is not None:
        return open_board()
    return FolderBoard(node[0]) if node is not None and node[1] == member.count else None


def launchers_store() -> str | None:
    """`aggregate_store` of the launcher that has initialised torch.distributed, if one has."""
    known: Mapping[str, str] = os.environ
    return "torch://" if torch_rank() is not None and {"MASTER_ADDR", "MASTER_PORT"} <= known.keys() else None

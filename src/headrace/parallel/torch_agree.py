"""What the ranks of a pipeline must agree on, compared before anything else travels between them.

A rank with another schedule waits for messages that nobody sends. A rank with another cut trains another model, without an
error: a layer runs twice, or not at all. So each rank sums up what it was given as `Terms`, and one `all_gather` of 16 bytes
a rank compares their digests. Only where these differ do the terms themselves travel, and every rank comes to the same verdict.

What a rank cannot know is not compared: with a mapping of its own stages only, the cut is known if `split_model` made
the stages for this very pipeline, and else not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash
from torch import nn

from headrace.errors import ConfigError, WorkerDied
from headrace.parallel.schedule import Schedule
from headrace.parallel.torch_group import Group
from headrace.parallel.torch_record import looks_like_transport
from headrace.parallel.torch_stage import LayerStack, PipelineStage, Tie

MOST_VALUES = 8  # that an error lists

Shapes = dict[str, tuple[int, ...]]  # of a stage's parameters and buffers, by name


class Terms(msgspec.Struct, frozen=True):
    """What one rank was given, as far as others must have been given the same. An empty text is "not known".

    `cut` is for a person. `whole` says whether `stages` holds all stages of the model, or this rank's only. `actions` is
    the schedule's digest. `ties` are the weights that cross ranks: which ranks, and where. `failed` is why this rank
    cannot go on.
    """

    num_microbatches: str
    schedule: str
    variable_shapes: bool
    watchdog: bool
    cut: str = ""
    whole: bool = False
    stages: dict[str, Shapes] = {}
    actions: str = ""
    ties: list[tuple[tuple[int, ...], str]] = []
    failed: str = ""

    def digest(self) -> bytes:
        """16 bytes, equal on ranks that agree. Stages of which other ranks know nothing are left out."""
        comparable = self if self.whole else msgspec.structs.replace(self, stages={})
        return xxhash.xxh3_128_digest(msgspec.json.encode(comparable))


def actions_digest(schedule: Schedule) -> str:
    """The digest of what each rank runs, in order; the schedule's name does not count."""
    return xxhash.xxh3_128_hexdigest(f"{schedule.num_microbatches}\n{schedule.to_csv()}".encode())


def known_of(stages: Mapping[int, PipelineStage], num_stages: int | None = None) -> dict[str, Any]:
    """The `cut` and `stages` of the terms; `num_stages` is the model's where these are not all.

    Names and shapes count; type and device may differ, where a rank only looks on.
    """
    shapes: dict[str, Shapes] = {}
    for index, stage in stages.items():
        tensors = (*stage.named_parameters(), *stage.named_buffers())
        shapes[str(index)] = {name: tuple(tensor.shape) for name, tensor in tensors}
    return {"cut": _cut(stages, num_stages), "stages": shapes}


def _cut(stages: Mapping[int, PipelineStage], num_stages: int | None) -> str:
    stacks = {index: stage.module for index, stage in stages.items() if isinstance(stage.module, LayerStack)}
    if num_stages is not None:
        whole = (s.cut for index, s in stacks.items() if len(s.cut) == num_stages and s.place == index)
        return str(list(next(whole, ()))).replace("[]", "")
    if len(stacks) < len(stages):
        return f"{len(stages)} stages"
    return str([len(stack.names) for stack in stacks.values()])


def crossing_ties(
    ties: Iterable[Tie], schedule: Schedule, stages: Mapping[int, nn.Module]
) -> list[tuple[tuple[int, ...], str]]:
    """The weights whose copies several ranks must keep equal: those ranks, and the places, and whether `stages` has it frozen."""
    found: list[tuple[tuple[int, ...], str]] = []
    for tie in ties:
        ranks = tuple(sorted({schedule.stage_to_rank[stage] for stage in tie.stages}))
        if len(ranks) > 1:
            places = " = ".join(f"{name!r} of stage {stage}" for stage, name in tie.places)
            mine = [stages[stage].get_parameter(name) for stage, name in tie.places if stage in stages]
            found.append((ranks, f"{places} (frozen)" if any(not p.requires_grad for p in mine) else places))
    return found


def exchange(group: Group, terms: Terms) -> list[Terms]:
    """The terms of every rank, by rank; of this rank alone if all agree. Every rank of the group calls it."""
    if group.size == 1:
        return [terms]
    try:
        digests = group.gather_equal(terms.digest())
        if len(set(digests)) == 1:
            return [terms]
        return [msgspec.json.decode(data, type=Terms) for data in group.gather_bytes(msgspec.json.encode(terms))]
    except RuntimeError as error:
        if not looks_like_transport(error):
            raise
        raise WorkerDied(
            f"rank {group.rank} came to compare schedule and cut with the other ranks, and another rank ended or did not "
            f"come within the time-out of the process group: {error}. Its own log says more"
        ) from error


def verdict(everyone: Sequence[Terms], rank: int, failed: Exception | None) -> Exception | None:
    """The error that this rank raises: its own, or how the ranks differ, or who failed. None if all is well."""
    lost = [(other, terms.failed) for other, terms in enumerate(everyone) if terms.failed]
    if found := differences(everyone):
        also = "".join(f". Rank {other} failed: {why.rstrip('.?')}" for other, why in lost)
        error = ConfigError(
            f"the ranks of this pipeline were not given the same: {'; '.join(found)}{also}. All need the same schedule, cut and "
            "options: let rank 0 alone call plan(), and hand what it found to all, with choice = [plan.schedule, "
            "plan.num_layers_per_stage, plan.recompute] and torch.distributed.broadcast_object_list(choice, src=0)"
        )
        error.__cause__ = failed
        return error
    if failed is not None:
        return failed
    if lost:
        return WorkerDied(f"rank {lost[0][0]} failed before its first step: {lost[0][1]}. Mend it there")
    return None


def differences(everyone: Sequence[Terms]) -> list[str]:
    """What the ranks were given differently, with the values by rank; what merely follows from another line is left out."""
    if len(everyone) == 1:
        return []
    found = [
        *_line("number of microbatches", [t.num_microbatches for t in everyone]),
        *_line("layers of each stage", [t.cut for t in everyone]),
        *_line("RunOptions.variable_shapes", [str(t.variable_shapes) for t in everyone]),
        *_line("RunOptions.watchdog", [str(t.watchdog) for t in everyone]),
    ]
    actions = {t.actions for t in everyone}
    names = {t.schedule for t in everyone}
    if len(names) > 1 and (len(actions - {""}) > 1 or "" in actions):
        found += _line("schedule", [repr(t.schedule) for t in everyone])
    elif len(actions - {""}) > 1 and not found:
        found += _line("schedule", [_with_digest(t) for t in everyone])
    return found or [*_tensors(everyone), *_ties(everyone)]


def _with_digest(terms: Terms) -> str:
    return f"{terms.schedule!r} (digest of its actions: {terms.actions[:8]})" if terms.actions else ""


def _tensors(everyone: Sequence[Terms]) -> list[str]:
    """The first stage, and in it the first tensor, that two ranks know differently."""
    for stage in sorted({stage for t in everyone for stage in t.stages}, key=int):
        known = [t.stages.get(stage) for t in everyone]
        for name in dict.fromkeys(name for shapes in known if shapes is not None for name in shapes):
            values = ["" if s is None else str(list(s[name])) if name in s else "none" for s in known]
            if line := _line(f"stage {stage}, tensor {name!r}", values):
                return line
    return []


def _ties(everyone: Sequence[Terms]) -> list[str]:
    """Weights that a rank shares with another, and the other not with it, or in another order."""
    for ranks in sorted({ranks for t in everyone for ranks, _ in t.ties}):
        values = ["" for _ in everyone]
        for rank in ranks:
            if everyone[rank].actions:  # else it failed before it knew
                values[rank] = ", ".join(text for others, text in everyone[rank].ties if others == ranks) or "none"
        if line := _line("shared weights (RunOptions.ties)", values):
            return line
    return []


def _line(what: str, values: Sequence[str]) -> list[str]:
    """`what: 4 on rank 0, 8 on ranks 1 to 3`, if the known values differ."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value:
            ranks.setdefault(value, []).append(rank)
    if len(ranks) < 2:
        return []
    shown = [f"{value} on {_ranks_text(where)}" for value, where in list(ranks.items())[:MOST_VALUES]]
    more = f", and {len(ranks) - MOST_VALUES} more values" if len(ranks) > MOST_VALUES else ""
    return [f"{what}: {', '.join(shown)}{more}"]


def _ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 1 to 7`, or `ranks 0, 2 and 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"

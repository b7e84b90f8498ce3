"""Differences between a checkpoint and the pipeline it is restored into: found, refused, or taken on purpose.

Each difference is of a kind, by which `restore(accept={...})` names it:

    "mixture"     weights of datasets that were there before and are now
    "datasets"    datasets added or removed (known by name; ids may shift)
    "shards"      shards added to a dataset, behind those it had
    "curriculum"  anything else of the work source
    "flush"       the cadence of flush sentinels
    an operator   its parameters, for example "pack_flat"

What each means for the stream is on the page docs/guide/checkpoints.md; some have no meaning that repeats nothing, and are
refused whatever is accepted. So a refusal first tries what would come of accepting everything: it names the kinds to accept if
that works, and otherwise says why it does not. The result is a checkpoint of the pipeline as it is now, so it is taken over once
and for all.

* The curriculum: states of the work source are rewritten, by the source itself. New weights hold from one round on that no lane has
  delivered from, the same for all lanes, which is why the states of all lanes are needed.
* `shuffle`, `pack_flat`, `batch` and the cadence: the lane remembers what it was before (`Change`); the engine turns one into the
  other, since it has the records (`run/change.py`).
* Other operators: what they made of records in flight cannot be known, so lanes go on behind all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

from headrace.arguments import shown
from headrace.core.checkpoint import CAUGHT_UP, Change, LaneState, differences
from headrace.errors import CheckpointError, CheckpointMismatch, ConfigError, UnknownOptionError

CURRICULUM: Final = ("mixture", "datasets", "shards", "curriculum")
REBUILT: Final = ("shuffle", "pack_flat", "batch")
"""Operators that the engine can build as they were."""
_OF_ROWS: Final = ("rows", "dataset", "shuffle_block")
_EXAMPLE: Final = "accept={'mixture', 'batch'}"


class Difference(NamedTuple):
    """One difference and its kind."""

    kind: str
    line: str


class Source(Protocol):
    """The work source, as far as taking over is concerned."""

    def taken_over(self, old: Mapping[str, Any], first_round: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """How states of a source with the recipe `old` are to be read by this one."""
        ...

    def first_untouched(self, state: Mapping[str, Any], offset: int, samples: int) -> int | None:
        """The first chunk of a lane, by number, that is behind these samples."""
        ...

    def component_ids(self) -> Mapping[str, int]:
        """Id of each component."""
        ...

    def lane(self, lane: int, lanes: int) -> Any:
        """One lane."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """The pipeline that a checkpoint is restored into: its recipe, its work source, and its operators as in the recipe.

    `never`: why no difference can be taken, if something in the pipeline stands against it.
    """

    recipe: Mapping[str, Any]
    source: Source
    operators: Mapping[str, Any]
    never: str = ""


# ---------------------------------------------------------------------------------------------------
# Differences
# ---------------------------------------------------------------------------------------------------


def find_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Every difference between two recipes."""
    out: list[Difference] = []
    before, after = old["curriculum"], new["curriculum"]
    names = [_dataset_names(recipe) for recipe in (before, after)]
    for key in dict.fromkeys([*before, *after]):
        lines = _lines(f"curriculum.{key}", before, after, key)
        out += [Difference(_curriculum_kind(key, *names), line) for line in lines]
    for key in dict.fromkeys([*old["operators"], *new["operators"]]):
        lines = _lines(f"operators.{key}", old["operators"], new["operators"], key)
        out += [Difference(key.partition(".")[2], line) for line in lines]
    rest = [{k: v for k, v in recipe.items() if k not in ("curriculum", "operators")} for recipe in (old, new)]
    return out + [Difference("flush", line) for line in differences(*rest)]


def _lines(prefix: str, old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> list[str]:
    left, right = ({prefix: recipe[key]} if key in recipe else {} for recipe in (old, new))
    return differences(left, right)


def _dataset_names(curriculum: Mapping[str, Any]) -> set[str]:
    return {key.partition("/")[2] for key in curriculum if key.startswith(("dataset/", "component/"))}


def _curriculum_kind(key: str, before: set[str], after: set[str]) -> str:
    setting, _, name = key.partition("/")
    if name and not (name in before and name in after):
        return "datasets"
    if setting in ("weight", "component"):
        return "mixture" if setting == "weight" else "datasets"
    return "shards" if setting in _OF_ROWS else "curriculum"


# ---------------------------------------------------------------------------------------------------
# Taking over
# ---------------------------------------------------------------------------------------------------


def take_over(state: Mapping[str, Any], target: Target, accept: Collection[str]) -> dict[str, Any]:
    """The checkpoint as one of `target`'s recipe.

    CheckpointMismatch lists differences whose kind is not in `accept`, and says which kinds would do, or why none would.
    """
    accepted = _known(_names(accept), state["recipe"], target)
    found = find_differences(state["recipe"], target.recipe)
    if not found:
        return dict(state)
    kinds = {difference.kind for difference in found}
    refused = [difference.line for difference in found if difference.kind not in accepted]
    if refused:
        raise CheckpointMismatch(refused, _advice(state, target, kinds))
    return _taken_over(state, target, kinds)


def _advice(state: Mapping[str, Any], target: Target, kinds: set[str]) -> str:
    """What to do about differences: accept them, if that would do."""
    try:
        _taken_over(state, target, kinds)
    except CheckpointError as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001  a work source of the user's own refuses a state as it likes
        why = f"the work source raised {type(error).__name__}: {error}"
    else:
        named = ", ".join(map(repr, sorted(kinds)))
        return f"Restore with the old recipe, or take the differences on purpose: restore(..., accept={{{named}}})."
    return f"Restore with the old recipe. These differences cannot be taken on purpose: {why}"


def _taken_over(state: Mapping[str, Any], target: Target, kinds: set[str]) -> dict[str, Any]:
    """The checkpoint with differences of all these kinds taken. Changes nothing that it is given."""
    _check_possible(state, target)
    lanes = {int(lane): LaneState.decode(held) for lane, held in state["lanes"].items()}
    if kinds & set(CURRICULUM):
        lanes = _with_curriculum(state, lanes, target)
    if kinds - set(CURRICULUM):
        lanes = _with_operators(state, lanes, target, kinds)
    changed = {str(number): replace(lane, ever_changed=True).encode() for number, lane in lanes.items()}
    return {**state, "recipe": dict(target.recipe), "lanes": changed}


def _names(accept: Any) -> set[str]:
    """Kinds as they were given: in a collection, or a single one by itself."""
    if isinstance(accept, str):
        return {accept}
    if isinstance(accept, (bytes, bytearray, Mapping)) or not isinstance(accept, Collection):
        raise ConfigError(f"restore(accept=...): give a set of names, as in {_EXAMPLE}; found {shown(accept)}")
    for name in accept:
        if not isinstance(name, str):
            raise ConfigError(
                f"restore(accept=...): differences are named by strings, as in {_EXAMPLE}; found {shown(name)}"
            )
    return set(accept)


def _known(accept: set[str], recipe: Mapping[str, Any], target: Target) -> set[str]:
    operators = {key.partition(".")[2] for key in (*recipe["operators"], *target.recipe["operators"])}
    known = {*CURRICULUM, "flush", *operators}
    for name in accept - known:
        raise UnknownOptionError("difference to accept", name, known)
    return accept


def _check_possible(state: Mapping[str, Any], target: Target) -> None:
    """Nothing that stands against it, the same operators in the same order, and lanes that say how far they have read."""
    if target.never:
        raise CheckpointError(target.never)
    old, new = state["recipe"]["operators"], target.recipe["operators"]
    if list(old) != list(new):
        raise CheckpointError(
            "operators were added, removed or moved, which has no meaning for records in flight: "
            f"{', '.join(old) or 'none'} -> {', '.join(new) or 'none'}. Only parameters can change in a run, accepted or "
            "not; build the chain as it was, or start a new run"
        )
    behind = [lane for lane, held in state["lanes"].items() if CAUGHT_UP in held]
    if behind:
        raise CheckpointError(
            f"lanes {', '.join(behind)} of this checkpoint were shared by several loader workers, and it is not known how far each "
            "has read: restore it unchanged, deliver a batch without loader workers, and change the run from a checkpoint of that"
        )


def _with_curriculum(state: Mapping[str, Any], lanes: dict[int, LaneState], target: Target) -> dict[int, LaneState]:
    """The work source's states, for the curriculum as it is now."""
    total = int(state["canonical_replicas"])
    missing = [lane for lane in range(total) if lane not in lanes]
    free = [_first_free_chunk(lane, target.source) for lane in lanes.values()]
    bound = [chunk for chunk in free if chunk is not None]
    if bound and missing:
        raise CheckpointError(
            "the curriculum changes for all lanes from one round on, so the states of all ranks are needed, as a list; lanes "
            f"{', '.join(map(str, missing))} are in none of those given"
        )
    follow = target.source.taken_over(state["recipe"]["curriculum"], max(bound, default=0))
    numbers = _component_numbers(state["recipe"]["curriculum"], target.source.component_ids())
    stateful = {key: op for key, op in target.operators.items() if hasattr(op, "accumulator")}

    def renumbered(lane: LaneState) -> LaneState:
        at_cut = lane.changes[0].operators if lane.changes else state["recipe"]["operators"]
        held = tuple(
            replace(saved, state=op.renumbered(saved.state, numbers, at_cut[key]))
            if hasattr(op, "renumbered")
            else saved
            for (key, op), saved in zip(stateful.items(), lane.operators, strict=False)
        )
        return replace(lane, operators=held, sources={chunk: follow(old) for chunk, old in lane.sources.items()})

    return {number: renumbered(lane) for number, lane in lanes.items()}


def _first_free_chunk(lane: LaneState, source: Source) -> int | None:
    """The first chunk that nothing delivered came from, and that no cut lies in; None if the source does not ask."""
    return source.first_untouched(lane.sources[lane.chunk], lane.offset, lane.until - lane.position)


def _component_numbers(old: Mapping[str, Any], new: Mapping[str, int]) -> dict[int, int]:
    """New id of each old one, by name. Without ids in the recipe they follow the names' order."""
    told = {key.partition("/")[2]: number for key, number in old.items() if key.startswith("component/")}
    before = told or {name: number for number, name in enumerate(sorted(_dataset_names(old)))}
    return {number: new[name] for name, number in before.items() if name in new}


def _with_operators(
    state: Mapping[str, Any], lanes: dict[int, LaneState], target: Target, kinds: set[str]
) -> dict[int, LaneState]:
    """Lanes that remember what their operators were, or go on behind everything in flight."""
    old = state["recipe"]["operators"]
    if kinds - {*CURRICULUM, *REBUILT, "flush"}:
        total = int(state["canonical_replicas"])
        return {number: _behind(lane, target.source.lane(number, total)) for number, lane in lanes.items()}
    before = {key: dict(old[key]) for key in old if key.partition(".")[2] in REBUILT}
    flush = int(state["recipe"]["flush_every_k_chunks"])
    return {number: _remembering(lane, before, flush) for number, lane in lanes.items()}


def _remembering(lane: LaneState, operators: dict[str, dict[str, Any]], flush: int) -> LaneState:
    change = Change(operators, flush, lane.until, lane.taken)
    return replace(lane, taken=0, changes=(*lane.changes, change))


def _behind(lane: LaneState, source: Any) -> LaneState:
    """The lane from the first sample on that nothing delivered came from; what operators held is passed over."""
    chunk, offset = lane.chunk, lane.offset + lane.until - lane.position
    source.load(lane.sources[lane.chunk])
    before = source.state()
    while (drawn := source.draw()) is not None and offset >= len(drawn):
        chunk, offset, before = chunk + 1, offset - len(drawn), source.state()
    offset = offset if drawn is not None else 0
    return LaneState(chunk, offset, lane.until, 0, {chunk: before}, until=lane.until, reached=lane.reached)


def passed_over(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What a checkpoint that was taken over leaves behind in lanes that go on behind everything in flight; "" if there are none.

    Which of those samples were delivered or dropped nothing here can tell, so it is said how many there are, and from where on
    lanes go on: what no run has delivered or dropped before that is passed over.
    """
    in_flight: dict[int, int] = {}
    for number, data in before["lanes"].items():
        old, new = LaneState.decode(data), LaneState.decode(after["lanes"][number])
        read = new.position - old.position
        held = sum(len(saved.held.begun()) for saved in old.operators) if not new.operators else 0
        if read or held:
            in_flight[int(number)] = read + held
    if not in_flight:
        return ""
    goes_on = ", ".join(
        f"{number} at sample {LaneState.decode(after['lanes'][str(number)]).position}" for number in in_flight
    )
    return (
        "operators were changed whose records in flight cannot be known: samples that were read and are neither delivered nor "
        f"dropped are passed over, at most {sum(in_flight.values())}. Lanes go on behind them: {goes_on}"
    )

"""Checkpoints: a position and a count.

A checkpoint of a lane is the newest cut whose preceding records were all delivered (before the last delivered batch), and the
number of batches taken since. What operators held at the cut is written as recipes, not payloads: the chunk, offset and
piece of each held record, and for packed rows the token span of each segment. Nothing in it depends on how far ahead the
pipeline ran, so two runs that delivered equally many batches have byte-equal checkpoints.

Everything is msgpack: dicts with string keys, lists, ints, floats, strings, bytes. Never pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import zstandard

from headrace.core.block import CHUNK, OFFSET, ORIGIN_WIDTH, PIECE, Ints, Origin
from headrace.errors import CheckpointError

FORMAT: Final = 1

CAUGHT_UP: Final = "caught_up"
"""Marks a lane whose `taken` was counted up from an older state: it stands at the same place, but may rest on an older cut."""

Span = tuple[int, int, int]
"""Chunk, offset and number of neighbouring samples."""


@dataclass(frozen=True, slots=True)
class OperatorState:
    """One stateful operator at a cut: its own small state, and the origins of the rows it held."""

    state: dict[str, Any]
    held: Origin


@dataclass(frozen=True, slots=True)
class Change:
    """Operators that were changed on purpose since the cut: what they were before, and how far that goes.

    `operators` has the parameters before, by number and name as in the recipe; `flush` the cadence before. They gave the first
    `taken` batches after the cut, all of them from samples before `until`.
    """

    operators: dict[str, dict[str, Any]]
    flush: int
    until: int
    taken: int

    def encode(self) -> dict[str, Any]:
        """As a msgpack-able dict."""
        return {"operators": self.operators, "flush": self.flush, "until": self.until, "taken": self.taken}


@dataclass(frozen=True, slots=True)
class LaneState:
    """One lane: the cut (`chunk`, `offset`, samples before it), operators at the cut, and batches `taken` since.

    `released` is empty but for runs with `deterministic=False`: the order in which the first stage released what follows the
    cut. `sources` maps chunk numbers to the work source's state before that chunk: the cut's own, and those of chunks that held
    rows came from. `operators` is empty for a lane that has not met a cut. `until` is a position (as `position`, in samples of the
    lane) that all batches taken so far came from before. `changes` are those on purpose since the cut, the first one first;
    `taken` counts from the last. `ever_changed`: the run was changed on purpose some time, so that the number of batches so far is
    not what the recipe would give. `reached`: the run's position that this lane stands at, where others of the same run stand at
    an earlier one (see `merge`); else 0.
    """

    chunk: int
    offset: int
    position: int
    taken: int
    sources: dict[int, dict[str, Any]]
    operators: tuple[OperatorState, ...] = ()
    released: tuple[Span, ...] = ()
    until: int = 0
    changes: tuple[Change, ...] = ()
    ever_changed: bool = False
    reached: int = 0

    @property
    def taken_in_all(self) -> int:
        """Batches since the cut, before changes and after."""
        return self.taken + sum(change.taken for change in self.changes)

    def encode(self) -> dict[str, Any]:
        """As a msgpack-able dict."""
        changes = {"changes": [change.encode() for change in self.changes]} if self.changes else {}
        order = {"released": [list(span) for span in self.released]} if self.released else {}
        return {
            "chunk": self.chunk,
            "offset": self.offset,
            "position": self.position,
            "taken": self.taken,
            "until": self.until,
            "sources": {str(chunk): state for chunk, state in sorted(self.sources.items())},
            "operators": [{"state": op.state, "held": encode_origin(op.held)} for op in self.operators],
            **order,
            **changes,
            **({"ever_changed": True} if self.ever_changed else {}),
            **({"reached": self.reached} if self.reached else {}),
        }

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> LaneState:
        """Back from `encode()`."""
        return cls(
            int(data["chunk"]),
            int(data["offset"]),
            int(data["position"]),
            int(data["taken"]),
            {int(chunk): dict(state) for chunk, state in data["sources"].items()},
            tuple(OperatorState(dict(op["state"]), decode_origin(op["held"])) for op in data["operators"]),
            tuple((int(c), int(o), int(n)) for c, o, n in data.get("released", ())),
            int(data["until"]),
            tuple(Change(**change) for change in data.get("changes", ())),
            bool(data.get("ever_changed", False)),
            int(data.get("reached", 0)),
        )


# ---------------------------------------------------------------------------------------------------
# Origins as bytes
# ---------------------------------------------------------------------------------------------------


def encode_origin(origin: Origin) -> bytes:
    """Chunk, offset and piece of each segment (the rest follows from the work source), and the row layout of packed rows.

    Neighbours differ little, so differences are written byte plane by byte plane and compressed: about one byte per record
    for a shuffle buffer.
    """
    columns = [origin.ids[:, CHUNK], origin.ids[:, OFFSET], origin.ids[:, PIECE]]
    if origin.rows is not None:
        columns.append(np.diff(origin.rows))
        spans = np.zeros((len(origin.ids), 2), np.int64) if origin.spans is None else origin.spans
        columns += [spans[:, 0], spans[:, 1]]
    if not len(origin.ids):
        return b""
    sizes = np.array([len(origin.ids), -1 if origin.rows is None else len(origin)], "<i8").tobytes()
    return zstandard.ZstdCompressor(level=9).compress(sizes + b"".join(_pack_ints(column) for column in columns))


def decode_origin(data: bytes) -> Origin:
    """Back from `encode_origin`; dataset, shard, row and component are zero until `locate` fills them in."""
    if not data:
        return Origin.empty()
    body = memoryview(zstandard.ZstdDecompressor().decompress(data))
    segments, rows = np.frombuffer(body[:16], "<i8").tolist()
    body = body[16:]
    ids = np.zeros((segments, ORIGIN_WIDTH), np.int64)
    for field in (CHUNK, OFFSET, PIECE):
        ids[:, field], body = _unpack_ints(body, segments)
    if rows < 0:
        return Origin(ids)
    counts, body = _unpack_ints(body, rows)
    starts, body = _unpack_ints(body, segments)
    lengths, body = _unpack_ints(body, segments)
    return Origin(ids, np.concatenate([[0], np.cumsum(counts)]), np.stack([starts, lengths], axis=1))


def _pack_ints(values: Ints) -> bytes:
    delta = np.diff(values, prepend=0)
    zigzag = ((delta << 1) ^ (delta >> 63)).astype("<u8")
    return np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, 8).T).tobytes()


def _unpack_ints(body: memoryview, n: int) -> tuple[Ints, memoryview]:
    planes = np.frombuffer(body[: 8 * n], np.uint8).reshape(8, n)
    zigzag = np.ascontiguousarray(planes.T).view("<u8").reshape(n)
    delta = (zigzag >> np.uint64(1)).astype(np.int64) ^ -(zigzag & np.uint64(1)).astype(np.int64)
    return np.cumsum(delta), body[8 * n :]


# ---------------------------------------------------------------------------------------------------
# Whole checkpoints
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How far a rank's delivery has got.

    position: of the run; this rank has delivered what it has before it. passed: places before it that this rank had nothing for,
    since their lanes had ended, so that `position - passed` is the same on ranks that have delivered equally many batches.
    """

    position: int
    lanes: Mapping[int, LaneState]
    passed: int = 0

    def place(self) -> dict[str, Any]:
        """As a msgpack-able dict. Only runs whose groups end apart have more than the position."""
        return {"position": self.position, **({"passed": self.passed} if self.passed else {})}


PLACE: Final = ("position", "passed")
"""Keys of a checkpoint that say how far delivery has got."""


def assemble(recipe: dict[str, Any], lanes_total: int, at: Snapshot) -> dict[str, Any]:
    """One rank's checkpoint: the recipe it belongs to, global batches delivered, and its lanes."""
    return {
        "format": FORMAT,
        "canonical_replicas": lanes_total,
        **at.place(),
        "recipe": recipe,
        "lanes": {str(lane): state.encode() for lane, state in sorted(at.lanes.items())},
    }


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """Canonical bytes of a checkpoint."""
    return msgspec.msgpack.encode(state)


def from_any(state: Any) -> dict[str, Any]:
    """A checkpoint from a dict or from bytes; CheckpointError says what is missing."""
    if isinstance(state, (bytes, bytearray, memoryview)):
        try:
            state = msgspec.msgpack.decode(bytes(state))
        except msgspec.DecodeError as error:
            raise CheckpointError(f"these {len(state)} bytes are not a headrace checkpoint: {error}") from None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"a checkpoint is a dict or bytes, got {type(state).__name__}")
    missing = [key for key in ("format", "canonical_replicas", "position", "recipe", "lanes") if key not in state]
    if missing:
        raise CheckpointError(f"this is not a headrace checkpoint: it lacks {', '.join(missing)}")
    numbers = {key: state[key] for key in ("format", "canonical_replicas", "position")}
    least = {"format": 1, "canonical_replicas": 1, "position": 0}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least[key]:
            raise CheckpointError(f"this checkpoint is damaged: its {key} is {value!r}")
    if not isinstance(state["recipe"], Mapping) or not isinstance(state["lanes"], Mapping):
        raise CheckpointError("this checkpoint is damaged: its recipe and its lanes are not both mappings")
    if not all(isinstance(held, Mapping) for held in state["lanes"].values()):
        raise CheckpointError("this checkpoint is damaged: its lanes are not all mappings")
    more = [state.get("passed", 0), *(held.get("reached", 0) for held in state["lanes"].values())]
    if not all(isinstance(value, int) for value in more):
        raise CheckpointError(f"this checkpoint is damaged: its positions are {more}")
    if state["format"] > FORMAT:
        raise CheckpointError(
            f"checkpoint format {state['format']} is newer than this headrace reads ({FORMAT}); upgrade headrace"
        )
    return dict(state)


def delivered(state: Mapping[str, Any]) -> int:
    """Global batches, as far as one rank knows: those it has delivered, times the number of groups."""
    return int(state["position"]) - int(state.get("passed", 0))


def of_one_step(states: Iterable[Mapping[str, Any]]) -> bool:
    """Whether ranks saved these after equal numbers of batches."""
    return len({delivered(state) for state in states}) <= 1


def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The union of several ranks' checkpoints; they must be of one recipe and one step, and agree on shared lanes.

    Groups that end apart (uneven="keep") pass over the turns of lanes that have ended. So near the end of the data they stand at
    different positions at the same step. The union then stands at the first of these, and lanes that are further say so.
    """
    if len(states) == 1:
        return dict(states[0])
    first, lanes, reached = states[0], dict[str, Any](), dict[str, int]()
    for number, state in enumerate(states):
        _check_alike(first, number, state)
        for lane, found in state["lanes"].items():
            theirs = {key: value for key, value in found.items() if key != "reached"}
            held = lanes.setdefault(lane, theirs)
            if CAUGHT_UP in held:
                lanes[lane] = theirs
            elif CAUGHT_UP not in theirs and held != theirs:
                why = _shared(states)
                raise CheckpointError(f"checkpoints 0 and {number} contradict each other about lane {lane}{why}")
            reached[lane] = max(int(state["position"]), found.get("reached", 0), reached.get(lane, 0))
    position = min(reached.values(), default=int(first["position"]))
    at = Snapshot(position, {}, position - delivered(first))
    ahead = {lane: {"reached": place} for lane, place in reached.items() if place > position}
    held = {lane: {**lanes[lane], **ahead.get(lane, {})} for lane in sorted(lanes, key=int)}
    head = {key: first[key] for key in ("format", "canonical_replicas")}
    return {**head, **at.place(), **{key: first[key] for key in first if key not in (*head, *PLACE)}, "lanes": held}


def _check_alike(first: Mapping[str, Any], number: int, state: Mapping[str, Any]) -> None:
    """Whether this state can be of the same run and step as the first."""
    told = {"canonical_replicas": tuple(int(s["canonical_replicas"]) for s in (first, state))}
    if not of_one_step((first, state)):
        told["position"] = (delivered(first), delivered(state))
    for key, (one, other) in told.items():
        if one != other:
            raise CheckpointError(
                f"checkpoints 0 and {number} contradict each other: {key} is {one} and {other}; "
                "restore states that were saved at the same step (a group that ended before others, with uneven='keep', has none "
                "of theirs: restore its own on its ranks)"
            )
    if state is not first and (changed := differences(first["recipe"], state["recipe"])):
        raise CheckpointError(f"checkpoints 0 and {number} are of different recipes: " + "; ".join(changed))


def _shared(states: Sequence[Mapping[str, Any]]) -> str:
    """Why states of one step may disagree about a lane that several ranks compute."""
    if len({state["position"] for state in states}) == 1:
        return ""
    return (
        ": lanes have ended (uneven='keep'), and groups that do not divide the lanes have passed over different ones. Restore each "
        "rank's own checkpoint on that rank, with as many groups as before"
    )


def position_of(state: Mapping[str, Any], lanes: Iterable[int]) -> int:
    """Where a rank with these lanes continues."""
    held, position = state["lanes"], int(state["position"])
    return min((max(position, held[str(lane)].get("reached", 0)) for lane in lanes), default=position)


def require_lanes(state: Mapping[str, Any], needed: Iterable[int]) -> dict[int, LaneState]:
    """The lanes asked for, decoded; CheckpointError names those that no state holds."""
    missing = [lane for lane in needed if str(lane) not in state["lanes"]]
    if missing:
        raise CheckpointError(
            f"lanes {missing} are in none of the checkpoints given (they hold {', '.join(state['lanes'])}); "
            "pass the states of every rank, as a list"
        )
    return {lane: _decode_lane(lane, state["lanes"][str(lane)]) for lane in needed}


def _decode_lane(lane: int, data: Any) -> LaneState:
    try:
        decoded = LaneState.decode(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, zstandard.ZstdError) as error:
        raise CheckpointError(f"this checkpoint is damaged: lane {lane}: {type(error).__name__}: {error}") from None
    for key in ("chunk", "offset", "position", "taken", "reached"):
        if getattr(decoded, key) < 0:
            raise CheckpointError(f"this checkpoint is damaged: lane {lane}: its {key} is {getattr(decoded, key)}")
    if decoded.chunk not in decoded.sources:
        raise CheckpointError(
            f"this checkpoint is damaged: lane {lane}: the work source's state at chunk {decoded.chunk} is missing"
        )
    return decoded


def flatten(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys, so that differences can be listed."""
    flat: dict[str, Any] = {}
    for key, value in recipe.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, path + "."))
        else:
            flat[path] = list(value) if isinstance(value, tuple) else value
    return flat


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Every difference between two recipes, "key: old -> new"."""
    a, b = flatten(old), flatten(new)
    out = []
    for key in dict.fromkeys([*a, *b]):
        left, right = a.get(key, "absent"), b.get(key, "absent")
        if left != right:
            out.append(f"{key}: {left!r} -> {right!r}")
    return out

"""A checkpoint as flat entries, one per lane: the form that sharded checkpoint formats store and reshard as it is.

    {"headrace.run": bytes, "headrace.lane.0": bytes, "headrace.lane.4": bytes}

Every rank has the same `headrace.run` and the lanes it computes; ranks that compute the same lane have equal bytes for it, so it
does not matter whose copy is kept. A rank of another topology asks for the lanes it needs, by name. Since a store keeps only one
`headrace.run`, each lane repeats the position and a digest of the recipe: entries of different steps never join unnoticed. (Where
groups end apart, ranks of one step stand at different positions; those of the lanes count.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import xxhash

from headrace.core import checkpoint as ckpt
from headrace.errors import CheckpointError

RUN: Final = "headrace.run"
LANE: Final = "headrace.lane."


def to_entries(state: Mapping[str, Any]) -> dict[str, bytes]:
    """A checkpoint as entries."""
    run = {key: value for key, value in state.items() if key != "lanes"}
    mark, encode = _mark(run), msgspec.msgpack.encode
    lanes = {
        f"{LANE}{lane}": encode({"run": mark, **_place(run), "state": held}) for lane, held in state["lanes"].items()
    }
    return {RUN: encode(run), **lanes}


def from_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Back from `to_entries()`, or from entries of several ranks. CheckpointError where they do not belong together."""
    if RUN not in entries:
        raise CheckpointError(f"this is not the state of a headrace pipeline: it has no entry {RUN!r}")
    run = _decode(entries, RUN)
    mark, states = _mark(run), [{**run, "lanes": {}}]
    for name in sorted((name for name in entries if name.startswith(LANE)), key=lambda name: (len(name), name)):
        entry = _decode(entries, name)
        if not ckpt.of_one_step((run, entry)):
            raise CheckpointError(
                f"{name} was saved after {ckpt.delivered(entry)} batches and {RUN} after {ckpt.delivered(run)}: the ranks saved "
                "at different steps; save on every rank at the same step"
            )
        if entry["run"] != mark:
            raise CheckpointError(f"{name} and {RUN} were saved by runs of different recipes or numbers of lanes")
        lane = {name.removeprefix(LANE): entry["state"]}
        same = next((state for state in states if _place(state) == _place(entry)), None)
        if same is None:
            states.append({**{key: run[key] for key in run if key not in ckpt.PLACE}, **_place(entry), "lanes": lane})
        else:
            same["lanes"].update(lane)
    return ckpt.merge([ckpt.from_any(state) for state in states])


def is_entries(state: Any) -> bool:
    """Whether this is the flat form."""
    return isinstance(state, Mapping) and RUN in state


def _decode(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = entries[name]
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise CheckpointError(f"entry {name!r} should be bytes, found {type(value).__name__}")
    try:
        return msgspec.msgpack.decode(bytes(value))
    except msgspec.DecodeError as error:
        raise CheckpointError(f"entry {name!r} cannot be decoded: {error}") from None


def _mark(run: Mapping[str, Any]) -> bytes:
    """Digest of everything that all lanes of a run share."""
    shared = {key: value for key, value in run.items() if key not in ckpt.PLACE}
    return xxhash.xxh3_64_digest(msgspec.msgpack.encode(shared))


def _place(held: Mapping[str, Any]) -> dict[str, Any]:
    return {key: held[key] for key in ckpt.PLACE if key in held}

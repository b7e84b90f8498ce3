"""Which changes of a mixture a run may go on with, and which have no meaning that keeps the promise.

The promise: nothing that was delivered is repeated in its pass. Weights, added datasets and added shards keep it. Whatever decides
the order of rows within a dataset, or which lane has which samples, does not: a position in the old order would name other
rows in the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from headrace.errors import CheckpointError
from headrace.work.order import CurriculumDataset, DatasetOrder

_ORDER: Final = (
    "decides the order of rows within a dataset, so those that were delivered could not be told from the others"
)
_LANES: Final = "decides which lane has which samples, so a lane's position would name others"
_END: Final = "decides where the stream so far had ended, so positions would name other samples"
WHY_NOT: Final = {
    "curriculum": "the work source is of another kind, which cannot read these positions",
    "seed": _ORDER,
    "shuffle_shards": _ORDER,
    "shuffle_within_shard": _ORDER,
    "shuffle_block": _ORDER,
    "reshuffle_on_repeat": _ORDER,
    "chunk_size": _LANES,
    "lane_assignment": _LANES,
    "exhausted_policy": _END,
    "max_repeats": _END,
    "stop_after_passes": _END,
}
"""Settings of a curriculum that cannot change in a run, and why."""


def what_grew(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    datasets: Iterable[CurriculumDataset],
    orders: Mapping[str, DatasetOrder],
) -> dict[str, int]:
    """Datasets that have more shards than in the recipe `old`, and how many they had. CheckpointError where more has changed."""
    by_name = {dataset.name: dataset for dataset in datasets}
    both = [name for name in by_name if f"dataset/{name}" in old]
    grown = {name: _shards_before(by_name[name], old) for name in both if _differs(old, new, f"dataset/{name}")}
    refused = []
    for key in sorted(old.keys() | new.keys()):
        setting, _, name = key.partition("/")
        if setting not in WHY_NOT or not _differs(old, new, key) or (name and name not in both):
            continue
        if setting == "shuffle_block" and name in grown and orders[name].part(0, grown[name]).block == old[key]:
            continue  # "auto" and "global" follow the shards
        refused.append(f"{key}: {old.get(key)!r} -> {new.get(key)!r}: {setting} {WHY_NOT[setting]}")
    if refused:
        raise CheckpointError(
            "a run cannot go on with these differences, accepted or not; start a new run with them:\n  - "
            + "\n  - ".join(refused)
        )
    return grown


def _differs(old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> bool:
    return old.get(key) != new.get(key)


def _shards_before(dataset: CurriculumDataset, old: Mapping[str, Any]) -> int:
    """How many shards the dataset had, if it has all of them still, in front of the new ones."""
    before, beginning = old[f"dataset/{dataset.name}"], getattr(dataset, "fingerprint_of_first", None)
    if beginning is not None and isinstance(before, Mapping) and isinstance(before.get("shards"), int):
        shards = int(before["shards"])
        if beginning(shards) == before:
            return shards
    raise CheckpointError(
        f"dataset {dataset.name!r}: the shards of the checkpoint are not the first ones of the dataset any more, with the same "
        "names and numbers of rows, so rows that were delivered could not be told from the others. New shards must sort behind "
        "the old ones; or list the new files as a dataset of their own"
    )

"""A dataset that is only names and numbers, which is all the curriculum looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.work import MixtureLane, StaticMixtureWorkSource


class Numbers:
    """`counts[i]` rows in shard `ids[i]`."""

    def __init__(self, name: str, counts: Sequence[int], ids: Sequence[int] | None = None) -> None:
        self._name = name
        self._counts = np.array(counts, np.int64)
        self._ids = np.arange(len(counts)) if ids is None else np.array(ids, np.int64)

    @property
    def name(self) -> str:
        return self._name

    def ids(self) -> NDArray[np.int64]:
        return self._ids

    def counts(self) -> NDArray[np.int64]:
        return self._counts

    def fingerprint(self) -> Any:
        return {"ids": self._ids.tolist(), "counts": self._counts.tolist()}


def everything(lane: MixtureLane, most: int = 10_000) -> NDArray[np.int64]:
    """All samples of a lane, `[n, 4]`."""
    chunks = [np.empty((0, 4), np.int64)]
    while len(chunks) <= most and (samples := lane.draw()) is not None:
        chunks.append(samples.ids)
    return np.concatenate(chunks)


def stream(source: StaticMixtureWorkSource) -> NDArray[np.int64]:
    """The whole global stream."""
    return everything(source.lane(0, 1))


def by_name(source: StaticMixtureWorkSource, ids: NDArray[np.int64]) -> dict[str, list[tuple[int, int]]]:
    """(shard, row) of each dataset, in order."""
    return {
        name: [tuple(pair) for pair in ids[ids[:, 0] == number, 1:3].tolist()]
        for name, number in source.dataset_ids.items()
    }

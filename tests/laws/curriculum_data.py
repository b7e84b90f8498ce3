"""Datasets of numbers, and strategies for the curriculum's laws."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.work import LaneSource, MixtureLane, StaticMixtureWorkSource


class Numbers:
    """A dataset with `counts[i]` rows in shard `i`."""

    def __init__(self, name: str, counts: list[int]) -> None:
        self._name = name
        self._counts = np.array(counts, np.int64)

    @property
    def name(self) -> str:
        return self._name

    def ids(self) -> NDArray[np.int64]:
        return np.arange(len(self._counts))

    def counts(self) -> NDArray[np.int64]:
        return self._counts

    def fingerprint(self) -> Any:
        return self._counts.tolist()


def drawn(lane: LaneSource, most: int = 100_000) -> NDArray[np.int64]:
    """What is left in a lane, `[n, 4]`."""
    chunks = [np.empty((0, 4), np.int64)]
    for _ in range(most):
        samples = lane.draw()
        if samples is None:
            break
        chunks.append(samples.ids)
    return np.concatenate(chunks)


def whole(source: StaticMixtureWorkSource) -> NDArray[np.int64]:
    """The global stream of a source that ends."""
    return drawn(source.lane(0, 1))


def replayed(lane: MixtureLane, other: MixtureLane) -> MixtureLane:
    """`other`, continued from where `lane` is."""
    other.load(lane.state())
    return other


weights = st.one_of(
    st.floats(1e-9, 1.0),
    st.sampled_from([1e-9, 1e-6, 1e-3, 0.1, 0.2, 0.25, 0.3, 0.5, 1.0, 7.0]),
)
"""One positive weight, extreme ones included."""


def mixtures(most: int) -> st.SearchStrategy[dict[str, float]]:
    """Weights of 1 to `most` components."""
    return st.integers(1, most).flatmap(
        lambda k: st.lists(weights, min_size=k, max_size=k).map(lambda ws: {f"n{i:02}": w for i, w in enumerate(ws)})
    )


@st.composite
def curricula(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a small `StaticMixtureWorkSource` that ends."""
    k = draw(st.integers(1, 4))
    names = [f"n{i}" for i in range(k)]
    shards = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)
    datasets = [Numbers(name, draw(shards)) for name in names]
    mixture = {name: draw(st.sampled_from([0.1, 0.25, 0.3, 0.5, 1.0])) for name in names}
    ends = draw(
        st.sampled_from(
            [
                {},
                {"stop_after_passes": 2},
                {"exhausted_policy": "stop"},
                {"exhausted_policy": "redistribute"},
                {"max_repeats": 1},
                {"exhausted_policy": {names[0]: "stop"}},
                {"exhausted_policy": {names[0]: "redistribute"}, "max_repeats": {names[-1]: 2} if k > 1 else None},
            ]
        )
    )
    return {
        "datasets": datasets,
        "mixture": mixture,
        "chunk_size": draw(st.sampled_from([3, 8, 50, 16384])),
        "seed": draw(st.integers(0, 3)),
        "shuffle_shards": draw(st.booleans()),
        "shuffle_within_shard": draw(st.booleans()),
        "shuffle_block_size": draw(st.sampled_from([None, 1, 5, "auto", "global"])),
        "lane_assignment": draw(st.sampled_from(["permute", "modulo"])),
        **ends,
    }

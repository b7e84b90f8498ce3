"""Work sources: what a pipeline draws its curriculum from.

The engine sees a source through `lane(lane, lanes)`: an object that draws one chunk after another as columns, and whose state is
a small position. A source of one's own needs `next_chunk`, `state_dict`, `load_state_dict`, `datasets_by_id` and
`component_ids`; the base class makes lanes of it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from headrace.errors import CurriculumError
from headrace.work.chunk import Samples, WorkChunk


class LaneSource(Protocol):
    """One lane of a source."""

    def draw(self) -> Samples | None:
        """The lane's next chunk; None once the lane has ended."""
        ...

    def state(self) -> dict[str, Any]:
        """The position before the next draw: small, msgpack-able, a function of the recipe and the number of draws."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        ...


class WorkSource(ABC):
    """Hands out a curriculum, chunk by chunk, in lanes that are independent of each other."""

    _lane: tuple[int, int] | None = None

    @abstractmethod
    def next_chunk(self) -> WorkChunk | None:
        """The next chunk of this lane; None once it has ended."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This lane's progress, msgpack-able."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""

    @property
    @abstractmethod
    def datasets_by_id(self) -> Mapping[int, Any]:
        """Dataset of each id that sample ids use."""

    @abstractmethod
    def component_ids(self) -> Mapping[str, int]:
        """A unique id of at least 0 for each component."""

    def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> WorkSource:
        """An independent instance for one lane: a deep copy that knows its lane."""
        clone = copy.deepcopy(self)
        clone._lane = check_lane(lane_id, canonical_replicas)
        return clone

    def lane(self, lane: int, lanes: int) -> LaneSource:
        """One lane, as the engine draws it."""
        return _ChunkLane(self.clone_for_lane(lane, lanes))

    def recipe(self) -> dict[str, Any]:
        """What decides the stream, flat and msgpack-able, for the checkpoint's fingerprint."""
        return {
            "curriculum": type(self).__qualname__,
            **{f"component/{name}": number for name, number in sorted(self.component_ids().items())},
            **{
                f"dataset/{d.name}": d.fingerprint() for d in sorted(self.datasets_by_id.values(), key=lambda d: d.name)
            },
        }

    def first_untouched(self, state: Mapping[str, Any], offset: int, samples: int) -> int | None:
        """The first chunk of a lane that surely lies behind `samples` samples, which begin at `offset` of the chunk after `state`.

        None if changes need not hold for all lanes from one chunk on.
        """
        del state, offset, samples
        return None

    def taken_over(self, old: Mapping[str, Any], first_round: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """How lane states saved under the recipe `old`, a difference taken on purpose, are to be read by this source.

        No lane needs its chunks from number `first_round` on as they were. As they are, unless a subclass knows better: then
        `load_state_dict` decides alone.
        """
        del old, first_round
        return dict

    def chunk_size_hint(self) -> int | None:
        """Samples in a full chunk, if they are all alike."""
        return None

    def continues_after_exhaustion(self) -> frozenset[str]:
        """Components whose end does not end the stream."""
        return frozenset()

    @property
    def requires_token_priming(self) -> bool:
        """Whether `prime` must run before the first chunk."""
        return False

    def prime(self, **options: Any) -> None:
        """Prepare in the driver, before workers start. Nothing to do unless a subclass says so."""
        del options

    def supports_indexing(self) -> bool:
        """Whether `sample_id_at` works."""
        return False

    def sample_id_at(self, index: int) -> Any:
        """One sample pointer by its global index."""
        raise NotImplementedError(f"{type(self).__name__} cannot look up sample {index}; draw chunks instead")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(sorted(self.component_ids()))})"

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} has no known length")


class _ChunkLane:
    """A lane over `next_chunk()`: chunks become columns."""

    def __init__(self, source: WorkSource) -> None:
        self._source = source
        self._components = dict(source.component_ids())

    def draw(self) -> Samples | None:
        """The next chunk as columns."""
        chunk = self._source.next_chunk()
        if chunk is None:
            return None
        unknown = sorted(set(chunk.components) - set(self._components))
        if unknown:
            raise CurriculumError(
                f"{type(self._source).__name__} handed out samples of {unknown}, but component_ids() knows only "
                f"{sorted(self._components)}"
            )
        rows = [(*sample, self._components[name]) for sample, name in chunk]
        return Samples(np.array(rows, np.int64).reshape(len(rows), 4), frozenset(chunk.source_exhausted))

    def state(self) -> dict[str, Any]:
        """What the source says."""
        return self._source.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Hand the state to the source, which decides alone what it accepts."""
        self._source.load_state_dict(state)


def check_lane(lane: int, lanes: int) -> tuple[int, int]:
    """The pair itself, if it makes sense."""
    if not 0 <= lane < lanes:
        raise CurriculumError(f"lane {lane} of {lanes}: lanes are numbered from 0 to {max(lanes - 1, 0)}")
    return lane, lanes

"""Work chunks: the unit in which a curriculum is handed out.

`Samples` is a chunk as columns, which is what the engine reads. `WorkChunk` is the same with one Python object per sample, for
sources that users write and for looking at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.core import rng
from headrace.errors import CurriculumError
from headrace.work.interleave import Interleave

Ints = NDArray[np.int64]


class SampleId(NamedTuple):
    """A sample pointer: no payload, only where it is."""

    dataset: int
    shard: int
    row: int


@dataclass(frozen=True, slots=True)
class Samples:
    """A chunk as one matrix: int64 `[n, 4]` of dataset id, shard id, row in the shard, component id, in order.

    The columns are those of `Origin.ids[:, :4]`. `exhausted` names components that will not come again in this lane.
    """

    ids: Ints
    exhausted: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.ids)


class MixtureReadMode(StrEnum):
    """How the components of a chunk are interleaved."""

    WEIGHTED_ROUND_ROBIN = "weighted_round_robin"
    WEIGHTED_RANDOM = "weighted_random"


class ComponentOrder(StrEnum):
    """In which order the samples of one component are taken."""

    AS_IS = "as_is"
    SHUFFLE = "shuffle"


@dataclass(frozen=True, slots=True)
class MixtureReadConfig:
    """How a chunk is read. The default is the chunk's own order: a proportional interleave, components spread evenly."""

    mode: MixtureReadMode = MixtureReadMode.WEIGHTED_ROUND_ROBIN
    seed: int | None = None
    precompute: bool = False
    within_component: ComponentOrder = ComponentOrder.AS_IS

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", MixtureReadMode(self.mode))
        object.__setattr__(self, "within_component", ComponentOrder(self.within_component))


class WorkChunk:
    """Samples drawn to match a mixture: for each component its sample ids, and one order over all of them."""

    def __init__(
        self,
        components: Mapping[str, Sequence[tuple[int, int, int]]],
        seed: int | None = None,
        target_mixture: Mapping[str, float] | None = None,
        source_exhausted: Sequence[str] = (),
        sequence: Sequence[str] | None = None,
    ) -> None:
        """`sequence` names the component of each place; without it, components are interleaved in proportion."""
        self.components = {n: [SampleId(*map(int, s)) for s in samples] for n, samples in components.items()}
        self.seed = seed
        self.source_exhausted = tuple(sorted(source_exhausted))
        self._target = None if target_mixture is None else dict(target_mixture)
        self._sequence = None if sequence is None else list(sequence)
        if self._sequence is not None:
            counted = {name: self._sequence.count(name) for name in self.components}
            if counted != {n: len(s) for n, s in self.components.items()} or len(self._sequence) != len(self):
                raise CurriculumError(f"the sequence of a chunk names {counted}, but the chunk holds {self}")

    @property
    def mixture(self) -> dict[str, float]:
        """The mixture this chunk was drawn for, or else its own composition."""
        if self._target is not None:
            return dict(self._target)
        return {name: len(samples) / len(self) for name, samples in self.components.items()} if len(self) else {}

    def __len__(self) -> int:
        return sum(map(len, self.components.values()))

    def __iter__(self) -> Iterator[tuple[SampleId, str]]:
        return self.iter_samples()

    def __repr__(self) -> str:
        return f"WorkChunk({', '.join(f'{n}: {len(s)} samples' for n, s in self.components.items())})"

    def iter_samples(self, config: MixtureReadConfig | None = None) -> Iterator[tuple[SampleId, str]]:
        """Each sample with the name of its component, in order."""
        return iter(self.materialize_order(config))

    def sample_at(self, index: int, config: MixtureReadConfig | None = None) -> tuple[SampleId, str]:
        """One place of the order."""
        return self.materialize_order(config)[index]

    def materialize_order(self, config: MixtureReadConfig | None = None) -> list[tuple[SampleId, str]]:
        """The whole order as a list."""
        config = config or MixtureReadConfig()
        seed = config.seed if config.seed is not None else self.seed or 0
        taken = {name: iter(self._component(name, config, seed)) for name in self.components}
        return [(next(taken[name]), name) for name in self._places(config, seed)]

    def _component(self, name: str, config: MixtureReadConfig, seed: int) -> list[SampleId]:
        samples = self.components[name]
        if config.within_component is ComponentOrder.AS_IS:
            return samples
        return [samples[i] for i in rng.shuffled(rng.key(seed, "component", name), len(samples)).tolist()]

    def _places(self, config: MixtureReadConfig, seed: int) -> list[str]:
        """Component of each place."""
        held = {name: len(samples) for name, samples in self.components.items() if samples}
        if not held:
            return []
        if config.mode is MixtureReadMode.WEIGHTED_RANDOM:
            places = [name for name in sorted(held) for _ in range(held[name])]
            return [places[i] for i in rng.shuffled(rng.key(seed, "places"), len(places)).tolist()]
        if self._sequence is not None:
            return self._sequence
        interleave = Interleave.of(held)
        return [interleave.names[c] for c in interleave.order(0, sum(held.values())).tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "version": 1,
            "components": [[name, [list(sample) for sample in samples]] for name, samples in self.components.items()],
            "seed": self.seed,
            "target_mixture": self._target,
            "source_exhausted": list(self.source_exhausted),
            "sequence": self._sequence,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> WorkChunk:
        """The chunk whose `state_dict()` this is."""
        return cls(
            dict(state["components"]),
            state["seed"],
            state["target_mixture"],
            state["source_exhausted"],
            state["sequence"],
        )

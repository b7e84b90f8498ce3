"""The curriculum most runs want: datasets mixed in fixed proportions.

    source = StaticMixtureWorkSource(
        datasets=[code, web], mixture=MixtureSpec({"code": 0.25, "web": 0.75}), seed=42
    )

Everything it hands out is a function of its settings and of the position, so a lane's state is one number, any
chunk is found without the ones before it, and a dataset of 10^12 rows costs no more than one of ten.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.arguments import UNSET, Unset, flag, whole_number
from headrace.errors import CheckpointMismatch, ConfigError, CurriculumError
from headrace.work.changed import what_grew
from headrace.work.chunk import WorkChunk
from headrace.work.lane import Curriculum, LaneAssignment, MixtureLane
from headrace.work.mixture import MixtureSpec
from headrace.work.order import BlockSize, CurriculumDataset, DatasetOrder, OrderSettings, sorted_by_name
from headrace.work.repeat import Policy, Repetition, resolve_repetition
from headrace.work.source import WorkSource, check_lane
from headrace.work.timeline import Era

PerDataset = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ComponentStatistics:
    """One dataset at a position: the share asked for and reached (in samples), and how often it was gone through."""

    name: str
    weight: float
    samples: int
    share: float
    rows: int
    passes: float


@dataclass(frozen=True, slots=True)
class MixtureStatistics:
    """The mixture reached after `samples` samples of the global stream."""

    samples: int
    components: tuple[ComponentStatistics, ...]


class StaticMixtureWorkSource(WorkSource):
    """Datasets mixed by fixed weights, which count samples.

    Args:
        datasets: one per weight; the order of listing does not matter.
        mixture: weights by dataset name.
        chunk_size: samples in a chunk. Does not change the global sequence, only how it is dealt to lanes.
        seed: decides every shuffle. Each dataset and each pass has its own randomness, from (seed, name, pass).
        shuffle_shards: shards in random order, else by id.
        shuffle_within_shard: rows of a shard in random order, else as stored.
        shuffle_block_size: also shuffle across shards within blocks of this many samples; `"auto"` is eight times the
            largest shard, `"global"` the whole dataset (no memory is needed for it).
        exhausted_policy: `"stop"`, `"repeat"` or `"redistribute"`, for all or by dataset name; see `repeat.py`.
        reshuffle_on_repeat: another order in each pass (the default), for all or by name.
        max_repeats: extra passes under `"repeat"`, for all or by name; None is no limit.
        stop_after_passes: every dataset repeats, and the stream ends when each has been through this many passes.
            Defaults to 1 when neither a policy nor `max_repeats` is given.
        lane_assignment: `"permute"` deals each round of chunks to the lanes in a random order, `"modulo"` in turn.
        token_estimation: must be None; weights count samples, and ensure_mixture() behind tokenize makes tokens follow them.

    Raises:
        CurriculumError: weights or datasets that cannot be dealt.
        ConfigError: a setting, or a combination of them, that cannot work.
    """

    def __init__(
        self,
        datasets: Sequence[CurriculumDataset],
        mixture: MixtureSpec | Mapping[str, float],
        chunk_size: int = 16384,
        seed: int = 0,
        shuffle_shards: bool = True,
        shuffle_within_shard: bool = False,
        shuffle_block_size: BlockSize = None,
        exhausted_policy: Policy | Mapping[str, Policy] | None = None,
        reshuffle_on_repeat: bool | Mapping[str, bool] | Unset = UNSET,
        max_repeats: int | Mapping[str, int | None] | None = None,
        stop_after_passes: int | Unset | None = UNSET,
        lane_assignment: LaneAssignment = "permute",
        token_estimation: None = None,
    ) -> None:
        if token_estimation is not None:
            raise ConfigError(
                f"token_estimation={token_estimation!r}: weights count samples, nothing is estimated; leave it out, and put "
                "ensure_mixture() behind tokenize() where tokens are to follow the weights"
            )
        chunk_size, seed = whole_number("chunk_size", chunk_size, 1), whole_number("seed", seed)
        if lane_assignment not in ("permute", "modulo"):
            raise ConfigError(f"lane_assignment must be 'permute' or 'modulo', found {lane_assignment!r}")
        shuffle_shards = flag("shuffle_shards", shuffle_shards)
        shuffle_within_shard = flag("shuffle_within_shard", shuffle_within_shard)
        self._mixture = MixtureSpec.of(mixture)
        self._datasets = sorted_by_name(datasets)
        names = [d.name for d in self._datasets]
        if not names:
            raise CurriculumError("a curriculum needs at least one dataset, found none")
        self._mixture.validate_for(names)
        repetition = resolve_repetition(names, exhausted_policy, max_repeats, reshuffle_on_repeat, stop_after_passes)
        self._order_settings = OrderSettings(seed, shuffle_shards, shuffle_within_shard, shuffle_block_size)
        self._curriculum = Curriculum(
            weights={name: self._mixture.weights[name] for name in names},
            orders=_orders(self._datasets, self._mixture, self._order_settings, repetition),
            numbers={name: number for number, name in enumerate(names)},
            repetition=repetition,
            chunk_size=chunk_size,
            seed=seed,
            lane_assignment=lane_assignment,
        )
        self._timeline = self._curriculum.timeline([Era(0, self._curriculum.weights)])
        self._drawn: MixtureLane | None = None

    # Lanes -----------------------------------------------------------------------------------------

    def lane(self, lane: int, lanes: int) -> MixtureLane:
        """One lane, as the engine draws it."""
        return MixtureLane(self._curriculum, *check_lane(lane, lanes))

    def clone_for_lane(self, lane_id: int, canonical_replicas: int) -> StaticMixtureWorkSource:
        """The same curriculum as one lane; datasets are shared, progress is not."""
        clone = copy.copy(self)
        clone._timeline = self._curriculum.timeline([Era(0, self._curriculum.weights)])
        clone._lane = check_lane(lane_id, canonical_replicas)
        clone._drawn = None
        return clone

    def _own_lane(self) -> MixtureLane:
        """The lane that `next_chunk` draws; without an assigned one, the only lane of one."""
        if self._drawn is None:
            self._drawn = self.lane(*(self._lane or (0, 1)))
        return self._drawn

    def next_chunk(self) -> WorkChunk | None:
        """The next chunk with one object per sample. `lane()` gives the same as columns."""
        samples = self._own_lane().draw()
        if samples is None:
            return None
        names = [d.name for d in self._datasets]
        sequence = [names[c] for c in samples.ids[:, 3].tolist()]
        components: dict[str, list[tuple[int, int, int]]] = {}
        for name, (dataset, shard, row) in zip(sequence, samples.ids[:, :3].tolist(), strict=True):
            components.setdefault(name, []).append((dataset, shard, row))
        return WorkChunk(
            components, self._curriculum.seed, self._mixture.normalized_for(names), sorted(samples.exhausted), sequence
        )

    def state_dict(self) -> dict[str, Any]:
        """The recipe and the position."""
        return {"version": 1, "recipe": self.recipe(), "lane": self._own_lane().state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. Another recipe raises `CheckpointMismatch`, which lists every difference."""
        old, new = dict(state["recipe"]), self.recipe()
        changed = [n for n in sorted(set(old) | set(new)) if old.get(n) != new.get(n)]
        if changed:
            raise CheckpointMismatch([f"{n}: {old.get(n)!r} -> {new.get(n)!r}" for n in changed])
        if self._lane is None:
            self._lane = check_lane(int(state["lane"]["lane"]), int(state["lane"]["lanes"]))
        lane = self.lane(*self._lane)
        lane.load(state["lane"])
        self._drawn = lane

    # What it is ------------------------------------------------------------------------------------

    @property
    def mixture(self) -> MixtureSpec:
        """The weights."""
        return self._mixture

    @property
    def datasets_by_id(self) -> dict[int, CurriculumDataset]:
        """Datasets by id; ids follow the order of names."""
        return dict(enumerate(self._datasets))

    @property
    def dataset_ids(self) -> dict[str, int]:
        """Id of each dataset by name."""
        return dict(self._curriculum.numbers)

    def component_ids(self) -> dict[str, int]:
        """Components are the datasets, under the same ids."""
        return dict(self._curriculum.numbers)

    def chunk_size_hint(self) -> int:
        """Samples in a full chunk."""
        return self._curriculum.chunk_size

    def continues_after_exhaustion(self) -> frozenset[str]:
        """Datasets that leave without ending the stream."""
        repetition = self._curriculum.repetition
        return frozenset(name for name in self._curriculum.numbers if not repetition.ends_stream(name))

    @property
    def total_samples(self) -> int | float:
        """Samples of all lanes together, exactly; `inf` for a stream without end."""
        total = self._timeline.total()
        return math.inf if total is None else total

    def first_untouched(self, state: Mapping[str, Any], offset: int, samples: int) -> int:
        """The first chunk, and so round, of a lane that surely lies behind these samples."""
        size, chunk = self._curriculum.chunk_size, int(state["draws"])
        later = [
            int(first) for first, *_ in state["eras"] if samples and int(first) > chunk
        ]  # one may follow a short chunk
        return max(chunk - -(offset + samples) // size, *(first - -samples // size for first in later), 0)

    def taken_over(self, old: Mapping[str, Any], first_round: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """States of a source with the recipe `old`, for this one, which holds from round `first_round` of every lane on.

        Datasets are known by name. Each goes on from the row it had reached. One that has more shards now goes on with those it
        had to the end of its pass, then with the new ones, and mixes all from its next pass on. CheckpointError says which
        differences have no such meaning.
        """
        grown = what_grew(old, self.recipe(), self.datasets_by_id.values(), self._curriculum.orders)

        def follow(state: Mapping[str, Any]) -> dict[str, Any]:
            return self.lane(int(state["lane"]), int(state["lanes"])).continued(state, first_round, grown)

        return follow

    def samples_of_lane(self, lane: int, lanes: int) -> int:
        """Samples of one lane, exactly; TypeError for a stream without end."""
        return self._curriculum.lane_samples(len(self), lane, lanes)

    def __len__(self) -> int:
        total = self._timeline.total()
        if total is None:
            raise TypeError("this curriculum never ends, so it has no length (see exhausted_policy, stop_after_passes)")
        return total

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        total = self._timeline.total()
        shares = self._mixture.normalized_for(self._curriculum.numbers)
        mixed = ", ".join(f"{name} {share:.4g}" for name, share in shares.items())
        return f"StaticMixtureWorkSource({mixed}; {'endless' if total is None else f'{total} samples'})"

    def statistics(self, samples: int | None = None) -> MixtureStatistics:
        """The mixture and the passes after `samples` samples of the global stream; by default at its end."""
        if samples is None:
            samples = len(self)
        counts = self._timeline.counts(samples)
        total = sum(counts.values())
        shares = self._mixture.normalized_for(counts)
        sizes = self._curriculum.sizes
        return MixtureStatistics(
            total,
            tuple(
                ComponentStatistics(
                    n, shares[n], c, c / total if total else 0.0, sizes[n], c / sizes[n] if sizes[n] else 0.0
                )
                for n, c in counts.items()
            ),
        )

    def recipe(self) -> dict[str, Any]:
        """Everything that decides the stream, one key per setting, so that two recipes can be compared by key."""
        curriculum, settings = self._curriculum, self._order_settings
        recipe: dict[str, Any] = {
            "curriculum": "static_mixture/1",
            "chunk_size": curriculum.chunk_size,
            "seed": curriculum.seed,
            "shuffle_shards": settings.shuffle_shards,
            "shuffle_within_shard": settings.shuffle_within_shard,
            "lane_assignment": curriculum.lane_assignment,
            "stop_after_passes": curriculum.repetition.stop_after_passes,
        }
        for dataset in self._datasets:
            name = dataset.name
            recipe[f"weight/{name}"] = curriculum.weights[name]
            recipe[f"exhausted_policy/{name}"] = curriculum.repetition.policy[name]
            recipe[f"max_repeats/{name}"] = curriculum.repetition.max_repeats[name]
            recipe[f"reshuffle_on_repeat/{name}"] = curriculum.repetition.reshuffle[name]
            recipe[f"shuffle_block/{name}"] = curriculum.orders[name].block
            recipe[f"rows/{name}"] = curriculum.orders[name].size
            recipe[f"dataset/{name}"] = dataset.fingerprint()
        return recipe


def _orders(
    datasets: Sequence[CurriculumDataset], mixture: MixtureSpec, settings: OrderSettings, repetition: Repetition
) -> dict[str, DatasetOrder]:
    """The order of each dataset; an empty one is an error unless its weight is zero."""
    orders: dict[str, DatasetOrder] = {}
    for dataset in datasets:
        own = OrderSettings(
            settings.seed,
            settings.shuffle_shards,
            settings.shuffle_within_shard,
            settings.shuffle_block_size,
            repetition.reshuffle[dataset.name],
        )
        order = orders[dataset.name] = DatasetOrder(dataset, own)
        if not order.size and mixture.weights[dataset.name] > 0:
            raise CurriculumError(
                f"dataset {dataset.name!r} has no rows ({len(dataset.ids())} shards) but weight "
                f"{mixture.weights[dataset.name]}; check its path, or give it weight 0"
            )
    return orders

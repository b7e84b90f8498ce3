"""The order of one dataset: which row its sample number `i` is, over all passes.

    pass      p = i // size, position in the pass = i % size
    shards    in the order of random bits of (seed, dataset, pass, shard id), or by id
    blocks    positions within each block of `shuffle_block_size` are permuted across shards
    rows      as stored, or permuted within their shard

Each step is a function of the position, so a range of samples anywhere costs the same, and no list of ids exists. Randomness
comes from (seed, dataset name, pass): other datasets, their names and the order of listing play no part. Shards are known by
id, so an empty shard changes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headrace.arguments import shown, whole_number
from headrace.core import rng
from headrace.errors import ConfigError, CurriculumError

Ints = NDArray[np.int64]
BlockSize = int | Literal["auto", "global"] | None

_AUTO_SHARDS: Final = 8


@runtime_checkable
class CurriculumDataset(Protocol):
    """What the curriculum needs to know of a dataset."""

    @property
    def name(self) -> str:
        """Its name in the mixture."""
        ...

    def ids(self) -> Ints:
        """Shard ids, int64 `[num_shards]`."""
        ...

    def counts(self) -> Ints:
        """Rows of each shard, int64 `[num_shards]`."""
        ...

    def fingerprint(self) -> Any:
        """What identifies its content (msgpack-able)."""
        ...


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """How a dataset is ordered."""

    seed: int = 0
    shuffle_shards: bool = True
    shuffle_within_shard: bool = False
    shuffle_block_size: BlockSize = None
    reshuffle_on_repeat: bool = True


class Order(Protocol):
    """Samples of one dataset in curriculum order, over all passes."""

    @property
    def size(self) -> int:
        """Rows of a whole pass."""
        ...

    def start(self, passes: int) -> int:
        """Samples in the first `passes` passes."""
        ...

    def rows(self, first: int, number: int) -> tuple[Ints, Ints]:
        """Shard id and row of samples `first .. first + number`, int64 `[number]` each."""
        ...


@dataclass(frozen=True, slots=True)
class _Shards:
    """Some shards of a dataset."""

    name: str
    id_list: Ints
    count_list: Ints

    def ids(self) -> Ints:
        return self.id_list

    def counts(self) -> Ints:
        return self.count_list

    def fingerprint(self) -> Any:
        return self.name


class DatasetOrder:
    """Rows of one dataset in curriculum order."""

    def __init__(self, dataset: CurriculumDataset, settings: OrderSettings) -> None:
        ids, counts = np.asarray(dataset.ids(), np.int64), np.asarray(dataset.counts(), np.int64)
        if len(ids) != len(counts) or np.any(counts < 0):
            raise CurriculumError(f"dataset {dataset.name!r}: {len(ids)} shard ids, counts {counts.tolist()[:8]} ...")
        kept = np.flatnonzero(counts)
        kept = kept[np.argsort(ids[kept], kind="stable")]
        self.name = dataset.name
        self.size = int(counts.sum())
        self.block = resolve_block(settings.shuffle_block_size, counts)
        self._shards = _Shards(dataset.name, ids, counts)
        self._ids, self._counts = ids[kept], counts[kept]
        self._settings = settings
        self._shard_key = rng.key(settings.seed, "shards", dataset.name)
        self._block_key = rng.key(settings.seed, "blocks", dataset.name)
        self._row_key = rng.key(settings.seed, "rows", dataset.name)
        self._loaded: tuple[tuple[int, int], Ints, Ints] | None = None

    def start(self, passes: int) -> int:
        """Samples in the first `passes` passes."""
        return passes * self.size

    def part(self, begin: int, end: int | None) -> DatasetOrder:
        """The order of shards number `begin` to `end` alone."""
        ids, counts = self._shards.id_list[begin:end], self._shards.count_list[begin:end]
        return DatasetOrder(_Shards(self.name, ids, counts), self._settings)

    def rows(self, first: int, number: int) -> tuple[Ints, Ints]:
        """Shard id and row of samples `first .. first + number`, int64 `[number]` each."""
        begin, end = first // self.size, -(-(first + number) // self.size)
        order, starts = self._load(begin, end)
        base = first - begin * self.size
        if self.block is None:
            shard, row = _straight(starts, base, number)
        else:
            at = np.arange(base, base + number)
            passes = at // self.size
            at = self._within_blocks(at - passes * self.size, passes + begin) + passes * self.size
            shard = np.searchsorted(starts, at, side="right") - 1
            row = at - starts[shard]
        which = order[shard]
        ids = self._ids[which]
        if self._settings.shuffle_within_shard:
            passes = self._pass(begin + shard // len(self._ids))
            row = rng.permute(rng.bits(rng.bits(self._row_key, passes), ids), self._counts[which], row)
        return ids, row

    def _within_blocks(self, position: Ints, passes: Ints) -> Ints:
        """Positions permuted within their block."""
        assert self.block is not None
        if self.block >= self.size:
            if len(passes) and passes[0] == passes[-1]:
                one = rng.bits(rng.bits(self._block_key, self._pass(passes[:1])), 0)
                return rng.permute(one, self.size, position)
            return rng.permute(rng.bits(rng.bits(self._block_key, self._pass(passes)), 0), self.size, position)
        number = position // self.block
        start = number * self.block
        sizes = np.minimum(self.block, self.size - start)
        keys = rng.bits(rng.bits(self._block_key, self._pass(passes)), number)
        return start + rng.permute(keys, sizes, position - start)

    def _pass(self, passes: Ints) -> Ints:
        """The pass that randomness is drawn for."""
        return passes if self._settings.reshuffle_on_repeat else np.zeros_like(passes)

    def _load(self, begin: int, end: int) -> tuple[Ints, Ints]:
        """Shard order and start of each shard for passes `begin .. end`, flat, starts counted from pass `begin`.

        The last answer is kept. Lanes on other threads may replace it at any time; each uses the one it was given.
        """
        loaded = self._loaded
        if loaded is not None and loaded[0] == (begin, end):
            return loaded[1:]
        shards = len(self._ids)
        passes = np.arange(begin, end)
        if self._settings.shuffle_shards:
            keys = rng.bits(self._shard_key, self._pass(passes))
            order = np.argsort(rng.bits(keys[:, None], self._ids[None, :]), axis=1, kind="stable")
        else:
            order = np.broadcast_to(np.arange(shards), (len(passes), shards))
        counts = self._counts[order]
        starts = np.cumsum(counts, axis=1) - counts + (np.arange(len(passes)) * self.size)[:, None]
        self._loaded = (begin, end), order.reshape(-1), starts.reshape(-1)
        return self._loaded[1:]


class GrownOrder:
    """A dataset that got more shards in pass `at`: that pass goes on with the new shards, later ones mix all of them.

    What lay before is as it was, so nothing is repeated in a pass or left out of it.
    """

    def __init__(self, before: Order, added: Order, whole: Order, at: int) -> None:
        self._before, self._added, self._whole, self._at = before, added, whole, at
        self.size = whole.size

    def start(self, passes: int) -> int:
        """Samples in the first `passes` passes."""
        if passes <= self._at:
            return self._before.start(passes)
        return self._before.start(self._at + 1) + self._added.size + (passes - self._at - 1) * self.size

    def rows(self, first: int, number: int) -> tuple[Ints, Ints]:
        """Shard id and row of samples `first .. first + number`, int64 `[number]` each."""
        grew, full = self._before.start(self._at + 1), self.start(self._at + 1)
        parts = (
            (self._before, 0, grew, 0),
            (self._added, grew, full, self._added.start(self._at)),
            (self._whole, full, first + number, self._whole.start(self._at + 1)),
        )
        found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for order, begin, end, origin in parts:
            a, b = max(first, begin), min(first + number, end)
            if a < b:
                found.append(order.rows(a - begin + origin, b - a))
        shards, rows = zip(*found, strict=True)
        return np.concatenate(shards), np.concatenate(rows)


def pass_of(order: Order, sample: int) -> int:
    """The pass that sample number `sample` belongs to; `order` has rows."""
    return bisect_right(range(1 << 60), sample, key=order.start) - 1


def _straight(starts: Ints, base: int, number: int) -> tuple[Ints, Ints]:
    """Index into the loaded shards, and row, of consecutive positions."""
    low = int(np.searchsorted(starts, base, side="right")) - 1
    high = int(np.searchsorted(starts, base + number - 1, side="right"))
    first = starts[low:high]
    edges = np.append(first, base + number)
    edges[0] = base
    lengths = np.diff(edges)
    shard = np.repeat(np.arange(low, high), lengths)
    return shard, np.arange(base, base + number) - np.repeat(first, lengths)


def resolve_block(block: BlockSize, counts: Ints) -> int | None:
    """Block size in samples: `"auto"` is eight times the largest shard, `"global"` the whole dataset; never above its size."""
    size = int(counts.sum())
    match block:
        case None:
            return None
        case "global":
            return max(size, 1)
        case "auto":
            return max(1, min(size, _AUTO_SHARDS * int(counts.max(initial=0))))
        case str():
            raise ConfigError(f"shuffle_block_size must be None, a positive int, 'auto' or 'global', found {block!r}")
        case _:
            return max(1, min(size, whole_number("shuffle_block_size (or None, 'auto', 'global')", block, 1)))


def sorted_by_name(datasets: Any) -> list[CurriculumDataset]:
    """Datasets in the order of their names, so that the order of listing never matters. Anything else is a CurriculumError."""
    if isinstance(datasets, (str, bytes, Mapping, CurriculumDataset)) or not isinstance(datasets, Iterable):
        raise CurriculumError(f"datasets= takes a list of datasets, found {shown(datasets)}; write [dataset]")
    datasets = list(datasets)
    for dataset in datasets:
        if not isinstance(dataset, CurriculumDataset):
            raise CurriculumError(
                f"datasets= holds {shown(dataset)}, which is no dataset; make one with Dataset.from_path(name, path)"
            )
    ordered = sorted(datasets, key=lambda d: d.name)
    for one, other in zip(ordered, ordered[1:], strict=False):
        if one.name == other.name:
            raise CurriculumError(f"two datasets are named {one.name!r}; each needs a name of its own")
    return ordered

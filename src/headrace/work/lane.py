"""One lane of a static mixture: which chunks are its own, and the samples in them.

Chunk `g` of the global stream holds its samples `g * chunk_size` up to the next. In each round of `lanes` chunks every lane gets
one, by a seeded permutation of the round (`"permute"`) or in turn (`"modulo"`). A lane never looks at other lanes' chunks:
all it needs is a function of the position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from headrace.core import rng
from headrace.errors import CheckpointError, CheckpointMismatch
from headrace.work.chunk import Ints, Samples
from headrace.work.order import DatasetOrder, GrownOrder, Order, pass_of
from headrace.work.repeat import Repetition
from headrace.work.timeline import Era, Segment, Timeline

LaneAssignment = Literal["permute", "modulo"]


@dataclass(frozen=True)
class Curriculum:
    """Everything that decides the global stream."""

    weights: Mapping[str, float]
    orders: Mapping[str, DatasetOrder]
    numbers: Mapping[str, int]
    repetition: Repetition
    chunk_size: int
    seed: int
    lane_assignment: LaneAssignment
    grown: Mapping[str, Order] = field(default_factory=dict)
    """Datasets that had fewer shards earlier in this run, in place of `orders`."""

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Rows of each dataset."""
        return {name: order.size for name, order in self.orders.items()}

    def order(self, name: str, eras: Sequence[Weighting], upto: int) -> Order:
        """A dataset as it was in era number `upto` of these: what they say of its growth, up to there."""
        whole = self.orders[name]
        ends = [(number, *era.grown[name]) for number, era in enumerate(eras) if name in era.grown]
        shards = [*(before for _, _, before in ends), None]
        order: Order = whole if not ends else whole.part(0, shards[0])
        for (number, at, before), after in zip(ends, shards[1:], strict=True):
            if number <= upto:
                order = GrownOrder(order, whole.part(before, after), whole.part(0, after), at)
        return order

    def eras(self, eras: Sequence[Weighting], per_round: int) -> list[Era]:
        """The eras of a timeline."""
        grown = sorted({name for era in eras for name in era.grown})
        return [
            Era(era.first * per_round, era.weights, {name: self.order(name, eras, number).start for name in grown})
            for number, era in enumerate(eras)
        ]

    def timeline(self, eras: list[Era]) -> Timeline:
        """The stream under these weights in turn. Not shared between lanes, which may run on different threads."""
        return Timeline(eras, self.sizes, self.repetition)

    def chunk_number(self, draw: int, lane: int, lanes: int) -> int:
        """Global number of a lane's chunk."""
        if lanes == 1 or self.lane_assignment == "modulo":
            return draw * lanes + lane
        dealt = rng.shuffled(int(rng.bits(rng.key(self.seed, "lanes"), draw)), lanes)
        return draw * lanes + int(dealt[lane])

    def lane_samples(self, total: int, lane: int, lanes: int) -> int:
        """Samples of one lane in a stream of `total`, from the chunks of its last round; no chunk is made."""
        chunks = -(-total // self.chunk_size)
        rounds, extra = divmod(chunks, lanes)
        count = rounds * self.chunk_size
        last = chunks - 1
        if extra and self.chunk_number(rounds, lane, lanes) < chunks:
            count += self.chunk_size
            holds_last = self.chunk_number(rounds, lane, lanes) == last
        else:
            holds_last = not extra and rounds > 0 and self.chunk_number(rounds - 1, lane, lanes) == last
        return count - (chunks * self.chunk_size - total) if holds_last else count

    def samples(self, timeline: Timeline, start: int) -> Samples:
        """One chunk of the stream; short at its end, empty past it."""
        pieces = timeline.pieces(start, start + self.chunk_size)
        parts = [self._piece(segment, first, last) for segment, first, last in pieces]
        ids = parts[0] if len(parts) == 1 else np.concatenate([np.empty((0, 4), np.int64), *parts])
        left = timeline.left(start + len(ids)) if len(ids) else frozenset[str]()
        return Samples(ids, left)

    def _piece(self, segment: Segment, first: int, last: int) -> Ints:
        """Samples `first <= n < last` of one segment, int64 `[last - first, 4]`."""
        names = segment.interleave.names
        order = segment.interleave.order(first - segment.start, last - segment.start)
        before = segment.counts(first)
        grouped = np.empty((last - first, 4), np.int64)
        end = 0
        for name, number in zip(names, np.bincount(order, minlength=len(names)).tolist(), strict=True):
            if number:
                begin, end = end, end + number
                rows = grouped[begin:end]
                rows[:, 0] = rows[:, 3] = self.numbers[name]
                rows[:, 1], rows[:, 2] = self.grown.get(name, self.orders[name]).rows(before[name], number)
        if len(names) == 1:
            return grouped
        out = np.empty_like(grouped)
        out[np.argsort(order.astype(np.uint8 if len(names) <= 256 else np.uint16), kind="stable")] = grouped
        return out


@dataclass(frozen=True, slots=True)
class Weighting:
    """Weights in force from round `first` on.

    `grown` names datasets that have more shards from here on: the pass they were in, and how many shards they had.
    """

    first: int
    weights: Mapping[str, float]
    grown: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def encode(self) -> list[Any]:
        """As a msgpack-able list."""
        grown = {name: list(entry) for name, entry in sorted(self.grown.items())}
        return [self.first, dict(sorted(self.weights.items())), *([grown] if grown else [])]

    @classmethod
    def decode(cls, data: Sequence[Any]) -> Weighting:
        """Back from `encode()`."""
        first, weights, *grown = data
        entries = {str(n): (int(at), int(before)) for g in grown for n, (at, before) in g.items()}
        return cls(int(first), {str(n): float(w) for n, w in weights.items()}, entries)


class MixtureLane:
    """`LaneSource` of a `StaticMixtureWorkSource`. Its state is the number of draws, and the weights in force since when.

    A state that was taken under other weights is first made one of these, by `continued`.
    """

    def __init__(self, curriculum: Curriculum, lane: int, lanes: int) -> None:
        self._curriculum = curriculum
        self._lane, self._lanes = lane, lanes
        self._draws = 0
        self._drawn_from = curriculum
        self._set_eras([Weighting(0, dict(curriculum.weights))])

    def _set_eras(self, eras: list[Weighting]) -> None:
        curriculum = self._curriculum
        self._eras = eras
        spans = curriculum.eras(eras, self._per_round)
        self._timeline = curriculum.timeline(spans)
        totals = [(era, curriculum.timeline(spans[:number]).total()) for number, era in enumerate(eras) if number]
        self._restarts = [
            era.first for era, total in totals if total is not None and total <= era.first * self._per_round
        ]
        if any(era.grown for era in eras):
            names = {name for era in eras for name in era.grown}
            grown = {name: curriculum.order(name, eras, len(eras)) for name in sorted(names)}
            self._drawn_from = replace(curriculum, grown=grown)

    @property
    def _per_round(self) -> int:
        return self._lanes * self._curriculum.chunk_size

    @property
    def position(self) -> int:
        """Samples of the global stream in the rounds that this lane has drawn from."""
        return self._draws * self._lanes * self._curriculum.chunk_size

    def draw(self) -> Samples | None:
        """The next chunk of this lane; None once the lane has ended, again and again (see `go_on`)."""
        if self._draws in self._restarts:
            return None
        number = self._curriculum.chunk_number(self._draws, self._lane, self._lanes)
        samples = self._drawn_from.samples(self._timeline, number * self._curriculum.chunk_size)
        if not len(samples):
            return None
        self._draws += 1
        return samples

    def go_on(self) -> int | None:
        """After the end: move to the chunk from which on a curriculum holds that was changed after it. None if there is none."""
        later = [first for first in self._restarts if first >= self._draws]
        if not later:
            return None
        self._draws = later[0]
        self._restarts.remove(self._draws)
        return self._draws

    def counts(self) -> dict[str, int]:
        """Samples of each dataset, over all lanes, in the rounds that this lane has drawn from."""
        return self._timeline.counts(self.position)

    def state(self) -> dict[str, Any]:
        """The position before the next draw: a few numbers."""
        return {
            "lane": self._lane,
            "lanes": self._lanes,
            "draws": self._draws,
            "eras": [era.encode() for era in self._eras],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. `CheckpointMismatch` lists what differs."""
        where = (state["lane"], state["lanes"])
        if where != (self._lane, self._lanes):
            raise CheckpointMismatch([f"lane {where[0]} of {where[1]} is now lane {self._lane} of {self._lanes}"])
        eras = [Weighting.decode(era) for era in state["eras"]]
        if eras[-1].weights != self._curriculum.weights:
            raise CheckpointMismatch(weight_changes(eras[-1].weights, self._curriculum.weights))
        self._draws = int(state["draws"])
        self._set_eras(eras)

    def continued(self, state: Mapping[str, Any], first: int, grown: Mapping[str, int]) -> dict[str, Any]:
        """The state for the weights as they are now from round `first` on, and for datasets that had fewer shards before.

        Rounds before stay what they were. From there on each dataset goes on from the row that it had reached, so nothing is
        repeated and nothing skipped. All lanes must be given the same round, one that none has drawn from; a state of a later
        round keeps its place. `grown`: how many shards.
        """
        eras = [Weighting.decode(era) for era in state["eras"]]
        if grown or eras[-1].weights != self._curriculum.weights:
            eras = self._changed(eras, first, grown)
        return {**state, "eras": [era.encode() for era in eras]}

    def _changed(self, eras: list[Weighting], first: int, grown: Mapping[str, int]) -> list[Weighting]:
        """The weights in force, then the new ones from round `first` on."""
        weights = dict(self._curriculum.weights)
        more = dict(grown)
        for era in reversed([era for era in eras if era.first >= first]):  # never drawn from: as if it had not been
            more.update({name: before for name, (_, before) in era.grown.items()})
        eras = [era for era in eras if era.first < first]
        known = set(self._curriculum.orders)
        gone = sorted({name for era in eras for name, w in era.weights.items() if w > 0} - known)
        if gone:
            raise CheckpointError(
                f"the checkpoint has drawn from {', '.join(map(repr, gone))}, which the curriculum no longer lists; "
                "keep the dataset and give it weight 0"
            )
        if not eras:
            return [Weighting(first, weights)]
        asked = [*eras, Weighting(first, weights, {name: (0, before) for name, before in more.items()})]
        counts = self._curriculum.timeline(self._curriculum.eras(asked, self._per_round)[:-1]).counts(
            first * self._per_round
        )
        passes = {
            name: pass_of(self._curriculum.order(name, asked, len(eras) - 1), max(0, counts[name] - 1)) for name in more
        }
        return [*eras, Weighting(first, weights, {name: (passes[name], before) for name, before in more.items()})]


def weight_changes(old: Mapping[str, float], new: Mapping[str, float]) -> list[str]:
    """A line for each weight that differs."""
    names = sorted(set(old) | set(new))
    return [f"weight/{n}: {old.get(n)} -> {new.get(n)}" for n in names if old.get(n) != new.get(n)]

"""One lane of a static mixture: which chunks are its own, and the samples in them.

Chunk `g` of the global stream holds its samples `g * chunk_size` up to the next. In each round of `lanes` chunks every lane gets
one, by a seeded permutation of the round (`"permute"`) or in turn (`"modulo"`). A lane never looks at other lanes' chunks:
all it needs is a function of the position.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from headrace.core import rng
from headrace.errors import CheckpointError, CheckpointMismatch
from headrace.work.chunk import Ints, Samples
from headrace.work.order import DatasetOrder
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

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Rows of each dataset."""
        return {name: order.size for name, order in self.orders.items()}

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
                rows[:, 1], rows[:, 2] = self.orders[name].rows(before[name], number)
        if len(names) == 1:
            return grouped
        out = np.empty_like(grouped)
        out[np.argsort(order.astype(np.uint8 if len(names) <= 256 else np.uint16), kind="stable")] = grouped
        return out


class MixtureLane:
    """`LaneSource` of a `StaticMixtureWorkSource`. Its state is the number of draws, and the weights in force since when.

    **Changed weights.** `load(state, accept={"mixture"})` continues a state that was taken under other weights: chunks
    of rounds before `from_round` stay what they were, from there on the new weights hold, and each dataset goes on from
    the row it had reached, so nothing is repeated and nothing skipped. All lanes must be given the same `from_round`: any round
    that none has begun. It defaults to this lane's next draw, which is right for one lane, or for lanes that have drawn equally
    often.
    """

    def __init__(self, curriculum: Curriculum, lane: int, lanes: int) -> None:
        self._curriculum = curriculum
        self._lane, self._lanes = lane, lanes
        self._draws = 0
        self._set_eras([(0, dict(curriculum.weights))])

    def _set_eras(self, eras: list[tuple[int, dict[str, float]]]) -> None:
        self._eras = eras
        per_round = self._lanes * self._curriculum.chunk_size
        self._timeline = self._curriculum.timeline([Era(first * per_round, weights) for first, weights in eras])

    @property
    def position(self) -> int:
        """Samples of the global stream in the rounds that this lane has drawn from."""
        return self._draws * self._lanes * self._curriculum.chunk_size

    def draw(self) -> Samples | None:
        """The next chunk of this lane; None once the lane has ended, again and again."""
        number = self._curriculum.chunk_number(self._draws, self._lane, self._lanes)
        samples = self._curriculum.samples(self._timeline, number * self._curriculum.chunk_size)
        if not len(samples):
            return None
        self._draws += 1
        return samples

    def counts(self) -> dict[str, int]:
        """Samples of each dataset, over all lanes, in the rounds that this lane has drawn from."""
        return self._timeline.counts(self.position)

    def state(self) -> dict[str, Any]:
        """The position before the next draw: a few numbers."""
        return {
            "lane": self._lane,
            "lanes": self._lanes,
            "draws": self._draws,
            "eras": [[first, dict(sorted(weights.items()))] for first, weights in self._eras],
        }

    def load(self, state: Mapping[str, Any], accept: Collection[str] = (), from_round: int | None = None) -> None:
        """Continue from `state`. `CheckpointMismatch` lists what differs and is not accepted."""
        where = (state["lane"], state["lanes"])
        if where != (self._lane, self._lanes):
            raise CheckpointMismatch([f"lane {where[0]} of {where[1]} is now lane {self._lane} of {self._lanes}"])
        draws = int(state["draws"])
        eras = [(int(first), {str(n): float(w) for n, w in weights.items()}) for first, weights in state["eras"]]
        new = dict(self._curriculum.weights)
        if eras[-1][1] != new:
            changes = weight_changes(eras[-1][1], new)
            if "mixture" not in accept:
                raise CheckpointMismatch(changes)
            eras = self._with_new_weights(eras, draws if from_round is None else from_round, draws)
        self._draws = draws
        self._set_eras(eras)

    def _with_new_weights(
        self, eras: list[tuple[int, dict[str, float]]], first: int, draws: int
    ) -> list[tuple[int, dict[str, float]]]:
        """The weights in force, then the new ones from round `first` on."""
        if first < draws:
            raise CheckpointError(
                f"lane {self._lane} has drawn {draws} chunks, so new weights cannot hold from round {first} on; "
                f"pass from_round={draws} or later, the same to every lane"
            )
        known = set(self._curriculum.orders)
        gone = sorted({name for _, weights in eras for name, w in weights.items() if w > 0} - known)
        if gone:
            raise CheckpointError(
                f"the checkpoint has drawn from {', '.join(map(repr, gone))}, which the curriculum no longer lists; "
                "keep the dataset and give it weight 0"
            )
        return [*(era for era in eras if era[0] < first), (first, dict(self._curriculum.weights))]


def weight_changes(old: Mapping[str, float], new: Mapping[str, float]) -> list[str]:
    """A line for each weight that differs."""
    names = sorted(set(old) | set(new))
    return [f"weight/{n}: {old.get(n)} -> {new.get(n)}" for n in names if old.get(n) != new.get(n)]

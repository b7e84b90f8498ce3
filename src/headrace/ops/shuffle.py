"""`shuffle`: a bounded buffer that mixes the order of records within a lane.

`"streaming"` replaces in place: arrival `k` goes to slot `hash(seed, lane, k) mod size`, and the record there leaves. The
slot is a function of the count, so a checkpoint holds one number and the held records, and restoring finds every slot
again by reading the hash backwards until each has been seen. While the buffer grows (first to 1/16 of its size, at most
128 records, then by one record for every one that leaves) a stream starts after few records instead of all.

`"block"` permutes every `buffer_size` consecutive records. `"block_warmup"` does so with blocks that grow by the factor
`warmup_growth` from that same small start.

The random key also holds the lane position of the first record since the last flush, so that two spans between flushes are
not permuted alike, although a flush leaves the buffer as new.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from headrace.arguments import whole_number
from headrace.core import rng
from headrace.core.block import CHUNK, OFFSET, PIECE, Block, Ints, Origin, concat_blocks
from headrace.core.op import Fields
from headrace.errors import CheckpointError, ConfigError
from headrace.ops.pool import RowPool
from headrace.ops.returning import InTurn, Returning

ShuffleAlgorithm = Literal["streaming", "block", "block_warmup"]

_NAME: Final = "shuffle"
_ALGORITHMS: Final = ("streaming", "block", "block_warmup")
_DRAIN_ROWS: Final = 1024
_AHEAD: Final = 4096


@dataclass(frozen=True, slots=True)
class Shuffle:
    """Mix the order of records through a buffer of `buffer_size` records a lane."""

    buffer_size: int = 8192
    seed: int = 0
    algorithm: ShuffleAlgorithm = "streaming"
    warmup_growth: float = 1.5

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        object.__setattr__(self, "buffer_size", whole_number("shuffle: buffer_size", self.buffer_size, 1))
        object.__setattr__(self, "seed", whole_number("shuffle: seed", self.seed))
        if self.algorithm not in _ALGORITHMS:
            raise ConfigError(f"shuffle: unknown algorithm {self.algorithm!r}; known: {', '.join(_ALGORITHMS)}")
        if self.warmup_growth <= 1:
            raise ConfigError(f"shuffle: warmup_growth must be greater than 1, found {self.warmup_growth}")

    @property
    def name(self) -> str:
        """Shown by explain()."""
        return _NAME

    @property
    def reorders(self) -> bool:
        """It does nothing else."""
        return True

    @property
    def start_size(self) -> int:
        """Records gathered before the first one leaves (not for `"block"`)."""
        return min(max(self.buffer_size // 16, 1), 128)

    def describe(self) -> dict[str, Any]:
        """Parameters that decide data."""
        parameters = {"buffer_size": self.buffer_size, "seed": self.seed, "algorithm": self.algorithm}
        return parameters | ({"warmup_growth": self.warmup_growth} if self.algorithm == "block_warmup" else {})

    def needs(self, downstream: Fields) -> Fields:
        """Whatever is wanted of its output."""
        return downstream

    def accumulator(self, lane: int) -> StreamingShuffle | BlockShuffle:
        """The buffer of one lane."""
        return StreamingShuffle(self, lane) if self.algorithm == "streaming" else BlockShuffle(self, lane)


def _place(origin: Origin) -> list[int]:
    """Chunk, offset and piece of the first row: what the random key of a span is made from."""
    return [int(origin.ids[0, column]) for column in (CHUNK, OFFSET, PIECE)]


class StreamingShuffle:
    """Replace-in-place reservoir. Arrivals are counted from the last flush, and are the handles of the pool."""

    def __init__(self, spec: Shuffle, lane: int) -> None:
        """Hold nothing."""
        self._spec, self._lane = spec, lane
        self._pool = RowPool(lane)
        self._reset()

    def _reset(self) -> None:
        self._pool.clear()
        self._arrivals = 0
        self._first: list[int] = []
        self._occupant = [-1] * self._spec.buffer_size  # arrival in each slot
        self._ahead: list[int] = []  # slots of the arrivals from `_ahead_from` on
        self._ahead_from = 0
        self._back: Returning | None = None  # records of a restored buffer that are not here yet,
        self._back_before = 0  # with handles below this

    def push(self, block: Block) -> list[Block]:
        """One record out for each in, once the buffer has grown."""
        if not len(block):
            return [block] if block.drops else []
        if not self._first:
            self._begin(_place(block.origin))
        out = self._exchange(len(block))
        self._pool.add(block)
        if not out:
            return [block.slice(0, 0).dropping(*block.drops)] if block.drops else []
        leaving = self._take(np.asarray(out))
        back = 0 if self._back is None else self._back.left
        if self._pool.wasteful(self._size() - back):
            self._pool.keep(self._sorted()[back:])
        return [leaving.dropping(*block.drops) if block.drops else leaving]

    def flush(self) -> list[Block]:
        """Everything, in random order."""
        handles = self._sorted()
        if not len(handles):
            return []
        self._all_here(handles)
        handles = handles[rng.shuffled(rng.key(self._key, "drain"), len(handles))]
        blocks = [self._pool.take(handles[a : a + _DRAIN_ROWS]) for a in range(0, len(handles), _DRAIN_ROWS)]
        self._reset()
        return blocks

    end = flush

    def held(self) -> Origin:
        """Held records by arrival."""
        handles = self._sorted()
        if self._back is None or not self._back.left:
            return self._pool.origins(handles)
        back = self._back.left  # the oldest: they were here before anything that arrived since
        return Origin.concat([self._back.origins(handles[:back]), self._pool.origins(handles[back:])])

    def state(self) -> dict[str, Any]:
        """The count of arrivals, and where the span began."""
        return {"arrivals": self._arrivals, "first": self._first}

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """Put each held record back in its slot: the last arrival that the hash sent there."""
        handles = self._find(state)
        _check_count(len(handles), 0 if held is None else len(held))
        if held is not None:
            self._pool.restore(handles, held, self._arrivals)

    def restore_in_turn(self, state: dict[str, Any], held: Origin, fetch: InTurn) -> None:
        """The same, but `fetch` reads the records again while the run goes on, each before its turn to leave."""
        handles = self._find(state)
        _check_count(len(handles), len(held))
        self._pool.clear(self._arrivals)
        order = self._departures(np.asarray(self._occupant), self._arrivals)
        self._back, self._back_before = Returning(handles, held, order, fetch), self._arrivals

    def _find(self, state: dict[str, Any]) -> Ints:
        """Handles of the records that were held, from the count of arrivals."""
        self._reset()
        self._arrivals = int(state["arrivals"])
        self._begin(list(state["first"]))
        return self._last_arrivals()

    def _departures(self, waiting: Ints, arrival: int) -> Iterator[Ints]:
        """Records that occupy these slots, in the order in which the arrivals from `arrival` on take their place."""
        while (waiting >= 0).any():
            slots, first = np.unique(self._slots(np.arange(arrival, arrival + _AHEAD)), return_index=True)
            slots = slots[np.argsort(first)]
            handles = waiting[slots]
            waiting[slots] = -1
            arrival += _AHEAD
            yield handles[handles >= 0]

    def _take(self, handles: Ints) -> Block:
        """Records that leave, in this order."""
        if self._back is None or not self._back.left:
            self._back = None
            return self._pool.take(handles)
        before = handles < self._back_before
        old = int(before.sum())
        parts = [self._back.take(old)] if old else []
        if old < len(handles):
            parts.append(self._pool.take(handles[~before]))
        order = np.empty(len(handles), np.int64)
        order[before], order[~before] = np.arange(old), np.arange(old, len(handles))
        return concat_blocks(parts).take(order)

    def _all_here(self, handles: Ints) -> None:
        """Wait for every record."""
        if self._back is None or not self._back.left:
            return
        back = self._back.left
        parts = [self._back.rest(), *([self._pool.take(handles[back:])] if back < len(handles) else [])]
        self._pool.restore(handles, concat_blocks(parts), self._arrivals)
        self._back = None

    def _begin(self, first: list[int]) -> None:
        """Start a span between flushes at this place of the lane."""
        self._first = first
        self._key = rng.key(self._spec.seed, _NAME, self._lane, *first)

    def _exchange(self, count: int) -> list[int]:
        """Send the next arrivals to their slots; arrivals that leave for them, in order. A plain loop: it costs less than
        sorting the slots so that numpy could tell a record that arrives and leaves within one block."""
        arrival = self._arrivals
        self._arrivals += count
        occupant, leaving = self._occupant, []
        for slot in self._next_slots(arrival, count):
            before = occupant[slot]
            occupant[slot] = arrival
            arrival += 1
            if before >= 0:
                leaving.append(before)
        return leaving

    def _next_slots(self, arrival: int, count: int) -> list[int]:
        """Slots of these arrivals, computed some thousands at a time: a hash of 64 positions costs as much as one of 1000."""
        at = arrival - self._ahead_from
        if at + count > len(self._ahead):
            self._ahead_from, at = arrival, 0
            self._ahead = self._slots(np.arange(arrival, arrival + max(count, _AHEAD))).tolist()
        return self._ahead[at : at + count]

    def _slots(self, arrivals: Ints) -> Ints:
        """Slot of each arrival: a new one while the buffer grows, else a random one of those there are."""
        size, start = self._spec.buffer_size, self._spec.start_size
        grown = np.minimum(start + np.maximum(arrivals - start, 0) // 2, size)  # slots in use
        slots = rng.below(self._key, arrivals, grown)
        filling = (arrivals < start) | ((arrivals < 2 * size - start) & ((arrivals - start) % 2 == 1))
        return np.where(filling, np.where(arrivals < start, arrivals, grown), slots)

    def _size(self) -> int:
        """Records held after this many arrivals."""
        start, size = self._spec.start_size, self._spec.buffer_size
        return min(self._arrivals, start + max(self._arrivals - start, 0) // 2, size)

    def _sorted(self) -> Ints:
        occupants = np.asarray(self._occupant)
        return np.sort(occupants[occupants >= 0])

    def _last_arrivals(self) -> Ints:
        """Find the occupant of every slot by reading arrivals backwards; return them ascending."""
        found = np.full(self._spec.buffer_size, -1)
        missing, stop = self._size(), self._arrivals
        while missing and stop:
            begin = max(0, stop - max(1024, 2 * self._spec.buffer_size))
            arrivals = np.arange(begin, stop)[::-1]
            slots, first = np.unique(self._slots(arrivals), return_index=True)
            new = found[slots] < 0
            found[slots[new]] = arrivals[first[new]]
            missing, stop = missing - int(new.sum()), begin
        self._occupant = found.tolist()
        return self._sorted()


class BlockShuffle:
    """Permute blocks of consecutive records."""

    def __init__(self, spec: Shuffle, lane: int) -> None:
        """Hold nothing."""
        self._spec, self._lane = spec, lane
        self._held: list[Block] = []
        self._count = 0
        self._emitted = 0  # blocks since the last flush

    def push(self, block: Block) -> list[Block]:
        """Every block that is full now, permuted."""
        out: list[Block] = []
        at, total = 0, len(block)
        while total - at >= (need := self._target() - self._count):
            self._hold(block.slice(at, at + need))
            out += self._emit()
            at += need
        if at < total:
            self._hold(block.slice(at, total))
        if block.drops:
            out[:1] = [(out[0] if out else block.slice(0, 0)).dropping(*block.drops)]
        return out

    def flush(self) -> list[Block]:
        """What is held, permuted."""
        out = self._emit() if self._count else []
        self._emitted = 0
        return out

    end = flush

    def held(self) -> Origin:
        """Held records by arrival."""
        return Origin.concat([block.origin for block in self._held]) if self._held else Origin.empty()

    def state(self) -> dict[str, Any]:
        """Blocks emitted since the last flush, on which the size of the next may depend."""
        return {"emitted": self._emitted, "count": self._count}

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """Hold these records again."""
        _check_count(int(state["count"]), 0 if held is None else len(held))
        self._held = [] if held is None or not len(held) else [held.slice(0, len(held))]
        self._count, self._emitted = int(state["count"]), int(state["emitted"])

    def _target(self) -> int:
        if self._spec.algorithm == "block":
            return self._spec.buffer_size
        size, start, growth = self._spec.buffer_size, self._spec.start_size, self._spec.warmup_growth
        full = np.log(size / start) / np.log(growth)
        return size if self._emitted >= full else min(size, int(np.ceil(start * growth**self._emitted)))

    def _hold(self, block: Block) -> None:
        self._held.append(block)
        self._count += len(block)

    def _emit(self) -> list[Block]:
        block = concat_blocks(self._held)
        key = rng.key(self._spec.seed, _NAME, "block", self._lane, *_place(block.origin))
        self._held, self._count, self._emitted = [], 0, self._emitted + 1
        return [block.take(rng.shuffled(key, len(block)))]


def _check_count(expected: int, found: int) -> None:
    if found != expected:
        raise CheckpointError(
            f"shuffle: the checkpoint names {expected} buffered records and {found} were read back; "
            "the data or an operator before the shuffle has changed"
        )

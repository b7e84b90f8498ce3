"""The source end of a lane: chunks become blocks of pointers, with cuts at fixed positions in between.

Cuts depend on the recipe only: one every `cut_every` samples of the lane, and one with `flush` at the start of every
`flush_every`-th chunk. Blocks end at cuts, and are otherwise as large as the run likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.core.block import CHUNK, OFFSET, ORIGIN_WIDTH, Block, Ints, Origin
from headrace.core.checkpoint import Change
from headrace.core.message import Cut, End, Message
from headrace.core.plan import Plan
from headrace.errors import CheckpointError


class Drawn(Protocol):
    """One chunk of a lane: int64 `[n, 4]` of dataset, shard, row, component."""

    @property
    def ids(self) -> Ints:
        """Pointers in order."""
        ...

    def __len__(self) -> int: ...


class LaneSource(Protocol):
    """A lane of the curriculum."""

    def draw(self) -> Drawn | None:
        """The next chunk, or None at the end."""
        ...

    def state(self) -> dict[str, Any]:
        """Position before the next draw."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        ...


@dataclass(frozen=True, slots=True)
class CutRules:
    """Where cuts lie: regular ones every `every` samples, and one with `flush` at the start of every `flush_every`-th chunk.

    `changes` on purpose keep the cadence that they ended up to their `until`, where a cut lies as well; regular cuts begin behind
    the last of them.
    """

    first: int
    every: int
    flush_every: int
    changes: tuple[Change, ...] = ()

    def flush(self, chunk: int, position: int) -> bool:
        """Whether operators emit what they hold before `position`, the start of `chunk`."""
        cadence = next((change.flush for change in self.changes if position <= change.until), self.flush_every)
        return chunk > 0 and cadence > 0 and chunk % cadence == 0

    def regular(self, position: int) -> bool:
        """Whether a cut lies here, whatever the chunk."""
        if not self.changes or position > self.changes[-1].until:
            return position % self.every == 0
        return any(position == change.until for change in self.changes)

    def room(self, position: int) -> int:
        """Samples up to where the next cut may lie."""
        marks = (change.until - position for change in self.changes)
        return min((self.every - position % self.every, *(room for room in marks if room > 0)))


class LaneFeed:
    """Draws chunks and cuts them into blocks. `sources` collects the source's state before each chunk drawn."""

    def __init__(self, lane: int, source: LaneSource, plan: Plan, sources: dict[int, dict[str, Any]]) -> None:
        self.lane, self.drawn = lane, 0
        self._source, self._plan, self._sources = source, plan, sources
        self._go_on: Callable[[], int | None] | None = getattr(source, "go_on", None)

    def messages(
        self, chunk: int, offset: int, position: int, on_block: Callable[[Ints], None], changes: tuple[Change, ...] = ()
    ) -> Iterator[Message]:
        """Blocks and cuts from sample `offset` of `chunk` on. `on_block` sees the pointers of every block handed out."""
        rules = CutRules(position, self._plan.cut_every, self._plan.flush_every, changes)
        while True:
            self._sources[chunk] = self._source.state()
            drawn = self._source.draw()
            if drawn is None:
                following = None if self._go_on is None else self._go_on()
                if following is None:
                    break
                chunk, offset = following, offset if following == chunk else 0  # a restored lane may stand in it
                self._sources[chunk] = self._source.state()
                if position > rules.first:
                    yield Cut(self.lane, chunk, 0, position, flush=True, end=True)
                continue
            self.drawn = chunk + 1
            ids = chunk_ids(drawn, chunk)
            if offset > len(ids):
                raise CheckpointError(
                    f"the checkpoint stands at sample {offset} of chunk {chunk} in lane {self.lane}, which has {len(ids)} samples"
                )
            while offset < len(ids):
                flush = offset == 0 and rules.flush(chunk, position)
                if position > rules.first and (flush or rules.regular(position)):
                    yield Cut(self.lane, chunk, offset, position, flush)
                take = min(self._plan.micro_batch, len(ids) - offset, rules.room(position))
                part = ids[offset : offset + take]
                on_block(part)
                yield Block(self.lane, Origin(part), {})
                offset += take
                position += take
            chunk, offset = chunk + 1, 0
        yield End(self.lane)


def chunk_ids(drawn: Drawn, chunk: int) -> Ints:
    """Origin rows, int64 `[n, 7]`, of a whole chunk."""
    ids = np.zeros((len(drawn), ORIGIN_WIDTH), np.int64)
    ids[:, :4] = drawn.ids
    ids[:, CHUNK] = chunk
    ids[:, OFFSET] = np.arange(len(drawn))
    return ids

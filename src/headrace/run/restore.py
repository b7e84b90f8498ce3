"""From recipes back to records: fetch again exactly what operators held at a cut.

A held record is known by chunk, offset and piece; a packed row by the token spans of its segments. The chunks are drawn again
from the work source's saved states, the samples run through the stateless operators once more, and packed rows are put
together from their pieces. Cost: the held records, whatever the position in the run. A shuffle buffer reads its records while
the run goes on, each before its turn to leave (`refetch_in_turn`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.core.block import CHUNK, OFFSET, PIECE, Block, Ints, Origin, concat_blocks
from headrace.core.plan import Node
from headrace.errors import CheckpointError, InternalError
from headrace.run.feed import Drawn, LaneSource

REFETCH = 512
"""Samples in a block that is fetched again."""


def locate(origin: Origin, source: LaneSource, sources: Mapping[int, dict[str, Any]]) -> Origin:
    """Fill in dataset, shard, row and component from chunk and offset."""
    ids = origin.ids.copy()
    for chunk in np.unique(ids[:, CHUNK]).tolist():
        if chunk not in sources:
            raise CheckpointError(
                f"the checkpoint holds records of chunk {chunk} but not the work source's state before it"
            )
        source.load(sources[chunk])
        drawn = draw_again(source)
        if drawn is None:
            raise CheckpointError(f"the curriculum ends before chunk {chunk}, which the checkpoint holds records of")
        mine = ids[:, CHUNK] == chunk
        offsets = ids[mine, OFFSET]
        if len(offsets) and int(offsets.max()) >= len(drawn):
            raise CheckpointError(
                f"chunk {chunk} has {len(drawn)} samples now; the checkpoint holds one at {offsets.max()}"
            )
        ids[mine, :4] = drawn.ids[offsets]
    return Origin(ids, origin.rows, origin.spans)


def draw_again(source: LaneSource) -> Drawn | None:
    """The chunk that a source has been loaded for, also where another curriculum begins with it."""
    drawn = source.draw()
    if drawn is None and hasattr(source, "go_on") and source.go_on() is not None:  # type: ignore[attr-defined]
        return source.draw()
    return drawn


def refetch(
    origin: Origin, before: Sequence[Node], lane: int, run: Callable[[Sequence[Node], list[Block]], list[Block]]
) -> Block | None:
    """The rows named by `origin`, as they stood after the operators `before`. `run` applies stateless operators to blocks."""
    if not len(origin):
        return None
    packer = next((i for i, node in enumerate(before) if hasattr(node.op, "assemble")), None)
    head = [node for node in before[:packer] if not node.stateful]
    pointers = _unique_samples(origin.ids)
    blocks = [Block(lane, Origin(pointers[i : i + REFETCH]), {}) for i in range(0, len(pointers), REFETCH)]
    records = concat_blocks(run(head, blocks))
    if packer is None:
        return _pick(records, origin.ids)
    rows = before[packer].op.assemble(records, origin)
    tail = [node for node in before[packer + 1 :] if not node.stateful]
    out = run(tail, [rows]) if tail else [rows]
    return concat_blocks(out)


def refetch_in_turn(
    origins: Iterator[Origin],
    before: Sequence[Node],
    lane: int,
    run: Callable[[Sequence[Node], Iterator[Block]], Iterator[Block]],
) -> Iterator[Block]:
    """As `refetch`, of records that are not packed: a block for each origin, read as it is asked for."""
    asked: deque[Origin] = deque()

    def pointers() -> Iterator[Block]:
        for origin in origins:
            asked.append(origin)
            yield Block(lane, Origin(_unique_samples(origin.ids)), {})

    for records in run([node for node in before if not node.stateful], pointers()):
        yield _pick(records, asked.popleft().ids)


def _unique_samples(ids: Ints) -> Ints:
    _, first = np.unique((ids[:, CHUNK] << 32) | ids[:, OFFSET], return_index=True)
    pointers = ids[np.sort(first)].copy()
    pointers[:, PIECE] = 0
    return pointers


def _pick(records: Block, wanted: Ints) -> Block:
    """Rows of `records` in the order of `wanted`."""
    have, want = _keys(records.origin.ids, wanted)
    order = np.argsort(have)
    at = np.searchsorted(have[order], want)
    if (at >= len(have)).any() or (have[order][at] != want).any():
        raise InternalError("a held record did not come back when it was fetched again")
    picked = records.take(order[at])
    picked.drops = ()
    return picked


def _keys(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """Chunk, offset and piece as one number each, comparable between `a` and `b`."""
    both = np.concatenate([a, b])
    _, sample = np.unique((both[:, CHUNK] << 32) | both[:, OFFSET], return_inverse=True)
    key = sample * (int(both[:, PIECE].max()) + 1) + both[:, PIECE]
    return key[: len(a)], key[len(a) :]

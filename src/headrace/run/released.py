"""The order in which a run with `deterministic=False` released its blocks, followed once more after a restore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headrace.core.block import CHUNK, OFFSET, Block, concat_blocks
from headrace.core.checkpoint import Span
from headrace.core.message import Cut, Message


def recorded(upstream: Iterator[Message], spans: Sequence[Span]) -> Iterator[Message]:
    """The stream with its first samples as blocks of `spans`, in that order, before those that were left out between them.

    Cuts inside the recorded part (of a run that now cuts more often) are passed over.
    """
    last = max((chunk, offset + count) for chunk, offset, count in spans)
    blocks: list[Block] = []
    for message in upstream:
        if not isinstance(message, Block):
            if isinstance(message, Cut) and _reach(blocks) < last:
                continue
            yield from (block for part in regroup(blocks, spans) for block in part)
            yield message
            break
        blocks.append(message)
        if _reach(blocks) >= last:
            yield from (block for part in regroup(blocks, spans) for block in part)
            break
    yield from upstream


def _reach(blocks: Sequence[Block]) -> tuple[int, int]:
    """Chunk and offset behind the last sample of these blocks."""
    if not blocks:
        return (-1, 0)
    chunk, offset = blocks[-1].origin.ids[-1, [CHUNK, OFFSET]].tolist()
    return (chunk, offset + 1)


def regroup(blocks: Sequence[Block], spans: Sequence[Span]) -> tuple[list[Block], list[Block]]:
    """The samples of `blocks` as blocks of these spans, and the others as they were."""
    whole = concat_blocks(blocks)
    place = {(c, o): i for i, (c, o) in enumerate(whole.origin.ids[:, [CHUNK, OFFSET]].tolist())}
    left = np.ones(len(whole), bool)
    first = []
    for chunk, offset, count in spans:
        at = place[chunk, offset]
        first.append(whole.slice(at, at + count))
        left[at : at + count] = False
    runs = np.flatnonzero(np.diff(np.concatenate([[False], left, [False]]).astype(np.int8)))
    return first, [whole.slice(a, b) for a, b in runs.reshape(-1, 2).tolist()]

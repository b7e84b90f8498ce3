"""Looped breadth-first: all microbatches through the first stage of a rank, then all through its next.

The bubble of interleaved 1F1B, but all M activations; what it buys is that a rank gathers the sharded parameters of each stage
once a step. Backwards run in reverse order. Source: Lamy-Poirier, 2022 (arXiv 2211.05953).
"""

from __future__ import annotations

from headrace.parallel.action import Action
from headrace.parallel.builders.order import one_by_one


def looped_bfs(num_ranks: int, num_microbatches: int, chunks: int) -> list[list[Action]]:
    """Rows of looped BFS; stage s lives on rank s % N."""
    rows: list[list[Action]] = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        slots = [(stage, mb) for stage in stages for mb in range(num_microbatches)]
        rows.append(one_by_one(slots, slots[::-1], warmup=len(slots)))
    return rows

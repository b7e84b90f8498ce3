"""1F1B: one forward, one backward, as early as possible; and its eager form.

Same bubble as GPipe, (N-1)(tF+tB), but stage s never holds more than min(M, N-s) activations. On a slow link each microbatch
loses 2c(N-1)/N in the steady state (c the one-way latency), because a stage waits for the answer to the forward that it has
just sent. The eager form runs twice as far ahead and hides that; it holds min(M, 2(N-s)-1).
Sources: PipeDream-flush (arXiv 2006.09503), DAPPLE (arXiv 2007.01045).
"""

from __future__ import annotations

from headrace.parallel.action import Action
from headrace.parallel.builders.order import one_by_one


def one_f_one_b(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Rows of 1F1B, one stage on each rank; any M, also M < N."""
    return _rows(num_ranks, num_microbatches, ahead=1)


def eager_one_f_one_b(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Rows of eager 1F1B: two forwards ahead for each stage below, instead of one."""
    return _rows(num_ranks, num_microbatches, ahead=2)


def _rows(num_ranks: int, num_microbatches: int, ahead: int) -> list[list[Action]]:
    rows: list[list[Action]] = []
    for rank in range(num_ranks):
        slots = [(rank, mb) for mb in range(num_microbatches)]
        rows.append(one_by_one(slots, slots, warmup=ahead * (num_ranks - 1 - rank)))
    return rows

"""GPipe: all forwards, then all backwards in reverse order.

Simple, and the schedule to which others are compared. Every stage holds the activations of all M microbatches. Bubble
(N-1)(tF+tB). Source: Huang et al., 2019 (arXiv 1811.06965), figure 2c.
"""

from __future__ import annotations

from headrace.parallel.action import Action
from headrace.parallel.builders.order import one_by_one


def gpipe(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Rows of GPipe, one stage on each rank."""
    rows: list[list[Action]] = []
    for rank in range(num_ranks):
        slots = [(rank, mb) for mb in range(num_microbatches)]
        rows.append(one_by_one(slots, slots[::-1], warmup=num_microbatches))
    return rows

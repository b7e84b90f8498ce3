"""Interleaved 1F1B: v stages on each rank, so that fill and drain take 1/v of the time.

Bubble (N-1)(tF+tB)/v, for v times the messages and (N-1)/v more activations on the first rank. Microbatches go in
groups of N through all stages of a rank. M need not be a multiple of N: with R = M // N rounds a group of M / R serves
where that is whole; else the schedule of the next multiple of N is built and cut short.
Source: Narayanan et al., 2021 (arXiv 2104.04473).
"""

from __future__ import annotations

from headrace.parallel.action import Action
from headrace.parallel.builders.order import in_groups, one_by_one


def interleaved_one_f_one_b(num_ranks: int, num_microbatches: int, chunks: int) -> list[list[Action]]:
    """Rows of interleaved 1F1B; stage s lives on rank s % N."""
    group = group_size(num_ranks, num_microbatches)
    rows: list[list[Action]] = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        forwards = in_groups(stages, num_microbatches, group)
        backwards = in_groups(stages[::-1], num_microbatches, group)
        # With one stage a rank this is 1F1B, which need not run two ahead.
        ahead = 2 if chunks > 1 else 1
        rows.append(one_by_one(forwards, backwards, (chunks - 1) * group + ahead * (num_ranks - 1 - rank)))
    return rows


def group_size(num_ranks: int, num_microbatches: int) -> int:
    """How many microbatches go through one stage before the next stage's turn."""
    rounds = max(1, num_microbatches // num_ranks)
    return num_microbatches // rounds


def whole_groups(num_ranks: int, num_microbatches: int) -> int:
    """The microbatches to build for: M itself if it makes equal groups, else the next multiple of N."""
    rounds = max(1, num_microbatches // num_ranks)
    return num_microbatches if num_microbatches % rounds == 0 else -(-num_microbatches // num_ranks) * num_ranks

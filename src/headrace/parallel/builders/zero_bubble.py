"""Zero-bubble schedules in loop placement: the backward is split, and weight gradients fill the idle time.

ZB-H1 keeps the memory of 1F1B's first rank (N activations on every rank, where an engine frees them at the weight gradient)
and has bubble (N-1)(tF+tI-tW). ZB-H2 runs twice as far ahead, holds 2N-1, and has span bubble (N-1)(tF+tI-2tW): none at equal
times. ZB-1P is ZB-H1 with v stages a rank: N activations and 1/v of its bubble.
Source: Qi et al., 2024 (arXiv 2401.10241).
"""

from __future__ import annotations

from headrace.parallel.action import Action
from headrace.parallel.builders.interleaved import group_size
from headrace.parallel.builders.order import in_groups, one_by_one


def zb_h1(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Rows of ZB-H1: warm-up of 1F1B, weight gradients `rank` places late."""
    return _rows(num_ranks, num_microbatches, ahead=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Rows of ZB-H2: twice the warm-up, weight gradients `2 rank` places late."""
    return _rows(num_ranks, num_microbatches, ahead=2)


def zb_1p(num_ranks: int, num_microbatches: int, chunks: int) -> list[list[Action]]:
    """Rows of ZB-1P; stage s lives on rank s % N."""
    group = group_size(num_ranks, num_microbatches)
    rows: list[list[Action]] = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        forwards = in_groups(stages, num_microbatches, group)
        backwards = in_groups(stages[::-1], num_microbatches, group)
        rows.append(one_by_one(forwards, backwards, (chunks - 1) * group + num_ranks - 1 - rank, delay=rank))
    return rows


def _rows(num_ranks: int, num_microbatches: int, ahead: int) -> list[list[Action]]:
    rows: list[list[Action]] = []
    for rank in range(num_ranks):
        slots = [(rank, mb) for mb in range(num_microbatches)]
        rows.append(one_by_one(slots, slots, ahead * (num_ranks - 1 - rank), delay=ahead * rank))
    return rows

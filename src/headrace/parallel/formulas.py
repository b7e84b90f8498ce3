"""Closed forms of the pipeline bubble, and the questions a person asks of them.

All hold for stages of equal time and free communication; with other stages, simulate (`headrace.parallel.simulate`).
"""

from __future__ import annotations

import math
from fractions import Fraction

from headrace.errors import ConfigError


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Idle share of a GPipe or 1F1B step: (N-1)/(M+N-1).

    >>> bubble_fraction(4, 8) == 3 / 11, bubble_fraction(4, 64) == 3 / 67
    (True, True)
    """
    check_counts(num_stages, num_microbatches)
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def microbatches_for_bubble(num_stages: int, bubble: float) -> int:
    """The least number of microbatches whose bubble fraction is at most `bubble`.

    >>> microbatches_for_bubble(4, 0.05)
    57
    """
    check_counts(num_stages, 1)
    wanted = Fraction(bubble)
    if not 0 < wanted < 1:
        raise ConfigError(f"bubble is the idle share of a step, above 0 and below 1; got {bubble}")
    least = max(1, math.ceil((num_stages - 1) * (1 - wanted) / wanted))
    # A third written as a float is a little less than a third: the microbatch that this asks for too much is taken back.
    return least - 1 if least > 1 and bubble_fraction(num_stages, least - 1) <= bubble else least


def effective_batch(num_microbatches: int, microbatch_size: int, data_parallel: int = 1) -> int:
    """Examples that one optimizer step sees: M x B, times the data-parallel replicas.

    The bubble depends on M alone, so at a fixed effective batch more and smaller microbatches shrink it.
    """
    if min(num_microbatches, microbatch_size, data_parallel) < 1:
        raise ConfigError(
            "num_microbatches, microbatch_size and data_parallel are counts of at least 1; got "
            f"{num_microbatches}, {microbatch_size}, {data_parallel}"
        )
    return num_microbatches * microbatch_size * data_parallel


def microbatches_of_batch(batch: int, microbatch_size: int, data_parallel: int = 1) -> int:
    """How many microbatches a global batch makes on each replica; refuses one that does not divide."""
    each = effective_batch(1, microbatch_size, data_parallel)
    if batch < 1 or batch % each:
        raise ConfigError(
            f"a batch of {batch} does not divide into microbatches of {microbatch_size} on {data_parallel} replicas; "
            f"use a multiple of {each}, such as {max(1, round(batch / each)) * each}"
        )
    return batch // each


def check_counts(num_stages: int, num_microbatches: int) -> None:
    """Refuse what no pipeline can have."""
    if num_stages < 1:
        raise ConfigError(f"num_stages is {num_stages}; a pipeline has at least one stage")
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches is {num_microbatches}; a step needs at least one microbatch")

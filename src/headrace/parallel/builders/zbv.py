"""ZB-V: two stages a rank in a V, split backward, N activations, and no span bubble when tF = tI = tW.

The last stage lives on rank 0, so the first backward starts there, next to the first forward. With unequal times some bubble
comes back. Needs 2N-1 microbatches for its pattern; for fewer the pattern is cut short.
Source: Qi et al., 2024 (arXiv 2401.10241), section 6.
"""

from __future__ import annotations

from headrace.parallel.action import Action
from headrace.parallel.builders.script import perform, words


def zbv(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Rows of ZB-V, for M >= 2N-1."""
    rows: list[list[Action]] = []
    for rank in range(num_ranks):
        left = num_ranks - rank
        steady = num_microbatches - (2 * num_ranks - rank - 1)
        script = words(
            (2 * left - 1, "F0"),
            (rank, "F1 F0"),
            (left, "F1 I1 W1"),
            (steady, "F0 I0 W0 F1 I1 W1"),
            (left - 1, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (left, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        )
        rows.append(perform(script, (rank, 2 * num_ranks - 1 - rank)))
    return rows

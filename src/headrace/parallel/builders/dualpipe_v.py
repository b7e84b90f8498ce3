"""DualPipe-V: the V of ZB-V with a forward and a backward of different microbatches joined into pairs that may overlap.

Its gain is the overlap (all-to-all of one half under the matrix products of the other); run in turn it has bubble
(N-1)(F&B + B - 3W) of chunk times at equal times, and holds N + 1/2 activations. Needs 2N microbatches for its
pattern; for fewer the pattern is cut short. Source: DeepSeek-V3 report (arXiv 2412.19437) and its V form.
"""

from __future__ import annotations

from headrace.parallel.action import Action
from headrace.parallel.builders.script import perform, words


def dualpipe_v(num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Rows of DualPipe-V, for M >= 2N."""
    rows: list[list[Action]] = []
    for rank in range(num_ranks):
        below = num_ranks - 1 - rank
        steady = num_microbatches - 2 * num_ranks + rank + 1
        # On the turn the first pair has no partner to hide under, so it runs apart.
        first = "F0 B1 F1+B0" if rank == num_ranks - 1 else "F0+B1 F1+B0"
        script = words(
            (2 * below, "F0"),
            (rank + 1, "F0 F1"),
            (below, "I1 W F1"),
            (1, first),
            (steady - 1, "F0+B1 F1+B0"),
            (below, "B1 F1+B0"),
        )
        script += _drain(rank, below)
        rows.append(perform(script, (rank, 2 * num_ranks - 1 - rank)))
    return rows


def _drain(rank: int, below: int) -> list[str]:
    """The end: full backwards for the first half, then input gradients at once and weight gradients in the gaps."""
    ends = words((rank + 1, "B1 B0"))
    # The turn to split backwards comes in the middle: half a pair earlier on odd ranks.
    split = 2 * ((rank + 1) // 2) + (0 if rank % 2 else 1)
    ends = [w if i < split else w.replace("B", "I") for i, w in enumerate(ends)]
    return ends + words((below, "W I0"), (rank + 1, "W"))

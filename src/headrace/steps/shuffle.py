"""A shuffle buffer behind the pipeline: order by seed, memory by its size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_DRAWS = 1024


def shuffled(items: Iterator[Any], size: int, seed: int) -> Iterator[Any]:
    """Yield `items` in an order drawn from `seed`, holding at most `size` of them.

    Each item changes places with a random one of the buffer, which leaves. The order is a function of the order of
    `items`, `size` and `seed`.
    """
    import numpy as np  # which a pipeline that does not shuffle does not need

    rng = np.random.Generator(np.random.Philox(key=seed))
    held: list[Any] = []
    draws: list[int] = []
    for item in items:
        if len(held) < size:
            held.append(item)
            continue
        if not draws:
            draws = rng.integers(0, size, _DRAWS).tolist()
        place = draws.pop()
        held[place], item = item, held[place]
        yield item
    rng.shuffle(held)
    yield from held

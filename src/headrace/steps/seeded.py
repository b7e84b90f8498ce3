"""Random steps that do not depend on who runs them."""

from __future__ import annotations

import struct
import sys
import threading
from typing import TYPE_CHECKING

import xxhash

from headrace.steps.chain import Chain
from headrace.steps.failed import Failed

if TYPE_CHECKING:
    from typing import Any

    from headrace.steps.chain import Step
    from headrace.steps.settings import OnError


_GENERATORS = threading.RLock()
"""Held while a step draws from the generators; again by a step that runs such a pipeline of its own."""


class SeededChain(Chain):
    """A chain whose steps draw the same random numbers for an item wherever, and however often, it runs.

    Before each call of a step, `random` and `numpy.random` are seeded from (seed, place of the item, step). An item
    that is one of several outputs takes its place from its origin and its number among them, so that fused and staged
    pipelines agree. Costs about 20 us a call.

    Both generators are one for the process, so the threads of the "threads" runner take turns, a step at a time.
    """

    indexed = True

    def __init__(
        self,
        steps: tuple[Step, ...],
        on_error: OnError = "raise",
        *,
        seed: int,
        first_step: int = 0,
        passes_failed: bool = False,
        passes_on: bool = False,
    ) -> None:
        """`first_step`: number of steps in earlier stages; `passes_on`: outputs go to a later stage, with their place."""
        self._seed = seed
        self._first_step = first_step
        self._passes_on = passes_on
        self._index = 0
        super().__init__(steps, on_error, passes_failed=passes_failed)

    def at(self, index: int) -> None:
        """The item's place in the input."""
        self._index = index

    def _choose(self, *, timed: bool) -> None:
        super()._choose(timed=timed)
        self._report.plain = False
        self.into = self._seeded_into

    def _seeded_into(self, item: Any, outputs: list[Any]) -> None:
        place = key(self._seed, self._index)
        if self._first_step:
            place, item = item
        if type(item) is Failed:
            outputs.append((place, item) if self._passes_on else item)
            self._report.failed += 1
            return
        self._seeded_from(0, place, item, outputs)

    def _seeded_from(self, n: int, place: int, item: Any, outputs: list[Any]) -> None:
        mark = len(outputs)
        with _GENERATORS:
            reseed(key(place, -1 - n - self._first_step))
            found = self._attempt(n, item, outputs)
        if self._passes_on:
            outputs[mark:] = [(place, output) for output in outputs[mark:]]
        for number, output in enumerate(found):
            own = key(place, number) if self._steps[n].many else place
            if n + 1 < len(self._steps):
                self._seeded_from(n + 1, own, output, outputs)
            else:
                outputs.append((own, output) if self._passes_on else output)


def key(place: int, number: int) -> int:
    """A number for the `number`-th thing at `place`; 64 bits, the same everywhere."""
    return xxhash.xxh3_64_intdigest(struct.pack("<Qq", place & 0xFFFFFFFFFFFFFFFF, number))


def reseed(seed: int) -> None:
    """Seed the global generators of `random` and, if it is loaded, `numpy.random`."""
    import random

    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        # The two modules have one algorithm: equal seeds would give equal numbers.
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])

"""Random steps that do not depend on who runs them."""

from __future__ import annotations

import struct
import sys
import threading
from typing import TYPE_CHECKING

import xxhash

from headrace.run.failure import shorten
from headrace.steps.chain import Chain

if TYPE_CHECKING:
    from typing import Any

    from headrace.steps.chain import Step, StepReport
    from headrace.steps.settings import OnError


_GENERATORS = threading.RLock()
"""Held while steps draw from the generators; again by a step that runs such a pipeline of its own."""


class SeededChain(Chain):
    """A chain whose steps draw the same random numbers for an item wherever, and however often, it runs.

    Before each call of a step, `random` and `numpy.random` are seeded from (seed, place of the item, step). An item
    that is one of several outputs takes its place from its origin and its number among them, so that fused and staged
    pipelines agree. Costs about 15 us a call.

    Both generators are one for the process. They are borrowed for a slice of items (until the report on it) and then set to
    what they were: steps that run in the user's own thread leave the user's numbers alone. That costs about 80 us a slice, so
    4 us an item where items are cheap. The threads of the "threads" runner take turns, a slice at a time.
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
        self._borrowed: tuple[Any, Any] | None = None  # the generators' states, while they are borrowed
        super().__init__(steps, on_error, passes_failed=passes_failed)

    def at(self, index: int) -> None:
        """The item's place in the input."""
        self._index = index

    def report(self) -> StepReport:
        """What was done since the last report; a slice is over."""
        self._give_back()
        return super().report()

    def close(self) -> None:
        """Run every `teardown`."""
        self._give_back()
        super().close()

    def _choose(self, *, timed: bool) -> None:
        super()._choose(timed=timed)
        self._report.plain = False
        self.into = self._seeded_into

    def _seeded_into(self, item: Any, outputs: list[Any]) -> None:
        """A failure that the parent made of an item comes as it is; what an earlier stage made has its place with it."""
        place, item = (item.place, item.item) if type(item) is Placed else (key(self._seed, self._index), item)
        if self._passed(item, outputs):
            return
        if self._borrowed is None:
            _GENERATORS.acquire()
            self._borrowed = states()
        try:
            self._seeded_from(0, place, item, outputs)
        except BaseException:  # an interrupt, say: nobody asks for a report then
            self._give_back()
            raise

    def _seeded_from(self, n: int, place: int, item: Any, outputs: list[Any]) -> None:
        reseed(key(place, -1 - n - self._first_step))
        for number, output in enumerate(self._attempt(n, item, outputs)):
            own = key(place, number) if self._steps[n].many else place
            if n + 1 < len(self._steps):
                self._seeded_from(n + 1, own, output, outputs)
            else:
                outputs.append(Placed(own, output) if self._passes_on else output)

    def _give_back(self) -> None:
        """Let the generators go on where they were."""
        if self._borrowed is not None:
            borrowed, self._borrowed = self._borrowed, None
            restore(borrowed)
            _GENERATORS.release()


class Placed:
    """An item on its way to the next stage, and its place: what its random numbers depend on."""

    __slots__ = ("item", "place")

    def __init__(self, place: int, item: Any) -> None:
        """`place`: see `key`."""
        self.place = place
        self.item = item

    def __reduce__(self) -> tuple[Any, ...]:
        """One is made for every item, so it is small."""
        return Placed, (self.place, self.item)

    def __repr__(self) -> str:
        """Messages show the item."""
        return shorten(self.item)


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


def states() -> tuple[Any, Any]:
    """The states of both generators; None for numpy's if it is not loaded."""
    numpy = sys.modules.get("numpy")
    import random

    return random.getstate(), numpy.random.get_state(legacy=False) if numpy is not None else None


def restore(saved: tuple[Any, Any]) -> None:
    """Set both generators to what `states` found."""
    import random

    random.setstate(saved[0])
    if (numpy := sys.modules.get("numpy")) is not None:
        if saved[1] is not None:
            numpy.random.set_state(saved[1])
        else:  # a step has loaded it: as if it had never been seeded
            numpy.random.seed()

"""What `num_workers="auto"` has measured, and what follows from it. Pure: it takes seconds, from a clock or made up.

Other programs on the machine make a measurement longer, never shorter, and for a while rather than evenly: with four of
them on two cores, copying 8 MB takes one to five times as long from one moment to the next, and doubling an array of
that size 1.4 ms or, half of the time, 15 to 300. Hence:

* transport is the shortest that was seen;
* of large items (one a stretch) the work is the shortest too, and has to be clearly more, in more stretches where it is not
  very much more: staying is looked at again while items run here, and leaving is not;
* of small items (many a stretch) it is the middle one, since items differ and a stretch has some of each;
* work of large items and their transport are measured in turns, so that both meet the same conditions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FACTOR = 2.0
"""Times the transport that work must take for worker processes to pay."""
LARGE_FACTOR = 3.0
"""The same where items are large."""
LARGE = 1 << 16
"""Bytes of an item, from here on large."""
LOOKS = 4
"""How often the transport of large items is measured."""
_ENOUGH_SECONDS = 0.02  # of work, to decide, in so many stretches at least
_STRETCHES = 8
_AT_MOST_SECONDS = 0.1
_ENOUGH_ITEMS = 256
_LARGE_SECONDS = 1.0  # the same for large items at most, in fewer stretches than these
_LARGE_STRETCHES = 12
_CLEAR = 5.0  # times what would do: no further stretches are needed


def factor_of(large: bool) -> float:
    """Times the transport that work must take."""
    return LARGE_FACTOR if large else FACTOR


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision and its figures, seconds an item."""

    processes: bool
    work: float
    transport: float
    reason: str = ""
    large: bool = False

    def __str__(self) -> str:
        """One sentence for `explain()`."""
        figures = f"work {_us(self.work)} an item, transport {_us(self.transport)}"
        if self.reason:
            return f"in this process: {self.reason} ({figures})"
        if self.processes:
            return f"in worker processes: {figures}"
        return f"in this process: {figures}; below {factor_of(self.large):g} times the transport a worker process only costs time"


@dataclass(slots=True)
class Evidence:
    """Measured costs.

    >>> evidence = Evidence(work=[3e-4, 2e-4, 9e-4], there=[1e-4], back=[2e-5])
    >>> evidence.verdict(outputs_an_item=1.0).processes
    True
    >>> evidence.large = True
    >>> evidence.verdict(outputs_an_item=1.0).processes
    False
    """

    work: list[float] = field(default_factory=list)  # seconds an item, in each stretch
    there: list[float] = field(default_factory=list)  # seconds to send an item
    back: list[float] = field(default_factory=list)  # seconds to send an output
    large: bool = False
    reason: str = ""  # why nothing can be sent, if so

    def enough(self, items: int, seconds: float, outputs_an_item: float) -> bool:
        """Whether to decide now, after so many items and seconds of work."""
        stretches = len(self.work)
        if self.large:
            if stretches < LOOKS or seconds > _LARGE_SECONDS:
                return stretches > 1 and seconds > _LARGE_SECONDS
            pays, clearly = (self.verdict(outputs_an_item, clear).processes for clear in (1.0, _CLEAR))
            return stretches >= _LARGE_STRETCHES or not pays or clearly
        worked = seconds > (_ENOUGH_SECONDS if stretches >= _STRETCHES else _AT_MOST_SECONDS)
        return stretches > 1 and (worked or items >= _ENOUGH_ITEMS)

    def transport(self, outputs_an_item: float, *, latest: bool = False) -> float:
        """Seconds an item and its outputs, at best or when last measured."""
        if self.reason:
            return float("inf")
        there, back = self.there or [0.0], self.back or [0.0]
        if latest:
            return there[-1] + back[-1] * outputs_an_item
        return min(there) + min(back) * outputs_an_item

    def verdict(self, outputs_an_item: float, clear: float = 1.0) -> Verdict:
        """The decision; worker processes only where work is `clear` times what would do."""
        costs = sorted(self.work) or [0.0]
        work = costs[0] if self.large else costs[(len(costs) - 1) // 2]
        transport = self.transport(outputs_an_item)
        return Verdict(work > clear * factor_of(self.large) * transport, work, transport, self.reason, self.large)

    def reversed_by(self, work: float, transport: float) -> bool:
        """Whether items that now take `work` seconds on average would be better off in processes after all."""
        return not self.reason and work > 2 * factor_of(self.large) * transport


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"

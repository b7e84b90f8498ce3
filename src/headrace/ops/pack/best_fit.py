"""`best_fit`: the open bin with the least room that still suffices; the lowest-numbered of equals.

Rooms in use are the bits of one Python integer. Shifting it by the length and isolating the lowest bit finds the bin in
three operations on a few hundred bytes, which is faster than any tree in Python.
"""

from __future__ import annotations

from bisect import insort


class BestFit:
    """Slots by room, and a bit for every room that occurs."""

    def __init__(self, num_bins: int) -> None:
        """No bin is in use."""
        self._bits = 0
        self._slots: dict[int, list[int]] = {}  # ascending
        self._room = [-1] * num_bins

    def find(self, length: int) -> int:
        """Slot of the tightest bin, or -1."""
        above = self._bits >> length
        if not above:
            return -1
        return self._slots[length + (above & -above).bit_length() - 1][0]

    def update(self, slot: int, room: int) -> None:
        """The bin has this much room now; -1 takes it out of use."""
        old = self._room[slot]
        self._room[slot] = room
        if old >= 0:
            same = self._slots[old]
            same.remove(slot)
            if not same:
                del self._slots[old]
                self._bits ^= 1 << old
        if room >= 0:
            insort(self._slots.setdefault(room, []), slot)
            self._bits |= 1 << room

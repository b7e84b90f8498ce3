"""`first_fit`: the lowest-numbered open bin with room, found in a tree of maxima in log2(bins) steps."""

from __future__ import annotations


class FirstFit:
    """Rooms of the bins as leaves of a binary tree whose inner nodes hold the larger of two children."""

    def __init__(self, num_bins: int) -> None:
        """No bin is in use."""
        self._leaves = 1 << max(0, num_bins - 1).bit_length()
        self._tree = [-1] * (2 * self._leaves)

    def find(self, length: int) -> int:
        """Lowest slot with room for `length`, or -1."""
        tree, node, leaves = self._tree, 1, self._leaves
        if tree[1] < length:
            return -1
        while node < leaves:
            node *= 2
            if tree[node] < length:
                node += 1
        return node - leaves

    def update(self, slot: int, room: int) -> None:
        """The bin has this much room now; -1 takes it out of use."""
        tree, node = self._tree, slot + self._leaves
        tree[node] = room
        while node > 1:
            other = tree[node ^ 1]
            if other > room:
                room = other
            node >>= 1
            if tree[node] == room:
                return
            tree[node] = room

"""Always-on counters: what every operator did, where every sample went.

Plain integers, written by one thread each and read by anyone. Per-batch work is one list append; the sums are made when
someone asks, or once in `SETTLE_EVERY` batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from headrace.core.block import DATASET, PIECE, Drop, Ints, Origin

SETTLE_EVERY: Final = 64


@dataclass(slots=True)
class OperatorCounters:
    """One operator: rows in and out, and the time its code ran (summed over workers)."""

    name: str
    rows_in: int = 0
    rows_out: int = 0
    blocks: int = 0
    busy_ns: int = 0

    def add(self, rows_in: int, rows_out: int, busy_ns: int) -> None:
        """Count one block."""
        self.rows_in += rows_in
        self.rows_out += rows_out
        self.blocks += 1
        self.busy_ns += busy_ns


@dataclass(slots=True)
class Counters:
    """The engine's side of a run."""

    operators: list[OperatorCounters]
    datasets: dict[int, str]
    handed_out: Counter[int] = field(default_factory=Counter)
    dropped: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    dropped_tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: int = 0
    log: Callable[[Drop], None] | None = None
    """Told of each record that a stateful operator refused."""

    def hand_out(self, ids: Ints) -> None:
        """Count pointers leaving the curriculum."""
        for dataset, n in _by_dataset(ids):
            self.handed_out[dataset] += n

    def drop(self, drops: Iterable[Drop]) -> None:
        """Count samples (and tokens) that ended early."""
        for drop in drops:
            for dataset, n in _by_dataset(drop.ids[drop.ids[:, PIECE] == 0]):
                self.dropped[dataset, drop.operator, drop.reason] += n
            if drop.refusal is not None and self.log is not None:
                self.refused += 1
                self.log(drop)
            if drop.tokens:
                self.dropped_tokens[drop.operator, drop.reason] += drop.tokens


@dataclass(slots=True)
class Deliveries:
    """What the loop received, since its iterator was made."""

    batches: int = 0
    rows: int = 0
    tokens: int = 0
    padded: int = 0
    """Masked batches that filled steps at the end."""
    left_over: Deliveries | None = None
    """Batches past the last step that every group could fill: made, and not delivered."""
    _by_dataset: Counter[int] = field(default_factory=Counter)
    _recent: list[Origin] = field(default_factory=list)

    def add(self, origin: Origin, tokens: int) -> None:
        """Count one delivered batch or record."""
        self.batches += 1
        self.rows += len(origin)
        self.tokens += tokens
        self._recent.append(origin)
        if len(self._recent) >= SETTLE_EVERY:
            self._settle()

    def by_dataset(self) -> Counter[int]:
        """Samples delivered, by dataset id. A sample cut into pieces counts with its first."""
        self._settle()
        return self._by_dataset

    def _settle(self) -> None:
        recent, self._recent = self._recent, []
        if not recent:
            return
        ids = np.concatenate([origin.begun() for origin in recent])
        for dataset, n in _by_dataset(ids[ids[:, PIECE] == 0]):
            self._by_dataset[dataset] += n


def _by_dataset(ids: Ints) -> list[tuple[int, int]]:
    if not len(ids):
        return []
    counts = np.bincount(ids[:, DATASET])
    return [(int(dataset), int(counts[dataset])) for dataset in np.flatnonzero(counts)]

"""Always-on counters: what every operator did, where every sample went.

A run that was restored does some work again (`run/account.py`). Its operators' rows, blocks and times are those of all that ran
here; samples count in the run that delivers or drops them, and those of the repetition are `replayed`.

Plain integers, written by one thread each and read by anyone. Per-batch work is one append; the sums are made when
someone asks, or once in `SETTLE_EVERY` times.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from headrace.core.block import DATASET, PIECE, Drop, Ints, Origin
from headrace.core.refusal import Refusal

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


def _starts(ids: Ints, spans: Ints | None) -> Ints:
    """Where each segment begins in its piece, int64 `[m]`: past zero, it goes on from an earlier row."""
    return np.zeros(len(ids), np.int64) if spans is None else spans[:, 0]


class SampleCounts:
    """Samples by dataset id. One thread adds, any may ask."""

    __slots__ = ("_lock", "_recent", "_sums")

    def __init__(self) -> None:
        """None yet."""
        self._sums: Counter[int] = Counter()
        self._recent: deque[tuple[Ints, Ints | None]] = deque()
        self._lock = threading.Lock()

    def add(self, ids: Ints, spans: Ints | None = None) -> None:
        """Count rows of origins; with `spans`, segments that begin a piece. A sample cut into pieces counts with its first."""
        self._recent.append((ids, spans))
        if len(self._recent) >= SETTLE_EVERY:
            self._settle()

    def sums(self) -> Counter[int]:
        """What was counted so far."""
        self._settle()
        return self._sums.copy()

    def _settle(self) -> None:
        with self._lock:
            recent = [self._recent.popleft() for _ in range(len(self._recent))]
            if not recent:
                return
            inside = np.concatenate([ids[:, PIECE] for ids, _ in recent])  # zero where a sample begins
            datasets = np.concatenate([ids[:, DATASET] for ids, _ in recent])
            if any(spans is not None for _, spans in recent):
                inside |= np.concatenate([_starts(ids, spans) for ids, spans in recent])
            later = np.count_nonzero(inside)  # not any(), which imports: this also runs while the interpreter ends
            counts = np.bincount(datasets[inside == 0] if later else datasets)
            for dataset in np.flatnonzero(counts).tolist():
                self._sums[dataset] += int(counts[dataset])


@dataclass(slots=True)
class Share:
    """What one group's batches account for: what was dropped on the way to them and, if lanes are shared, all that has left."""

    left: SampleCounts = field(default_factory=SampleCounts)
    dropped: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    dropped_tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: int = 0


@dataclass(slots=True)
class Counters:
    """The engine's side of a run."""

    operators: list[OperatorCounters]
    datasets: dict[int, str]
    handed_out: SampleCounts = field(default_factory=SampleCounts)
    replayed: SampleCounts = field(default_factory=SampleCounts)
    shares: dict[int, Share] = field(default_factory=dict)
    """By data-parallel group."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while drops are counted: by the engine's thread, or by one that asks for a summary."""
    shared: bool = False
    """Whether batches of several groups are computed here."""
    log: Callable[[str, list[int], Refusal], None] | None = None
    """Told of each record that was refused: by which operator, its row of `Origin.ids`, and why."""

    def hand_out(self, ids: Ints) -> None:
        """Count pointers leaving the curriculum."""
        self.handed_out.add(ids)

    def share(self, group: int) -> Share:
        """What a group's batches account for."""
        return self.shares.get(group) or self.shares.setdefault(group, Share())

    def count(self, drop: Drop, group: int) -> None:
        """Count samples (and tokens) that ended early, on the way to a batch of this group."""
        share, ids = self.share(group), drop.ids
        if len(ids):
            counts = np.bincount(ids[ids[:, PIECE] == 0, DATASET])  # a sample cut into pieces counts with its first
            for dataset in np.flatnonzero(counts).tolist():
                share.dropped[dataset, drop.operator, drop.reason] += int(counts[dataset])
            if self.shared:
                share.left.add(ids)
        if drop.tokens:
            share.dropped_tokens[drop.operator, drop.reason] += drop.tokens

    def dropped(self) -> Counter[tuple[int, str, str]]:
        """Samples dropped on the way to any group, by dataset id, operator and reason."""
        total: Counter[tuple[int, str, str]] = Counter()
        with self.lock:
            for share in self.shares.values():
                total.update(share.dropped)
        return total

    def handed_out_for(self, group: int) -> Counter[int]:
        """Samples handed out that a group delivered or dropped, or whose group is not known yet."""
        handed_out = self.handed_out.sums()
        for other, share in list(self.shares.items()):
            if other != group:
                handed_out.subtract(share.left.sums())
        return handed_out


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
    _samples: SampleCounts = field(default_factory=SampleCounts)

    def add(self, origin: Origin, tokens: int) -> None:
        """Count one delivered batch or record."""
        self.batches += 1
        self.rows += len(origin)
        self.tokens += tokens
        self._samples.add(origin.ids, origin.spans)

    def by_dataset(self) -> Counter[int]:
        """Samples delivered, by dataset id."""
        return self._samples.sums()

"""Did two runs deliver the same stream? Compare the logs of `options(digest=True, digest_log=path)`.

    from headrace import verify
    difference = verify.diff("run-a/digests.jsonl", ["run-b/rank0.jsonl", "run-b/rank1.jsonl"])
    print(difference or "the same stream")

Either side is one log or the logs of several ranks, and each log may hold several legs (a run that was stopped and resumed).
Batches are compared by their place in the global stream, so neither side's number of ranks matters. What was delivered decides, not
how it was asked for: runs of different recipes that delivered the same are the same stream, with a warning, since what follows
will most likely differ.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.core.digest import RollingDigest
from headrace.core.lanes import Topology, Turn
from headrace.errors import DataError, FormatError
from headrace.run.digest import FORMAT, Group, Leg

_log = logging.getLogger("headrace")

Logs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample by dataset name, shard number and row."""

    dataset: str
    shard: int
    row: int

    def __str__(self) -> str:
        return f"dataset {self.dataset!r}, shard {self.shard}, row {self.row}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two streams differ.

    step: global step, if `batches_per_step` was given. batch: global number. row: row in the batch, None where a batch is missing
    or differs as a whole. sample_a, sample_b: the sample at that place; None on a side that has none there.
    """

    what: str
    step: int | None
    batch: int
    lane: int
    row: int | None
    sample_a: Sample | None
    sample_b: Sample | None
    where_a: str
    where_b: str

    @property
    def dataset(self) -> str | None:
        """The dataset of the sample that differs."""
        sample = self.sample_a or self.sample_b
        return None if sample is None else sample.dataset

    def __str__(self) -> str:
        step = "" if self.step is None else f"step {self.step}, "
        row = "" if self.row is None else f", row {self.row}"
        a, b = self.sample_a or "nothing", self.sample_b or "nothing"
        samples = f" ({a})" if a == b else f" (a: {a}; b: {b})"
        return f"{step}batch {self.batch}, lane {self.lane}{row}: {self.what}{samples} [a: {self.where_a}; b: {self.where_b}]"


@dataclass(frozen=True, slots=True)
class StreamDigest:
    """Digests of everything in a set of logs, 32 hex digits; equal for equal streams on any topology."""

    batches: int
    first: int
    end: int
    digest: str
    lanes: dict[int, str]


def diff(log_a: Logs, log_b: Logs, *, batches_per_step: int | None = None) -> Difference | None:
    """The first difference between two streams, in global order, as far as both go; None if there is none.

    A batch that one side holds twice (a leg that was resumed from before the end of the last one, or peers that receive the same
    batches) must be the same both times; where it is not, that is the difference, and `a` and `b` are the two times.

    DataError if no batch is in both: then nothing was compared. Where all that is in both is the same, but the runs are of
    different recipes or numbers of lanes, a warning says so.
    """
    a, b = _Stream(log_a), _Stream(log_b)
    found = _first(a, b)
    if found is None:
        _check_compared(a, b)
        return None
    return found if batches_per_step is None else replace(found, step=found.batch // batches_per_step)


def summary(logs: Logs) -> StreamDigest:
    """Digests of the stream in these logs; DataError if they hold one batch twice and differently."""
    stream = _Stream(logs)
    if stream.clash is not None:
        raise DataError(f"these logs contradict each other: {stream.clash}")
    rolling = RollingDigest()
    for j, entry in stream.entries.items():
        rolling.add(j, entry.lane, entry.digest)
    lanes = {lane: f"{value:032x}" for lane, value in sorted(rolling.lanes.items())}
    return StreamDigest(rolling.batches, min(stream.entries, default=0), stream.end, f"{rolling.total:032x}", lanes)


# ---------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------


class _Brief(msgspec.Struct):
    """What is kept of every line; the rest is read again where two lines differ."""

    j: list[int]
    lane: list[int]
    digests: bytes


@dataclass(frozen=True, slots=True)
class _Batch:
    """One batch of a group. samples int64 `[m, 3]`; rows int64 `[m]`, the row of each sample; marks uint64, one a row or none."""

    samples: NDArray[np.int64]
    rows: NDArray[np.int64]
    marks: NDArray[np.uint64]


@dataclass(slots=True)
class _Leg:
    head: Leg
    path: str
    last: int = -1
    """Place of the last batch, in the order of delivery."""

    def place(self, j: int) -> int:
        """Where batch `j` stands in the order of delivery; -1 if another group delivers it."""
        head, turn = self.head, Turn(j % self.head.lanes, j // self.head.lanes, mine=True)
        topology = Topology(head.lanes, head.groups, head.group, head.mapping)
        return topology.place(turn) if topology.owner(turn) == head.group else -1

    def covers(self, j: int) -> bool:
        """Whether batch `j` should be in here."""
        head = self.head
        begun = head.position // head.groups * head.groups if head.mapping == "contiguous" else head.position
        return begun <= self.place(j) <= self.last


@dataclass(slots=True)
class _Entry:
    lane: int
    digest: bytes
    leg: _Leg
    offset: int
    index: int

    def read(self) -> _Batch:
        """The whole of it."""
        with open(self.leg.path, "rb") as file:
            file.seek(self.offset)
            group = msgspec.json.decode(file.readline(), type=Group)
        return _batch(group, self.index)

    @property
    def where(self) -> str:
        return f"{self.leg.path}, byte {self.offset}, batch {self.index} of the line"


class _Stream:
    """The logs of one side, joined by global number."""

    def __init__(self, logs: Logs) -> None:
        self.entries: dict[int, _Entry] = {}
        self.legs: list[_Leg] = []
        self.clash: Difference | None = None
        for path in [logs] if isinstance(logs, (str, os.PathLike)) else logs:
            self._read(os.fspath(path))
        self.end = max(self.entries, default=-1) + 1

    def __str__(self) -> str:
        """Which batches there are."""
        if not self.entries:
            return "no batch at all"
        return f"{len(self.entries)} batches from number {min(self.entries)} to {self.end - 1}"

    def _read(self, path: str) -> None:
        decode = msgspec.json.Decoder(_Brief).decode
        leg: _Leg | None = None
        offset = 0
        with open(path, "rb") as file:
            for text in file:
                at, offset = offset, offset + len(text)
                if not text.endswith(b"\n"):
                    break  # a run that is being written, or was killed
                if text.startswith(b'{"headrace_digests"'):
                    leg = _Leg(_head(text, path, at), path)
                    self.legs.append(leg)
                    continue
                try:
                    brief = decode(text)
                except msgspec.DecodeError:
                    continue  # half a line: a killed run, resumed into the same file
                if leg is None:
                    raise FormatError(f"{path} is not a digest log: line at byte {at} comes before any run began")
                for index, (j, lane) in enumerate(zip(brief.j, brief.lane, strict=True)):
                    digest = brief.digests[16 * index : 16 * index + 16]
                    self._add(j, _Entry(lane, digest, leg, at, index))
        if leg is None:
            raise FormatError(f"{path} is not a digest log: no run begins in it; give what digest_log=... wrote")

    def _add(self, j: int, entry: _Entry) -> None:
        entry.leg.last = max(entry.leg.last, entry.leg.place(j))
        before = self.entries.setdefault(j, entry)
        earlier = self.clash is None or j < self.clash.batch
        if before.digest != entry.digest and earlier:
            self.clash = _compare(j, before, entry, "one side delivered this batch twice, differently")

    def should_have(self, j: int) -> _Leg | None:
        """The leg that batch `j` is missing from."""
        return next((leg for leg in self.legs if leg.covers(j)), None)


def _head(text: bytes, path: str, at: int) -> Leg:
    try:
        head = msgspec.json.decode(text, type=Leg)
    except msgspec.DecodeError as error:
        raise FormatError(f"{path}: the run that begins at byte {at} cannot be read: {error}") from None
    if head.headrace_digests > FORMAT:
        raise FormatError(f"{path} is a digest log of format {head.headrace_digests}; this headrace reads {FORMAT}")
    return head


# ---------------------------------------------------------------------------------------------------
# Comparing
# ---------------------------------------------------------------------------------------------------


def _first(a: _Stream, b: _Stream) -> Difference | None:
    clashes = [stream.clash for stream in (a, b) if stream.clash is not None]
    found = min(clashes, key=lambda clash: clash.batch, default=None)
    end = min(a.end, b.end) if found is None else found.batch
    for j in sorted(j for j in a.entries.keys() | b.entries.keys() if j < end):
        left, right = a.entries.get(j), b.entries.get(j)
        if left is not None and right is not None:
            if left.digest != right.digest:
                return _compare(j, left, right, "the batch differs")
        elif left is None and right is not None and (leg := a.should_have(j)):
            return _missing(j, right, "a", leg.path)
        elif right is None and left is not None and (leg := b.should_have(j)):
            return _missing(j, left, "b", leg.path)
    return found


def _check_compared(a: _Stream, b: _Stream) -> None:
    """Say so if there was nothing to compare, or if it is no surprise when the runs part later."""
    common = sorted(a.entries.keys() & b.entries.keys())
    if not common:
        raise DataError(
            f"these logs have no batch in common, so there is nothing to compare: a holds {a}, b holds {b}. Give the logs of "
            "all ranks and legs of a run together, as a list"
        )
    notes = ((j, _unlike(a.entries[j].leg, b.entries[j].leg)) for j in common)
    if (first := next(((j, note) for j, note in notes if note), None)) is not None:
        _log.warning(
            "the %d batches that both logs hold are the same, but from batch %d on %s: what follows may differ",
            len(common),
            *first,
        )


def _unlike(a: _Leg, b: _Leg) -> str:
    """How two legs differ that should be of one stream."""
    if a.head.lanes != b.head.lanes:
        return f"the runs have {a.head.lanes} and {b.head.lanes} lanes (canonical_replicas)"
    return "" if a.head.recipe == b.head.recipe else "the runs are of different recipes"


def _missing(j: int, entry: _Entry, side: str, path: str) -> Difference:
    sample = _sample(entry, entry.read(), 0)
    there, here = (None, sample) if side == "a" else (sample, None)
    a, b = (path, entry.where) if side == "a" else (entry.where, path)
    return Difference(f"{side} lacks this batch", None, j, entry.lane, None, there, here, a, b)


def _compare(j: int, left: _Entry, right: _Entry, what: str) -> Difference:
    """Down to the row and the sample."""
    a, b = left.read(), right.read()
    n = min(len(a.samples), len(b.samples))
    moved = np.flatnonzero((a.samples[:n] != b.samples[:n]).any(axis=1) | (a.rows[:n] != b.rows[:n]))
    row: int | None
    if len(moved) or len(a.samples) != len(b.samples):
        at = int(moved[0]) if len(moved) else n
        row = int((a if at < len(a.rows) else b).rows[at])
        what += ": other samples"
    elif len(a.marks) == len(b.marks) and (a.marks != b.marks).any():
        row = int(np.flatnonzero(a.marks != b.marks)[0])
        at = int(np.searchsorted(a.rows, row))
        what += ": the same samples, another payload"
    else:
        row, at = None, 0
        what += ": the same samples, but other fields, types, values or token ranges"
    if note := _unlike(left.leg, right.leg):
        what += f" ({note})"
    here, there = _sample(left, a, at), _sample(right, b, at)
    return Difference(what, None, j, left.lane, row, here, there, left.where, right.where)


def _batch(group: Group, index: int) -> _Batch:
    """One batch out of a group."""
    first, count = sum(group.segments[:index]), group.segments[index]
    samples = np.frombuffer(group.samples, "<i8" if group.wide else "<u4").reshape(-1, 3)[first : first + count]
    rows = np.arange(count)
    if group.packed[index]:
        skipped = sum(n for n, packed in zip(group.rows[:index], group.packed[:index], strict=True) if packed)
        counts = np.frombuffer(group.row_segments, "<u4")[skipped : skipped + group.rows[index]]
        rows = np.repeat(np.arange(len(counts)), counts)
    marked = sum(group.marked[:index])
    marks = np.frombuffer(group.marks, "<u8")[marked : marked + group.marked[index]]
    return _Batch(samples.astype(np.int64), rows, marks)


def _sample(entry: _Entry, batch: _Batch, at: int) -> Sample | None:
    if at >= len(batch.samples):
        return None
    dataset, shard, row = batch.samples[at].tolist()
    return Sample(entry.leg.head.datasets.get(str(dataset), f"number {dataset}"), shard, row)

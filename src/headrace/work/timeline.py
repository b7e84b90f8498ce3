"""The global stream of samples as segments, each a plain mixture.

Within a segment the weights are constant and nothing runs out, so the stream is `Interleave` and a start count per dataset. A
segment ends where a dataset leaves (`"redistribute"`), where the weights were changed on purpose, or where the stream ends. There
are at most as many segments as datasets plus changes, and each is found from the one before by arithmetic: ten or
10^12 samples cost the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.work.interleave import Interleave
from headrace.work.repeat import Repetition


@dataclass(frozen=True, slots=True)
class Era:
    """Weights in force from sample `start` of the global stream on.

    `lengths` gives the samples in the first passes of datasets that had other shards then.
    """

    start: int
    weights: Mapping[str, float]
    lengths: Mapping[str, Callable[[int], int]] = field(default_factory=dict)

    def length(self, name: str, passes: int, size: int) -> int:
        """Samples in this many passes of a dataset that has `size` rows now."""
        return self.lengths[name](passes) if name in self.lengths else passes * size


@dataclass(frozen=True, slots=True)
class Segment:
    """Samples `start <= n < stop` (None: no end) of the stream. `before` counts each dataset's samples ahead of `start`."""

    start: int
    stop: int | None
    interleave: Interleave
    before: Mapping[str, int]
    left: frozenset[str]

    def counts(self, n: int) -> dict[str, int]:
        """Samples of each dataset among the first `n` of the stream, `n` within the segment."""
        out = dict(self.before)
        for name, count in zip(self.interleave.names, self.interleave.counts(n - self.start), strict=True):
            out[name] += count
        return out


class Timeline:
    """Segments of one stream, found as far as asked for."""

    def __init__(self, eras: Sequence[Era], sizes: Mapping[str, int], repetition: Repetition) -> None:
        self._eras = list(eras)
        self._sizes = dict(sizes)
        self._repetition = repetition
        self._found: list[Segment] = []
        self._more = self._segments(eras)

    def __reduce__(self) -> tuple[Any, ...]:
        return Timeline, (self._eras, self._sizes, self._repetition)

    def total(self) -> int | None:
        """Samples in the stream; None without end."""
        for _ in self._more_segments():
            pass
        return self._found[-1].stop if self._found else 0

    def pieces(self, start: int, stop: int) -> list[tuple[Segment, int, int]]:
        """Parts of `[start, stop)` by segment; less than asked for where the stream ends."""
        self._reach(stop)
        out: list[tuple[Segment, int, int]] = []
        for segment in self._found:
            end = stop if segment.stop is None else min(stop, segment.stop)
            if max(start, segment.start) < end:
                out.append((segment, max(start, segment.start), end))
        return out

    def counts(self, n: int) -> dict[str, int]:
        """Samples of each dataset among the first `n` of the stream (all of them, past its end)."""
        self._reach(n)
        for segment in self._found:
            if segment.stop is None or n <= segment.stop:
                return segment.counts(max(n, segment.start))
        last = self._found[-1] if self._found else None
        return dict.fromkeys(self._sizes, 0) if last is None or last.stop is None else last.counts(last.stop)

    def left(self, n: int) -> frozenset[str]:
        """Datasets that have left for good by sample `n`."""
        self._reach(n + 1)
        gone: frozenset[str] = frozenset()
        for segment in self._found:
            if segment.start <= n:
                gone = segment.left
        return gone

    def _reach(self, n: int) -> None:
        for segment in self._more_segments():
            if segment.stop is None or segment.stop >= n:
                return

    def _more_segments(self) -> Iterator[Segment]:
        """Segments found before, then new ones."""
        yield from list(self._found)
        for segment in self._more:
            self._found.append(segment)
            yield segment

    def _segments(self, eras: Sequence[Era]) -> Iterator[Segment]:
        before = dict.fromkeys(self._sizes, 0)
        for era, following in zip(eras, [*eras[1:], None], strict=True):
            for segment in self._segments_of(era, None if following is None else following.start, before):
                yield segment
                if segment.stop is None:
                    return
                before = segment.counts(segment.stop)

    def _segments_of(self, era: Era, until: int | None, before: Mapping[str, int]) -> Iterator[Segment]:
        """Segments of one era, up to its end or to where the stream ends before."""
        start, left = era.start, frozenset[str]()
        while until is None or start < until:
            weights = {n: w for n, w in era.weights.items() if w > 0 and n not in left}
            if not weights:
                return
            interleave = Interleave.of(weights)
            end, name = self._end(era, interleave, before)
            stop = None if end is None else start + end
            if until is not None and (stop is None or stop >= until):
                stop, name = until, None
            if stop is None or stop > start:
                segment = Segment(start, stop, interleave, before, left)
                yield segment
                if stop is None:
                    return
                before, start = segment.counts(stop), stop
            if name is not None:
                if name == "" or self._repetition.ends_stream(name):
                    return
                left |= {name}

    def _end(self, era: Era, interleave: Interleave, before: Mapping[str, int]) -> tuple[int | None, str | None]:
        """Samples until something happens, and the dataset it happens to ("" for the end after N passes)."""
        passes = self._repetition.stop_after_passes
        if passes is not None:
            needs = [era.length(name, passes, self._sizes[name]) - before[name] for name in interleave.names]
            return max(0, *(interleave.latest(c, need) for c, need in enumerate(needs))), ""
        best: int | None = None
        name: str | None = None
        items: dict[int, int] = {}
        for c, n in enumerate(interleave.names):
            most = self._repetition.passes(n)
            if most is not None:
                items[c] = era.length(n, most, self._sizes[n]) - before[n]
        for c in sorted(items, key=lambda c: (interleave.earliest(c, items[c]), c)):
            if best is not None and interleave.earliest(c, items[c]) > best:
                break
            place = interleave.select(c, items[c])
            if best is None or place < best:
                best, name = place, interleave.names[c]
        return best, name

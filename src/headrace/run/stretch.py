"""One warning for a run that drops sample after sample and gives no batch: without an end of data, its loop waits for ever.

It goes by samples, not by time: slow work is no reason for a word.
"""

from __future__ import annotations

import logging

from headrace.observe.counters import Counters

LONG = 100_000
"""Samples dropped one after the other without a batch in between."""

_log = logging.getLogger("headrace")


class Stretch:
    """What was dropped since the last batch, over all lanes of an engine; they take turns, so that one without any holds up all."""

    def __init__(self, counters: Counters) -> None:
        """Nothing yet."""
        self._counters = counters
        self._since: int | None = 0
        """Dropped up to the first cut after the last batch; None before that cut."""
        self._told = False

    def ended(self) -> None:
        """A batch leaves a lane."""
        self._since = None

    def grows(self) -> None:
        """A cut leaves a lane: all that was dropped before it is counted."""
        if self._told:
            return
        dropped = self._counters.dropped()
        total = sum(dropped.values())
        if self._since is None:
            self._since = total
        elif total - self._since >= LONG:
            self._told = True
            names = self._counters.datasets
            most = sorted(dropped.items(), key=lambda entry: -entry[1])[:4]
            _log.warning(
                "no batch for a long stretch: the last %d samples were all dropped, and the run goes on. Dropped so far: %s.",
                total - self._since,
                ", ".join(f"{n} of {names[dataset]!r} ({operator}: {why})" for (dataset, operator, why), n in most),
            )

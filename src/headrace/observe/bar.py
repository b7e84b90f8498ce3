"""A progress bar on request: records/s, tokens/s, and which operator is the bottleneck.

The only file that imports rich. Quiet when the output is not a terminal, unless a console is handed in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from headrace.errors import ConfigError
from headrace.observe.summary import PipelineSummary

EVERY_S: Final = 0.5


class ProgressBar:
    """Shows snapshots of a run until `close()`."""

    def __init__(self, snapshot: Callable[[], PipelineSummary], total: int | None = None, console: Any = None) -> None:
        """`total`: rows expected, if known."""
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        except ImportError:
            raise ConfigError(
                "options(progress=True) needs the rich package: pip install 'headrace[progress]'"
            ) from None
        self._snapshot, self._before, self._last = snapshot, time.perf_counter(), (0, 0)
        self._console = console if console is not None else Console(stderr=True)
        self._shown = bool(self._console.is_terminal)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[rate]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[slowest]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=False,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=total, rate="starting", slowest="")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-progress", daemon=True)
        if self._shown:
            self._progress.start()
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.refresh()

    def refresh(self) -> None:
        """Read the counters and draw."""
        summary, now = self._snapshot(), time.perf_counter()
        span = max(now - self._before, 1e-9)
        rows, tokens = summary.rows - self._last[0], summary.tokens - self._last[1]
        self._before, self._last = now, (summary.rows, summary.tokens)
        rate = f"{rows / span:,.0f} records/s"
        if summary.tokens:
            rate += f" {tokens / span / 1e6:,.2f} M tokens/s"
        self._progress.update(self._task, completed=summary.rows, rate=rate, slowest=summary.bottleneck())
        self._progress.refresh()

    def close(self) -> None:
        """Draw once more and let go of the terminal."""
        self._stop.set()
        if self._shown:
            self._thread.join(timeout=1.0)
            self.refresh()
            self._progress.stop()

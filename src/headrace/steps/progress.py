"""A progress bar, on request; the one file that imports rich."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from headrace.errors import ConfigError

_EVERY = 64  # items between two updates


def shown(items: Iterator[Any], total: int | None, name: str) -> Iterator[Any]:
    """Yield `items` with a bar on standard error; silent where that is not a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError as error:
        raise ConfigError("progress=True needs rich: pip install 'headrace[progress]'") from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)
        waiting = 0
        for item in items:
            yield item
            waiting += 1
            if waiting == _EVERY:
                bar.advance(task, waiting)
                waiting = 0
        bar.advance(task, waiting)

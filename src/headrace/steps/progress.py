"""A progress bar on request: inputs that are done, whatever number of outputs they have. The one file here that imports rich."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from headrace.errors import ConfigError


def shown(
    outputs: Iterator[Any], total: int | None, name: str, done: Callable[[], int], console: Any = None
) -> Iterator[Any]:
    """Yield `outputs` with a bar on standard error, of `done()` inputs in `total`; silent where that is not a terminal."""
    if console is None and not sys.stderr.isatty():
        yield from outputs
        return
    try:
        from rich.console import Console, RenderableType
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError as error:
        raise ConfigError("progress=True needs rich: pip install 'headrace[progress]'") from error
    before = done()

    class Bar(Progress):
        """Looks at the count whenever it is drawn, so that items without outputs move it too."""

        def get_renderables(self) -> Iterable[RenderableType]:
            for task in self.tasks:
                task.completed = done() - before
            return super().get_renderables()

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console or Console(stderr=True), transient=True) as bar:
        bar.add_task(name, total=total)
        yield from outputs

"""The `headrace` command.

Each topic is one file; it is imported only when it is asked for, so that `headrace --help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from headrace.errors import HeadraceError

# Topic, and where its app is.
TOPICS = {"pp": "headrace.cli.pp:app"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; give the exit status. A fault of the user's is one message on standard error, without a traceback."""
    try:
        from cyclopts import App
    except ModuleNotFoundError:
        print("the headrace command needs its extra: pip install 'headrace[cli]'", file=sys.stderr)
        return 1
    app = App(name="headrace", help="Carries data to a model.", result_action="return_value")
    for name, place in TOPICS.items():
        app.command(place, name=name)
    try:
        status = app(list(argv) if argv is not None else None)
    except (HeadraceError, OSError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    return status if isinstance(status, int) else 0

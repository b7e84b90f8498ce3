"""The `headrace` command.

Each topic is one file; it is imported only when it is asked for, so that `headrace --help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from headrace.errors import HeadraceError

# Topic, and where its app is.
TOPICS = {"pp": "headrace.cli.pp:app"}

SIGPIPE_STATUS = 128 + 13  # what a shell reports of a tool whose reader has gone


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; give the exit status. A fault of the user's is one message on standard error, without a traceback.

    A reader that has seen enough (`| head -1`) ends the command without a word.
    """
    try:
        from cyclopts import App
    except ModuleNotFoundError:
        print("the headrace command needs its extra: pip install 'headrace[cli]'", file=sys.stderr)
        return 1
    app = App(name="headrace", help="Carries data to a model.", result_action="return_value")
    for name, place in TOPICS.items():
        app.command(place, name=name)
    try:
        try:
            status = app(list(argv) if argv is not None else None)
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is no error, and not when the interpreter ends
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what is still in the buffer
        return SIGPIPE_STATUS
    except (HeadraceError, OSError) as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    return status if isinstance(status, int) else 0

"""The error of one unreadable row, and the list that keeps it from its neighbours."""

from __future__ import annotations

from headrace.core.op import BadRows
from headrace.errors import RecordError


class RowError(RecordError):
    """A row that cannot be read.

    `row` is its number in the shard, `position` its index among the rows asked for, `path` and `offset` (bytes from the
    start of the file, or None where the format has no such thing) say where to look.
    """

    def __init__(self, message: str, *, row: int, path: str, offset: int | None = None, position: int = 0) -> None:
        """Keep the place beside the sentence."""
        super().__init__(message)
        self.row = row
        self.path = path
        self.offset = offset
        self.position = position


def report(errors: list[RowError], bad: BadRows | None) -> None:
    """Hand `errors` to `bad` in the order of the rows asked for; without `bad`, raise the first of them."""
    if not errors:
        return
    errors.sort(key=lambda error: error.position)
    if bad is None:
        raise errors[0]
    for error in errors:
        bad.add(error.position, error)

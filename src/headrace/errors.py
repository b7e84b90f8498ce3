"""Every error headrace raises, as one tree.

    HeadraceError
    ├── ConfigError (ValueError)            a setting, argument or combination that cannot work
    │   ├── UnknownOptionError (TypeError)  a name nobody knows; says the nearest known one
    │   ├── CurriculumError                 a mixture, weight or dataset that cannot be dealt
    │   └── MissingDataError (FileNotFoundError)  a dataset whose path leads nowhere
    ├── DataError (ValueError)              bytes on disk or in a record that are not what they should be
    │   ├── FormatError                     a file that cannot be read: path, byte offset, reason
    │   ├── DataChangedError                a file that changed under the run: path, old and new size or time
    │   └── RecordError                     one record: dataset, shard, row, operator, field, value
    │       └── PayloadTypeError (TypeError)    a payload of a kind the operator cannot read
    ├── CheckpointError (RuntimeError)      a checkpoint that cannot be taken or used
    │   └── CheckpointMismatch              the recipe changed: every difference, old value and new
    ├── OperatorError (RuntimeError)        a user function raised: operator, sample, cause
    ├── WorkerDied (RuntimeError)           a worker process ended: signal, operator, samples it held
    ├── Cancelled (RuntimeError)            an iteration that was asked to stop
    ├── ScheduleError (ValueError)          a pipeline schedule that is incomplete, cyclic or unproved
    └── InternalError (RuntimeError)        our fault; asks to be reported

A message says what happened, where (dataset, shard, row, operator, rank), the value found, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


class HeadraceError(Exception):
    """Root of every error that headrace raises on purpose. Pickled and copied as it is: `__init__` does not run again."""

    def __reduce__(self) -> tuple[Any, ...]:
        kind, arguments, *attributes = super().__reduce__()
        return (_as_it_was, (kind, arguments), *attributes)


def _as_it_was(kind: type[HeadraceError], arguments: tuple[Any, ...]) -> HeadraceError:
    new = OSError.__new__ if issubclass(kind, OSError) else Exception.__new__
    error: HeadraceError = new(kind, *arguments)
    error.args = arguments
    return error


class ConfigError(HeadraceError, ValueError):
    """A setting, argument or combination of them that cannot work."""


class UnknownOptionError(ConfigError, TypeError):
    """A name that nobody knows."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        """Name the nearest of `known`, so that a slip of the pen costs seconds."""
        import difflib  # only a slip of the pen pays for it

        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")


class CurriculumError(ConfigError):
    """A mixture, weight or dataset that cannot be dealt."""


class MissingDataError(ConfigError, FileNotFoundError):
    """A dataset's path that leads nowhere."""


class DataError(HeadraceError, ValueError):
    """Bytes that are not what they should be."""


class FormatError(DataError):
    """A file that cannot be read."""


class DataChangedError(DataError):
    """A file that changed after it was indexed."""


class RecordError(DataError):
    """One record that an operator cannot use."""

    origin: tuple[int, ...] | None = None
    """Its row of `Origin.ids`, where the operator knows it."""


class PayloadTypeError(RecordError, TypeError):
    """A payload of a kind that an operator cannot read."""


class CheckpointError(HeadraceError, RuntimeError):
    """A checkpoint that cannot be taken or used."""


class CheckpointMismatch(CheckpointError):
    """The recipe differs from the one the checkpoint was taken with; `differences` lists each."""

    def __init__(self, differences: list[str], advice: str = "Restore with the old recipe.") -> None:
        """List every difference in the message, and say what to do."""
        self.differences, self.advice = differences, advice
        super().__init__(
            "this checkpoint was taken with another recipe:\n  - " + "\n  - ".join(differences) + f"\n{advice}"
        )


class OperatorError(HeadraceError, RuntimeError):
    """A user function raised."""


class WorkerDied(HeadraceError, RuntimeError):
    """A worker process ended without being asked to."""


class Cancelled(HeadraceError, RuntimeError):
    """An iteration that was asked to stop."""


class ScheduleError(HeadraceError, ValueError):
    """A pipeline schedule that is incomplete, cyclic, or unproved."""


class InternalError(HeadraceError, RuntimeError):
    """Our own fault."""

    def __init__(self, message: str) -> None:
        """Ask for a report."""
        super().__init__(f"{message} (this is a fault in headrace; please report it with this traceback)")

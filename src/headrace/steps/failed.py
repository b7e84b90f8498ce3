"""What stands in the output for an item that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.run.failure import Failure, pack, unpack

if TYPE_CHECKING:
    from typing import Any


class Failed:
    """Stands in the output for an item that failed, with `on_error="return"`.

    `error` is the exception, `step` the step that raised it, `item` a short text of its input, `traceback` the
    worker's traceback as text.
    """

    __slots__ = ("_failure",)

    def __init__(self, failure: Failure) -> None:
        """Wrap what the worker reported."""
        self._failure = failure

    @property
    def error(self) -> BaseException:
        """The exception that the step raised."""
        return self._failure.error

    @property
    def step(self) -> str:
        """The step that raised it."""
        return self._failure.where.removeprefix("step ")

    @property
    def item(self) -> str:
        """The step's input, shortened."""
        return self._failure.item

    @property
    def traceback(self) -> str:
        """The worker's traceback."""
        return self._failure.worker_traceback

    def raised(self) -> BaseException:
        """The exception with a note that says where it happened, to raise it after all."""
        return self._failure.raised()

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels whatever the exception is."""
        return _rebuild, (pack(self._failure),)

    def __repr__(self) -> str:
        return f"Failed({self.error!r}, step={self.step!r}, item={self.item})"


def _rebuild(packed: tuple[Any, ...]) -> Failed:
    return Failed(unpack(packed))

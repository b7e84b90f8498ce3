"""How an exception crosses a process boundary and still is what the user raised.

Many exceptions do not survive pickling: one with two constructor arguments comes back as a `TypeError` about
its constructor, one that holds a lock does not leave at all, and a pool that did not expect either waits for
ever. So the worker tries the round trip itself, and sends the best of four forms that works: the pickle, the
pickle by value (classes of the main script), the class with its arguments and without calling `__init__`, or
an `OperatorError` that carries name and message. The worker's traceback travels as text and becomes a note
(PEP 678) of the error raised here.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from headrace.errors import OperatorError

if TYPE_CHECKING:
    from typing import Any

_CONTROL = (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, StopAsyncIteration)


class Failure:
    """An item that failed: the error to raise, and where it happened.

    (A plain class: `dataclasses` alone is a fifth of a worker's start.)
    """

    __slots__ = ("died", "error", "item", "where", "worker", "worker_traceback")

    def __init__(
        self,
        error: BaseException,
        where: str = "",
        item: str = "",
        worker_traceback: str = "",
        worker: str = "",
        died: bool = False,
    ) -> None:
        """`where`: the operator or step; `item`: shortened; `worker`: "worker 1 (pid 4711)"; `died`: with all its memory."""
        self.error = error
        self.where = where
        self.item = item
        self.worker_traceback = worker_traceback
        self.worker = worker
        self.died = died

    def raised(self, index: int | None = None) -> BaseException:
        """The error with a note that says worker, step, item and the worker's traceback."""
        place = ", ".join(
            part
            for part in (
                f"in {self.where}" if self.where else "",
                f"item {index}" if index is not None else "",
                self.worker,
            )
            if part
        )
        note = f"headrace: {place}" if place else "headrace"
        note += f"\n  item: {self.item}" if self.item else ""
        if self.worker_traceback:
            note += "\n  worker's traceback:\n" + self.worker_traceback
        if note not in getattr(self.error, "__notes__", ()):
            self.error.add_note(note)
        return self.error


def shorten(item: Any) -> str:
    """A short text for any object, even one whose `__repr__` fails."""
    import reprlib  # with traceback below: only a failure pays

    short = reprlib.Repr()
    short.maxstring = short.maxother = 120
    short.maxdict = short.maxlist = short.maxtuple = 4
    try:
        return short.repr(item)[:300]
    except Exception as error:  # noqa: BLE001 (a user's __repr__ may raise anything; the report must still leave)
        return f"<{type(item).__name__} whose repr raised {type(error).__name__}>"


def from_exception(error: BaseException, where: str, item: Any) -> Failure:
    """A failure out of the exception being handled."""
    import traceback

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(tame(error, where), where, shorten(item), text)


def tame(error: BaseException, where: str) -> BaseException:
    """Exceptions that steer the interpreter become an `OperatorError`: a step must not end the program."""
    if not isinstance(error, _CONTROL):
        return error
    stand_in = OperatorError(
        f"{where or 'a step'} raised {type(error).__name__}({', '.join(map(repr, error.args))}), which would end the "
        "program or a loop of it; raise an ordinary exception instead"
    )
    stand_in.__cause__ = error
    return stand_in


def pack(failure: Failure) -> tuple[Any, ...]:
    """A form that can certainly be pickled."""
    fields = (failure.where, failure.item, failure.worker_traceback, failure.worker)
    return (_pack_error(failure.error), *fields)


def unpack(packed: tuple[Any, ...]) -> Failure:
    """The inverse of `pack`."""
    form, where, item, text, worker = packed
    return Failure(_unpack_error(form, text), where, item, text, worker)


def _pack_error(error: BaseException) -> tuple[Any, ...]:
    error.__traceback__ = None
    message = f"{type(error).__name__}: {_safe_str(error)}"
    for kind, dump in (("pickle", pickle.dumps), ("value", _by_value)):
        try:
            data = dump(error)
            if b"__main__" in data and kind == "pickle":
                continue
            if type(pickle.loads(data)).__name__ == type(error).__name__:  # noqa: S301 (our own bytes, a moment old)
                return (kind, data, message)
        except BaseException:  # noqa: BLE001 (a user's __init__ or __reduce__ runs here; the next form is tried)
            continue
    for arguments in (error.args, (_safe_str(error),)):
        try:
            state = {key: value for key, value in vars(error).items() if _travels(value)}
            return ("class", _by_value((type(error), arguments, state)), message)
        except BaseException:  # noqa: BLE001 (as above)
            continue
    return ("text", b"", message)


def _unpack_error(form: tuple[Any, ...], text: str) -> BaseException:
    kind, data, message = form
    try:
        if kind in ("pickle", "value"):
            return pickle.loads(data)  # noqa: S301 (from our own worker)
        if kind == "class":
            cls, arguments, state = pickle.loads(data)  # noqa: S301 (from our own worker)
            error: BaseException = cls.__new__(cls, *arguments)
            error.args = arguments
            error.__dict__.update(state)
            return error
    except BaseException as failed:  # noqa: BLE001 (its module may not import here; the text still tells)
        message += f" (its type could not be rebuilt here: {type(failed).__name__})"
    del text
    return OperatorError(message)


def _by_value(value: Any) -> bytes:
    import cloudpickle  # 50 ms that only a failure pays

    return cloudpickle.dumps(value, protocol=5)


def _travels(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 (what cannot be pickled stays behind, whatever the reason it gives)
        return False
    return True


def _safe_str(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 (a user's __str__ may raise anything)
        return f"<message lost: __str__ raised {type(broken).__name__}>"

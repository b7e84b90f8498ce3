"""Reads a pickle that does not load, as far as it goes: only the objects that cannot be made are missing.

Items travel together in one pickle, so one whose class raises in its constructor, or does not exist on this side, would take
its neighbours with it. `load` reads the same bytes again and puts an `Unreadable` in the place of each object that cannot be
made, and of each that would be made out of one. Whoever asked looks with `flaw` which items are concerned.

It runs on the interpreter's unpickler in Python, some fifty times slower than the usual one, and only after that has failed.
"""

from __future__ import annotations

import io
import pickle
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.run.wire import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from headrace.run.executor import Part

# Not KeyboardInterrupt: in the parent, that is the user at the keyboard.
_CAUGHT = (Exception, SystemExit, GeneratorExit)
_PLAIN = (list, dict, set)


def load(body: Any, buffers: Iterable[Any]) -> Any:
    """The object of a pickle, with `Unreadable` in it."""
    return _Unpickler(io.BytesIO(body), buffers=buffers).load()


def flaw(value: Any) -> Unreadable | None:
    """An `Unreadable` that `value` is or contains, or None. Made objects contain none, so only containers are looked into."""
    seen: set[int] = set()
    rest = [value]
    while rest:
        each = rest.pop()
        kind = type(each)
        if kind is Unreadable:
            return each
        if kind in (list, tuple, dict, set, frozenset) and id(each) not in seen:
            seen.add(id(each))
            rest.extend(each)
            if kind is dict:
                rest.extend(each.values())
    return None


def apart(items: Iterable[Any]) -> list[Any]:
    """The items, with an `Unreadable` in the place of each that contains one."""
    return [flaw(item) or item for item in items]


def _stretches(values: list[Any], ends: Iterable[int]) -> Iterator[tuple[int, list[Any], Unreadable | None]]:
    """Items in order, those whose outputs can be read together and each other one alone: how many, their outputs, what is
    wrong. `ends`: number of outputs after each item."""
    good: list[Any] = []
    count = at = 0
    for end in ends:
        outputs, at = values[at:end], end
        found = flaw(outputs)
        if found is None:
            good += outputs
            count += 1
            continue
        if count:
            yield count, good, None
            count, good = 0, []
        yield 1, outputs, found
    if count:
        yield count, good, None


def readable(part: Part, ends: bytes | None, worker: str, describe: Callable[[int], str]) -> Iterator[Part]:
    """What is left of a part with results that cannot be read: each is the failure of its own item and of no other."""
    good = part.count - (part.failure is not None)
    each_end = array("I", ends) if ends is not None else [len(part.values)] if good == 1 else range(1, good + 1)
    start, report = part.start, part.report
    for count, values, unreadable in _stretches(part.values, each_end):
        share = count / part.count
        piece = replace(
            part,
            start=start,
            count=count,
            values=values,
            failure=None,
            seconds=part.seconds * share,
            nbytes=int(part.nbytes * share),
            report=report,
        )
        if unreadable is not None:
            piece.failure = unreadable.failure(
                "receiving the result", "the result that came back from a worker process cannot be unpickled here"
            )
            piece.failure.worker, piece.failure.item = worker, describe(start)
            piece.values = []
            if report is not None:
                report.kept(len(values))
        yield piece
        start += count
        report = report.emptied() if report is not None else None
    if part.failure is not None:
        yield replace(part, start=start, count=1, values=[], seconds=0.0, nbytes=0, report=report)


_Base: Any = pickle._Unpickler  # pyright: ignore[reportPrivateUsage]  the one in Python, whose opcodes can be replaced


class _Unpickler(_Base):
    """Makes what can be made. Each method replaces an opcode that runs the code of a class."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except _CAUGHT as error:
            return Unreadable(error)

    def load_reduce(self) -> None:
        function, arguments = self._pop(2)
        self._make((function, arguments), lambda: function(*arguments))

    def load_newobj(self) -> None:
        cls, arguments = self._pop(2)
        self._make((cls, arguments), lambda: cls.__new__(cls, *arguments))

    def load_newobj_ex(self) -> None:
        cls, arguments, named = self._pop(3)
        self._make((cls, arguments, named), lambda: cls.__new__(cls, *arguments, **named))

    def load_frozenset(self) -> None:
        members = self.pop_mark()
        self._make((), lambda: frozenset(members))

    def load_build(self) -> None:
        self._change(self.stack[-2], self.stack[-1:], 1, super().load_build)

    def load_append(self) -> None:
        self._change(self.stack[-2], self.stack[-1:], 1, super().load_append)

    def load_appends(self) -> None:
        self._change(self.metastack[-1][-1], self.stack, None, super().load_appends)

    def load_setitem(self) -> None:
        self._change(self.stack[-3], self.stack[-2:], 2, super().load_setitem)

    def load_setitems(self) -> None:
        self._change(self.metastack[-1][-1], self.stack, None, super().load_setitems)

    def load_additems(self) -> None:
        self._change(self.metastack[-1][-1], self.stack, None, super().load_additems)

    dispatch = {  # noqa: RUF012 (as in the class above)
        **_Base.dispatch,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.FROZENSET[0]: load_frozenset,
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.ADDITEMS[0]: load_additems,
    }

    def _pop(self, number: int) -> list[Any]:
        parts = self.stack[-number:]
        del self.stack[-number:]
        return parts

    def _make(self, parts: Any, make: Callable[[], Any]) -> None:
        """Put the object that `make` returns on the stack."""
        made: Any = flaw(parts)
        try:
            self.stack.append(made or make())
        except _CAUGHT as error:
            self.stack.append(Unreadable(error))

    def _change(self, target: Any, parts: list[Any], number: int | None, change: Callable[[], None]) -> None:
        """Put `parts` into `target`: the last `number` of the stack, or those since the mark.

        An object that cannot take them is not what was sent: it is taken from the stack, and from the memory of objects that
        may be referred to again.
        """
        found = target if type(target) is Unreadable else None
        if found is None and type(target) not in _PLAIN:
            found = flaw(parts)
        marks = len(self.metastack)
        height = len(self.stack) - (number or 0)
        if found is None:
            try:
                change()
                return
            except _CAUGHT as error:
                found = Unreadable(error)
        if number is not None:
            del self.stack[height:]
        elif len(self.metastack) == marks:
            self.pop_mark()
        self.stack[-1] = found
        for key, value in reversed(self.memo.items()):
            if value is target:
                self.memo[key] = found
                break

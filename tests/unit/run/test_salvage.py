"""A pickle that does not load is read as far as it goes."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from headrace.run import wire
from headrace.run.executor import Part
from headrace.run.failure import Failure
from headrace.run.salvage import apart, flaw, load, readable
from headrace.run.wire import Unreadable


class Bad(Exception):
    """Comes back as a call with one argument."""

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(a)
        self.b = b


class BadState:
    def __setstate__(self, state: Any) -> None:
        raise ValueError(f"state {state}")


class BadList(list[Any]):
    def extend(self, values: Any) -> None:
        raise ValueError("no members")

    append = extend


class BadKey:
    """Cannot be hashed before it has its state."""

    def __init__(self) -> None:
        self.name = "x"

    def __hash__(self) -> int:
        return hash(self.name)


class Gone:
    """Its class is not there any more when it is read."""


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def with_state() -> BadState:
    made = BadState()
    made.__dict__["a"] = 1
    return made


def bad_member() -> Any:
    key = BadKey()
    key.name = {key}  # type: ignore[assignment]  # the set wants its hash while it is being made
    return key


CULPRITS: list[Callable[[], Any]] = [
    lambda: Bad(1, 2),
    with_state,
    lambda: BadList([1, 2]),
    lambda: BadList([1]),
    Gone,
    lambda: Holder(Bad(1, 2)),
    lambda: Holder([{"deep": (1, Bad(1, 2))}]),
    lambda: [{"deep": (1, {frozenset([2]): with_state()})}],
    lambda: OrderedDict(a=Bad(1, 2)),
    lambda: OrderedDict(a=1, b=with_state()),
    lambda: {Gone(): 1},
    lambda: {Gone(), 2},
    lambda: frozenset([Gone()]),
    lambda: np.array([Bad(1, 2), None]),
    bad_member,
]


def dumped(items: Any) -> tuple[bytes, list[Any]]:
    buffers: list[Any] = []
    return pickle.dumps(items, 5, buffer_callback=buffers.append), [bytearray(each.raw()) for each in buffers]


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.delattr(f"{__name__}.Gone")


@pytest.mark.parametrize("make", CULPRITS)
@pytest.mark.parametrize("many", [1, 2500])
def test_only_the_item_that_cannot_be_read_is_missing(
    make: Callable[[], Any], many: int, gone: Callable[[], None]
) -> None:
    shared = OrderedDict(a=1)
    good = [{"key": k, "array": np.arange(3), "holder": shared} for k in range(many)]
    body, buffers = dumped([*good, make(), *good, "end"])
    gone()
    with pytest.raises((TypeError, ValueError, AttributeError)):
        pickle.loads(body, buffers=buffers)
    items = apart(load(body, buffers))
    assert [n for n, item in enumerate(items) if type(item) is Unreadable] == [many]
    assert isinstance(items[many].error, (TypeError, ValueError, AttributeError))
    assert len(items) == 2 * many + 2 and items[-1] == "end"
    for item, wanted in zip([*items[:many], *items[many + 1 : -1]], 2 * good, strict=True):
        assert item["key"] == wanted["key"] and item["array"].tolist() == [0, 1, 2]
        assert type(item["holder"]) is OrderedDict and item["holder"] == shared


def test_what_refers_to_an_unreadable_object_is_unreadable_too() -> None:
    bad, state = Bad(1, 2), with_state()
    items = apart(load(*dumped([1, bad, [bad], Holder(bad), state, {"again": state}, 2])))
    assert [type(item) is Unreadable for item in items] == [False, True, True, True, True, True, False]
    assert items[1].error is items[3].error and "state {'a': 1}" in str(items[5].error)


def test_a_step_of_the_interpreter_is_not_an_objects_fault() -> None:
    with pytest.raises(EOFError):
        load(pickle.dumps([1, 2, 3])[:-4], [])
    value: list[Any] = [1]
    value.append(value)
    assert flaw(value) is None


class Report:
    def __init__(self) -> None:
        self.lost = 0

    def kept(self, outputs: int) -> None:
        self.lost += outputs

    def emptied(self) -> Report:
        return Report()


def split(part: Part, ends: bytes | None) -> Iterator[tuple[Any, ...]]:
    for each in readable(part, ends, "worker 0", str):
        failure = each.failure
        told = failure and (str(failure.error), failure.item, failure.worker)
        yield each.start, each.count, each.values, told, each.report.lost


def test_a_part_without_what_cannot_be_read() -> None:
    wrong = Unreadable(ValueError("wrong"))
    told = ("wrong", "12", "worker 0")
    last = Failure(KeyError(1), item="14", worker="worker 0")
    ends = b"".join(number.to_bytes(4, "little") for number in (2, 2, 4, 4))
    part = Part("key", 10, 5, ["a", "b", "c", [wrong]], last, 1.0, 100, Report())
    assert list(split(part, ends)) == [
        (10, 2, ["a", "b"], None, 0),
        (12, 1, [], told, 2),
        (13, 1, [], None, 0),
        (14, 1, [], ("1", "14", "worker 0"), 0),
    ]
    one_each = Part("key", 11, 2, [3, wrong], None, 1.0, 100, Report())
    assert list(split(one_each, None)) == [(11, 1, [3], None, 0), (12, 1, [], told, 1)]
    alone = Part("key", 12, 1, [3, wrong, 4], None, 1.0, 100, Report())
    assert list(split(alone, None)) == [(12, 1, [], told, 3)]
    assert wrong.error.__notes__ == [
        "headrace: the result that came back from a worker process cannot be unpickled here"
    ]


def test_a_packed_message_is_read_item_by_item() -> None:
    body, buffers = dumped([1, Bad(1, 2), 2])
    first, bad, last = wire.Packed(body, buffers).decode_apart()
    assert (first, last) == (1, 2) and type(bad) is Unreadable

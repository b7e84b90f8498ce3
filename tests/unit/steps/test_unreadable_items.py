"""Items and results that cannot be unpickled on the other side: each fails alone, at its place, by the policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from step_functions import PerKey

from headrace.steps import DROP, Failed, Pipeline, emit


class Bad(Exception):
    """Comes back as a call with one argument."""

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(a)
        self.b = b


def number_of(x: Any) -> Any:
    return "bad" if isinstance(x, Bad) else x


def bad_at_5(x: int) -> Any:
    return Bad(1, 2) if x == 5 else x


def few(x: int) -> Any:
    """0, 1 or 2 outputs an item."""
    for number in range(x % 3):
        yield Bad(1, 2) if (x, number) == (50, 1) else (x, number)


class Counting:
    """Says how often it saw each item."""

    def setup(self) -> None:
        self.seen: Counter[Any] = Counter()

    def __call__(self, x: int) -> Any:
        self.seen[x] += 1
        return Bad(1, 2) if x % 10 == 9 else (x, self.seen[x])


def items(number: int, *bad: int) -> list[Any]:
    return [Bad(1, 2) if k in bad else k for k in range(number)]


@pytest.mark.parametrize("bad", [(700,), (0, 300, 301, 999), tuple(range(200, 500))])
def test_an_item_that_no_worker_can_read_fails_alone(bad: tuple[int, ...]) -> None:
    with Pipeline([number_of], num_workers=2, on_error="skip") as pipeline:
        assert list(pipeline.map(items(1000, *bad))) == [k for k in range(1000) if k not in bad]
        stats = pipeline.statistics()
        assert (stats.received, stats.finished, stats.skipped) == (1000, 1000, len(bad))
        assert "receiving the item" in stats.errors[0] and "TypeError" in stats.errors[0]
    with Pipeline([number_of], num_workers=2, on_error="return") as pipeline:
        outputs = list(pipeline.map(items(1000, *bad)))
        assert [k for k, out in enumerate(outputs) if isinstance(out, Failed)] == list(bad)


def test_an_item_that_no_worker_can_read_is_an_error_at_its_place() -> None:
    got: list[Any] = []
    with Pipeline([number_of], num_workers=2) as pipeline:
        with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
            got.extend(pipeline.map(items(1000, 700)))
        assert got == list(range(700))
        assert "item 700" in "\n".join(caught.value.__notes__)
        assert "cannot be unpickled in the worker" in "\n".join(caught.value.__notes__)
        assert list(pipeline.map([1, 2])) == [1, 2]


def key_of(item: tuple[str, Any]) -> str:
    return item[0]


def test_with_keys_the_others_keep_their_order_and_state() -> None:
    given = [("a" if k % 2 else "b", Bad(1, 2) if k in (77, 300) else k) for k in range(600)]
    with Pipeline([PerKey()], num_workers=2, assign=key_of, on_error="skip") as pipeline:
        outputs = list(pipeline.map(given))
    seen: Counter[str] = Counter()
    wanted = []
    for key, number in given:
        if not isinstance(number, Bad):
            seen[key] += 1
            wanted.append((key, number, seen[key]))
    assert outputs == wanted


class Reader:
    def __init__(self, number: int, *bad: int) -> None:
        self.number, self.bad = number, bad

    def __iter__(self) -> Iterator[Any]:
        for k in range(self.number):
            yield Bad(1, 2) if k in self.bad else k


@pytest.mark.parametrize("assign", ["any", bool])
def test_an_item_of_an_emitter_that_nobody_can_read_fails_alone(assign: Any) -> None:
    with Pipeline([number_of], num_workers=1, on_error="skip", assign=assign) as pipeline:
        emit([Reader(1000, 300, 999)], pipeline)
        assert list(pipeline) == [k for k in range(1000) if k not in (300, 999)]
        assert pipeline.statistics().skipped == 2


def test_a_result_that_cannot_be_read_fails_alone() -> None:
    for number in (50, 5000):
        with Pipeline([bad_at_5], num_workers=1, on_error="skip") as pipeline:
            assert list(pipeline.map(range(number))) == [k for k in range(number) if k != 5]
            stats = pipeline.statistics()
            assert (stats.finished, stats.skipped, stats.steps[0].produced) == (number, 1, number)
            assert "receiving the result" in stats.errors[0] and stats.errors[0].endswith("item 5")
    with Pipeline([bad_at_5], num_workers=1, on_error="return") as pipeline:
        outputs = list(pipeline.map(range(50)))
        assert [k for k, out in enumerate(outputs) if isinstance(out, Failed)] == [5] and len(outputs) == 50


def test_a_result_that_cannot_be_read_is_an_error_at_its_place() -> None:
    got: list[Any] = []
    with Pipeline([bad_at_5], num_workers=2) as pipeline:
        with pytest.raises(TypeError, match="missing 1 required") as caught:
            got.extend(pipeline.map(range(50)))
        note = "\n".join(caught.value.__notes__)
        assert got == [0, 1, 2, 3, 4] and "item 5" in note and "worker" in note and "cannot be unpickled here" in note
        assert list(pipeline.map([7, 8])) == [7, 8]


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_all_outputs_of_its_item_are_lost_and_no_others(mode: Any) -> None:
    wanted = [(x, number) for x in range(300) for number in range(x % 3) if x != 50]
    with Pipeline([few, number_of], num_workers=1, on_error="skip", mode=mode) as pipeline:
        outputs = list(pipeline.map(range(300)))
        assert (
            outputs == wanted
            if mode == "staged"
            else [out for out in outputs if out != "bad"]
            == [(x, number) for x in range(300) for number in range(x % 3) if (x, number) != (50, 1)]
        )
    with Pipeline([few], num_workers=1, on_error="skip") as pipeline:
        assert list(pipeline.map(range(300))) == wanted
    with Pipeline([evens_bad_at_50], num_workers=1, on_error="return") as pipeline:
        outputs = list(pipeline.map(range(300)))
        assert isinstance(outputs.pop(25), Failed) and outputs == [x for x in range(0, 300, 2) if x != 50]


def evens_bad_at_50(x: int) -> Any:
    return DROP if x % 2 else Bad(1, 2) if x == 50 else x


@pytest.mark.parametrize("assign", ["any", bool])
def test_no_step_runs_twice_for_an_item_whose_neighbour_cannot_be_read(assign: Any) -> None:
    with Pipeline([Counting()], num_workers=1, on_error="skip", assign=assign) as pipeline:
        outputs = list(pipeline.map(range(1000)))
        assert outputs == [(k, 1) for k in range(1000) if k % 10 != 9]
        assert pipeline.statistics().skipped == 100

"""Laws of the step pipeline, over random graphs, failures, deaths and batch sizes.

* Ordered output equals a plain loop, whatever the runner, the mode and the size of batches.
* Unordered output is the same multiset.
* Every input is accounted for once: done, failed or skipped.

What a step does to an item is written in the item (so that the same workers serve many examples): `Item.acts[n]` is
what step `n` does.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import WorkerDied
from headrace.steps import DROP, Failed, Pipeline, batching

STEPS = 3


class Item(NamedTuple):
    uid: int
    path: tuple[int, ...]  # which of the outputs of each step so far
    acts: tuple[str, ...]
    folder: str
    load: bytes


class Broken(Exception):
    def __init__(self, uid: int, step: int) -> None:
        super().__init__(f"item {uid} broke in step {step}")


def attempts(item: Item, n: int) -> int:
    """Count a visit; returns how many there were before it."""
    path = Path(item.folder) / f"{item.uid}-{n}-{item.path}"
    with open(path, "ab") as file:
        file.write(b"x")
    return path.stat().st_size - 1


def act(item: Item, n: int) -> None:
    what = item.acts[n]
    if what == "raise":
        raise Broken(item.uid, n)
    if what == "die":
        raise WorkerDied(f"item {item.uid} died in step {n}")
    if what == "slow":
        time.sleep(0.003)
    if what.startswith("kill") and attempts(item, n) < int(what[4:]):
        os.kill(os.getpid(), signal.SIGKILL)


class Function:
    """Step `n`, with one output or none."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.__name__ = f"function{n}"

    def __call__(self, item: Item) -> Any:
        act(item, self.n)
        return DROP if item.acts[self.n] == "drop" else item._replace(path=(*item.path, 0))


class Generator:
    """Step `n`, with any number of outputs."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.__name__ = f"generator{n}"

    def __call__(self, item: Item) -> Iterator[Any]:
        what = item.acts[self.n]
        count = {"drop": 0, "pass": 1}.get(what, item.uid % 3 + (what == "late"))
        for k in range(count):
            yield item._replace(path=(*item.path, k))
        if what == "late":
            raise Broken(item.uid, self.n)
        act(item, self.n)


SHAPES = {"fff": (Function,) * 3, "fgf": (Function, Generator, Function), "ggf": (Generator, Generator, Function)}


def make_steps(shape: str) -> list[Any]:
    return [cls(n) for n, cls in enumerate(SHAPES[shape])]


def plain_loop(item: Item, steps: list[Any]) -> list[Any]:
    """What the steps give for one item, by the simplest program; a call that raises gives "broken" instead."""
    items: list[Any] = [item]
    for step in steps:
        following: list[Any] = []
        for one in items:
            if one == "broken":
                following.append(one)
                continue
            try:
                outputs = list(step(one)) if isinstance(step, Generator) else [step(one)]
            except Broken:
                outputs = ["broken"]
            following += [output for output in outputs if output is not DROP]
        items = following
    return items


def depth_first(item: Item, steps: list[Any]) -> tuple[list[Any], type[Exception] | None]:
    """What comes of one item until its first error, and that error's class.

    An output of a generator goes through the later steps before the generator goes on: so one of those may fail before the
    generator does, or before it kills its worker.
    """
    if not steps:
        return [seen(item)], None
    told: list[Any] = []
    try:
        for output in steps[0](item) if isinstance(steps[0], Generator) else [steps[0](item)]:
            if output is not DROP:
                outputs, failure = depth_first(output, steps[1:])
                told += outputs
                if failure is not None:
                    return told, failure
    except (Broken, WorkerDied) as error:
        return told, type(error)
    return told, None


def settled(item: Item, dies: int) -> Item:
    """The same item where nothing is killed: it dies for good (`dies`: from how many deaths on), or goes on."""

    def calm(what: str) -> str:
        if not what.startswith("kill"):
            return what
        return "die" if int(what[4:]) >= dies else "many"

    return item._replace(acts=tuple(map(calm, item.acts)))


def expect(items: list[Item], steps: list[Any], dies: int) -> list[list[Any]]:
    """For each item, its outputs (uid and path) and failures, where a call that fails does not keep others from going on."""
    calm = [settled(item, dies) for item in items]
    return [["died"] if "die" in item.acts else [seen(output) for output in plain_loop(item, steps)] for item in calm]


def seen(output: Any) -> Any:
    if isinstance(output, Failed):
        return "died" if isinstance(output.error, WorkerDied) else "broken"
    return output if isinstance(output, str) else (output.uid, output.path)


ACTS = st.sampled_from(["pass", "pass", "many", "many", "drop", "slow"])
BAD_ACTS = st.sampled_from(["pass", "many", "raise", "late", "drop"])


@st.composite
def item_lists(draw: st.DrawFn, acts: st.SearchStrategy[str], kills: list[str], most: int = 60) -> list[Item]:
    rows = draw(st.lists(st.tuples(acts, acts, acts), max_size=most))
    loads = draw(st.sampled_from([0, 10, 3000, 90_000]))
    deadly = (
        draw(st.dictionaries(st.integers(0, max(0, len(rows) - 1)), st.sampled_from(kills), max_size=1))
        if kills
        else {}
    )
    return [Item(uid, (), (deadly.get(uid, row[0]), row[1], row[2]), "", bytes(loads)) for uid, row in enumerate(rows)]


COMBINATIONS = [
    ("inline", "fgf", "fused"),
    ("inline", "ggf", "staged"),
    ("threads", "fff", "fused"),
    ("threads", "ggf", "staged"),
    ("process", "fff", "fused"),
    ("process", "ggf", "fused"),
    ("process", "fgf", "staged"),
]


@pytest.fixture(scope="module", params=COMBINATIONS, ids="-".join)
def combination(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    return request.param


@pytest.fixture(scope="module")
def pipelines(combination: tuple[str, str, str]) -> Iterator[Any]:
    """Pipelines of one combination, built when first asked for and used again by later examples."""
    runner, shape, mode = combination
    made: dict[tuple[bool, str], Pipeline] = {}

    def get(ordered: bool, on_error: str) -> Pipeline:
        if (ordered, on_error) not in made:
            options = {"runner": runner, "mode": mode, "ordered": ordered, "on_error": on_error}
            made[ordered, on_error] = Pipeline(make_steps(shape), num_workers=2, max_retries=2, **options).start()
        return made[ordered, on_error]

    yield get
    for pipeline in made.values():
        pipeline.close()


RELAXED = settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@RELAXED
@given(items=item_lists(ACTS, []), ordered=st.booleans(), most=st.sampled_from([1, 3, 4096]))
def test_output_equals_a_plain_loop(
    combination: tuple[str, str, str],
    pipelines: Any,
    monkeypatch: pytest.MonkeyPatch,
    items: list[Item],
    ordered: bool,
    most: int,
) -> None:
    steps = make_steps(combination[1])
    monkeypatch.setattr(batching, "MOST", most)
    pipeline = pipelines(ordered, "raise")
    before = pipeline.statistics()
    expected = [output for item in items for output in plain_loop(item, steps)]
    got = list(pipeline.map(items))
    if ordered:
        assert got == expected
    else:
        assert Counter(got) == Counter(expected)
    after = pipeline.statistics()
    assert after.received - before.received == len(items)
    assert after.in_flight == 0
    assert after.delivered - before.delivered == len(expected)
    first = after.steps[0].received - before.steps[0].received
    assert first == len(items)
    assert after.steps[-1].produced - before.steps[-1].produced == len(expected)


@RELAXED
@given(
    data=st.data(),
    ordered=st.booleans(),
    policy=st.sampled_from(["skip", "return"]),
    most=st.sampled_from([1, 5, 4096]),
)
def test_failures_and_deaths_are_accounted_for(
    combination: tuple[str, str, str],
    pipelines: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    ordered: bool,
    policy: str,
    most: int,
) -> None:
    runner, shape, _ = combination
    items = data.draw(item_lists(BAD_ACTS, ["kill1", "kill2", "kill9"] if runner == "process" else []))
    folder = str(tmp_path_factory.mktemp("visits"))
    items = [item._replace(folder=folder) for item in items]
    monkeypatch.setattr(batching, "MOST", most)
    pipeline = pipelines(ordered, policy)
    before = pipeline.statistics()
    told = expect(items, make_steps(shape), dies=3)
    got = [seen(output) for output in pipeline.map(items)]
    every = [outcome for outcomes in told for outcome in outcomes]
    wanted = every if policy == "return" else [outcome for outcome in every if not isinstance(outcome, str)]
    if ordered:
        assert got == wanted
    else:
        assert Counter(got) == Counter(wanted)
    after = pipeline.statistics()
    assert after.received - before.received == len(items)
    assert after.in_flight == 0
    failures = sum(isinstance(outcome, str) for outcome in every)
    assert after.skipped - before.skipped == (failures if policy == "skip" else 0)


@RELAXED
@given(data=st.data(), most=st.sampled_from([1, 5, 4096]))
def test_an_error_comes_at_its_place(
    combination: tuple[str, str, str],
    pipelines: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    most: int,
) -> None:
    runner, shape, mode = combination
    items = data.draw(item_lists(BAD_ACTS, ["kill1", "kill2", "kill9"] if runner == "process" else []))
    folder = str(tmp_path_factory.mktemp("visits"))
    items = [item._replace(folder=folder) for item in items]
    monkeypatch.setattr(batching, "MOST", most)
    good: list[Any] = []
    failed: Item | None = None
    failure: type[Exception] | None = None
    for item in items:
        outputs, failure = depth_first(settled(item, dies=3), make_steps(shape))
        if failure is not None:
            failed = item
            break
        good += outputs
    got: list[Any] = []
    error: BaseException | None = None
    try:
        got.extend(map(seen, pipelines(True, "raise").map(items)))
    except (Broken, WorkerDied) as raised:
        error = raised
    if failed is None:
        assert (got, error) == (good, None)
        return
    assert type(error) is failure
    if mode == "fused":
        assert got == good
    else:  # outputs of the failing item itself may have left before its failure did
        assert got[: len(good)] == good
        assert {uid for uid, _ in got[len(good) :]} <= {failed.uid}

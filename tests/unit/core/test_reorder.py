"""The ordering window and the dispatch of work, driven by random schedules without a single thread."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.reorder import Batch, Dispatch, Release, Stop, Window
from headrace.errors import InternalError


def drain(window: Window[int]) -> list[Release[int] | Stop]:
    out = []
    while (part := window.take()) is not None:
        out.append(part)
    return out


@given(
    sizes=st.lists(st.integers(1, 5), max_size=30),
    limit=st.integers(1, 6),
    ordered=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_input_leaves_once_and_in_order(sizes: list[int], limit: int, ordered: bool, seed: int) -> None:
    rng = random.Random(seed)
    window: Window[int] = Window(limit, ordered=ordered)
    todo, open_parts, left = list(sizes), [], []
    while todo or open_parts:
        while todo and window.room:
            size = todo.pop(0)
            first = window.submit(size)
            open_parts.append([first, 0, size])
        assert len(window) <= limit
        if not open_parts:  # nothing in work and no credit: what is finished was not taken yet
            left.extend(drain(window))
            continue
        part = rng.choice(open_parts)
        first, start, size = part
        count = rng.randint(1, size - start)
        if rng.random() < 0.2:
            count = 1
            window.failed(first, start, ValueError("x"))
        else:  # input i has i % 3 outputs
            outputs = [i for i in range(first + start, first + start + count) for _ in range(i % 3)]
            window.finished(first, start, count, outputs)
        part[1] += count
        if part[1] == size:
            open_parts.remove(part)
        if rng.random() < 0.7:
            left.extend(drain(window))
    left.extend(drain(window))
    assert window.idle
    assert window.taken == window.submitted == sum(sizes)
    covered = [i for part in left for i in range(part.index, part.index + part.count)]
    assert sorted(covered) == list(range(sum(sizes)))
    if ordered:
        assert covered == sorted(covered)
    for part in left:
        if isinstance(part, Release):
            assert list(part.outputs) == [i for i in range(part.index, part.index + part.count) for _ in range(i % 3)]


def test_an_error_leaves_at_its_place() -> None:
    window: Window[str] = Window(4)
    firsts = [window.submit() for _ in range(3)]
    error = ValueError("second")
    window.failed(firsts[1], 0, error)
    assert window.take() is None
    window.finished(firsts[2], 0, 1, ["c"])
    window.finished(firsts[0], 0, 1, ["a"])
    assert drain(window) == [Release(0, 1, ["a"]), Stop(1, error), Release(2, 1, ["c"])]


def test_inputs_nobody_began_can_be_taken_back() -> None:
    window: Window[int] = Window(4)
    first = window.submit(5)
    window.finished(first, 0, 2, [0, 1])
    window.retract(3)
    assert [part.outputs for part in drain(window)] == [[0, 1]] and window.idle
    assert window.submit(2) == 2
    window.retract(2)
    assert window.idle and window.submitted == 2


def test_unordered_leaves_as_finished() -> None:
    window: Window[str] = Window(4, ordered=False)
    firsts = [window.submit() for _ in range(2)]
    window.finished(firsts[1], 0, 1, ["b"])
    assert drain(window) == [Release(1, 1, ["b"])]


@pytest.mark.parametrize("ordered", [True, False])
def test_an_input_acknowledged_twice_is_an_internal_error(ordered: bool) -> None:
    window: Window[str] = Window(4, ordered=ordered)
    first = window.submit()
    window.finished(first, 0, 1, ["a"])
    if not ordered:
        window.take()
    with pytest.raises(InternalError, match="twice"):
        window.finished(first, 0, 1, ["a"])


class Workers:
    """Workers that exist only as a list: they run what they hold, hand back, and die, at random."""

    def __init__(self, count: int, depth: int, max_retries: int, seed: int) -> None:
        self.dispatch = Dispatch([count], depth=depth, max_retries=max_retries)
        self.rng = random.Random(seed)
        self.count = count
        self.done: list[tuple[object, int]] = []
        self.given_up: list[tuple[object, int]] = []
        self.ran_by: dict[tuple[object, int], int] = {}

    def step(self, poison: set[tuple[object, int]], hand_back: bool) -> None:
        while (order := self.dispatch.assign(self.rng.choice([None, 1, 3]))) is not None:
            worker, piece = order
            assert piece.batch.worker in (None, worker)
        busy = [worker for worker in range(self.count) if self.dispatch.holds(worker)]
        assert busy, "work is pending and no worker has any"
        worker = self.rng.choice(busy)
        piece = self.dispatch.holds(worker)[0]
        count = self.rng.randint(1, len(piece))
        for offset in range(count):
            if (piece.batch.key, piece.start + offset) in poison:
                self.die(worker, offset + 1)
                return
        if self.rng.random() < 0.1:
            self.die(worker, self.rng.choice([None, *range(count + 1)]))
            return
        if piece.batch.dropped:  # it has seen the mark before it began
            self.dispatch.acknowledged(worker, 0, last=True)
            return
        batch, start = self.dispatch.acknowledged(worker, count, last=hand_back or count == len(piece))
        for index in range(start, start + count):
            self.done.append((batch.key, index))
            self.ran_by[batch.key, index] = worker

    def die(self, worker: int, begun: int | None) -> None:
        self.given_up += [(lost.batch.key, lost.start) for lost in self.dispatch.died(worker, begun)]


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    workers=st.integers(1, 4),
    depth=st.integers(1, 3),
    hand_back=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_input_is_done_or_given_up_once(
    sizes: list[int], workers: int, depth: int, hand_back: bool, seed: int
) -> None:
    crew = Workers(workers, depth, 3, seed)
    every = {(key, index) for key, size in enumerate(sizes) for index in range(size)}
    poison = {one for one in every if crew.rng.random() < 0.1}
    bound = {key: key % workers for key in range(len(sizes)) if crew.rng.random() < 0.3}
    for key, size in enumerate(sizes):
        crew.dispatch.submit(Batch(key, list(range(size)), size, worker=bound.get(key)))
    while crew.dispatch.busy:
        crew.step(poison, hand_back)
    assert sorted(crew.done + crew.given_up) == sorted(every)
    assert poison <= set(crew.given_up)
    for (key, _), worker in crew.ran_by.items():
        assert bound.get(key, worker) == worker


@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=12),
    workers=st.integers(1, 4),
    depth=st.integers(1, 3),
    hand_back=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_what_is_dropped_is_run_no_more_and_the_rest_as_if_it_had_never_been(
    sizes: list[int], workers: int, depth: int, hand_back: bool, seed: int
) -> None:
    crew = Workers(workers, depth, 3, seed)
    for key, size in enumerate(sizes):
        worker = crew.rng.choice([None, key % workers])
        crew.dispatch.submit(Batch(key, list(range(size)), size, worker=worker))
    for _ in range(crew.rng.randrange(6)):
        if crew.dispatch.busy:
            crew.step(set(), hand_back)
    before = len(crew.done)
    crew.dispatch.drop(lambda key: key % 2 == 1)
    while crew.dispatch.busy:
        crew.step(set(), hand_back)
    assert [key for key, _ in crew.done[before:] if key % 2] == []
    done = [place for place in crew.done + crew.given_up if place[0] % 2 == 0]
    assert sorted(done) == [(key, index) for key, size in enumerate(sizes) if key % 2 == 0 for index in range(size)]


def test_a_death_over_dropped_work_blames_nobody() -> None:
    dispatch = Dispatch([1], max_retries=0)
    dispatch.submit(Batch("unwanted", [0, 1], 2))
    dispatch.submit(Batch("wanted", [0], 1))
    assert dispatch.assign() is not None and dispatch.assign() is not None
    dispatch.drop("unwanted".__eq__)
    assert dispatch.died(0, begun=1) == []
    assert dispatch.retries == 0
    worker, piece = dispatch.assign()
    assert piece.batch.key == "wanted" and dispatch.assign() is None
    dispatch.acknowledged(worker, 1, last=True)
    assert not dispatch.busy


def test_a_culprit_is_given_up_after_its_retries_and_its_neighbours_are_not() -> None:
    dispatch = Dispatch([1], max_retries=2)
    dispatch.submit(Batch("b", [0, 1, 2], 3))
    for _ in range(2):
        assert dispatch.assign() is not None
        assert dispatch.died(0, begun=2) == []
    dispatch.assign()
    (lost,) = dispatch.died(0, begun=2)
    assert (lost.start, lost.attempts) == (1, 3)
    rest = []
    while (order := dispatch.assign()) is not None:
        rest.append((order[1].start, order[1].stop))
        dispatch.acknowledged(0, len(order[1]), last=True)
    assert rest == [(0, 1), (2, 3)]


def test_the_tail_of_a_slow_batch_goes_to_whoever_is_free_first() -> None:
    dispatch = Dispatch([2], depth=1)
    dispatch.submit(Batch("slow", list(range(10)), 10))
    dispatch.submit(Batch("next", [0], 1))
    dispatch.submit(Batch("later", [0], 1))
    assert [dispatch.assign()[0], dispatch.assign()[0]] == [0, 1]
    assert dispatch.assign() is None
    assert dispatch.acknowledged(0, 1, last=True)[1] == 0
    worker, piece = dispatch.assign(2)
    assert (worker, piece.batch.key, piece.start, piece.stop) == (0, "slow", 1, 3)


def test_a_seat_whose_workers_die_before_they_begin_is_barren_and_nobody_is_to_blame() -> None:
    dispatch = Dispatch([1], max_retries=1)
    dispatch.submit(Batch("b", [0, 1], 2))
    for _ in range(3):
        assert not dispatch.barren(0)
        dispatch.assign()
        assert dispatch.died(0, None) == []
    assert dispatch.barren(0) and dispatch.retries == 0
    dispatch.assign()
    assert dispatch.died(0, 1) == []
    assert not dispatch.barren(0)


def test_deaths_at_one_input_after_the_other_are_not_barren() -> None:
    dispatch = Dispatch([1], max_retries=1)
    for key in range(10):
        dispatch.submit(Batch(key, [0], 1))
        dispatch.assign()
        assert dispatch.died(0, 1) == []
        dispatch.assign()
        assert len(dispatch.died(0, 1)) == 1
        assert not dispatch.barren(0)


def test_groups_keep_to_their_own_workers() -> None:
    dispatch = Dispatch([1, 2], depth=1)
    for key in range(4):
        dispatch.submit(Batch(key, [0], 1, group=key % 2))
    assert (dispatch.free(0), dispatch.free(1)) == (0, 0)
    sent = []
    while (order := dispatch.assign()) is not None:
        sent.append((order[0], order[1].batch.key))
    assert sent == [(0, 0), (1, 1), (2, 3)]
    dispatch.acknowledged(0, 1, last=True)
    assert dispatch.assign()[1].batch.key == 2


def test_with_a_workers_memory_all_goes_that_it_did_not_acknowledge() -> None:
    dispatch = Dispatch([1], max_retries=0)
    batch = Batch("a", "0123456", 7, worker=0)
    dispatch.submit(batch)
    assert dispatch.assign() is not None
    dispatch.acknowledged(0, 2, last=False)
    lost = dispatch.died(0, begun=3, with_memory=True)
    assert [each.start for each in lost] == [2, 3, 4]
    order = dispatch.assign()
    assert order is not None and (order[1].start, order[1].stop) == (5, 7)

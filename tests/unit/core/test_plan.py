"""From a chain to stages: what fuses, who runs where, and how workers are shared out."""

from __future__ import annotations

import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.plan import Node, compile_plan, describe, projection
from headrace.errors import ConfigError
from headrace.ops.batch import Batch
from headrace.ops.fetch import Fetch, SharedReaders
from headrace.ops.map import Filter, MapBatch, MapBlock, MapTransform, Materialize, Select
from headrace.ops.shuffle import Shuffle
from headrace.options import RuntimeOptions

FETCH = Node(Fetch(SharedReaders({})))


def stages(*nodes: Node, cpus: int = 4, **options: Any) -> list[tuple[str, str, int]]:
    plan = compile_plan([FETCH, *nodes], RuntimeOptions(**options), cpus)
    return [(stage.label, stage.runner, stage.workers) for stage in plan.stages]


def test_stateless_neighbours_fuse_and_stateful_ones_run_on_the_driver() -> None:
    assert stages(Node(MapTransform(dict)), Node(Filter(bool)), Node(Shuffle(8)), Node(Batch(2))) == [
        ("fetch+map_transform+filter", "threads", 4),
        ("shuffle", "inline", 0),
        ("batch", "inline", 0),
    ]


def test_a_wish_of_its_own_makes_a_stage_of_its_own() -> None:
    assert stages(Node(MapTransform(dict), 2), Node(MapTransform(dict), 16), Node(Batch(2))) == [
        ("fetch+map_transform", "threads", 4),
        ("map_transform", "threads", 16),
        ("batch", "inline", 0),
    ]


def test_light_operators_join_any_stage() -> None:
    assert stages(Node(Select(("x",))), Node(Materialize()), Node(Batch(2)))[0][0] == "fetch+select+materialize"


def test_processes_are_for_everything_but_fetch_and_finished_batches() -> None:
    assert stages(Node(MapTransform(dict)), Node(Batch(2)), Node(MapBatch(len)), runner="process") == [
        ("fetch", "threads", 4),
        ("map_transform", "process", 4),
        ("batch", "inline", 0),
        ("map_batch", "threads", 4),
    ]
    assert stages(Node(MapTransform(dict), None, "process"), Node(Batch(2)))[1] == ("map_transform", "process", 4)


def test_a_stage_runs_where_it_is_asked_to_by_its_number() -> None:
    chain = [Node(MapTransform(dict), 2), Node(MapTransform(dict), 3), Node(Batch(2)), Node(MapBatch(len))]
    plain = stages(*chain)
    assert [runner for _, runner, _ in plain] == ["threads", "threads", "inline", "threads"]
    for stage, runner in ((0, "process"), (1, "process"), (0, "inline"), (3, "inline"), (3, "process"), (2, "inline")):
        found = stages(*chain, per_stage_runner={stage: runner})
        workers = 0 if runner == "inline" else plain[stage][2]
        assert found == [*plain[:stage], (plain[stage][0], runner, workers), *plain[stage + 1 :]]
    assert stages(*chain, runner="inline", per_stage_runner={1: "threads"})[1] == ("map_transform", "threads", 3)
    both = stages(*chain, per_stage_runner={0: "process", 1: "process"})
    assert [label for label, _, _ in both] == [label for label, _, _ in plain], "numbers stay those of explain()"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"per_stage_runner": {9: "process"}}, r"per_stage_runner=\{9: 'process'\}: there is no such stage"),
        ({"per_stage_runner": {1: "threads"}}, r"per_stage_runner=\{1: 'threads'\}: batch remembers"),
        ({"per_stage_prefetch": {17: 3}}, r"per_stage_prefetch=\{17: 3\}: there is no such stage"),
        ({"per_stage_prefetch": {1: 3}}, r"per_stage_prefetch=\{1: 3\}: it has no workers"),
    ],
)
def test_a_stage_that_is_not_there_or_cannot_is_an_error(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match + r".* The stages are 0: fetch\+map_transform, 1: batch$"):
        stages(Node(MapTransform(dict)), Node(Batch(2)), **options)


def test_inline_means_no_workers_at_all() -> None:
    assert {workers for _, _, workers in stages(Node(MapTransform(dict)), Node(Batch(2)), runner="inline")} == {0}


@pytest.mark.parametrize(
    ("allocation", "expected"), [("fit_to_ops", [2, 1]), ("per_stage_fixed", [3, 3]), ("global", [2, 1])]
)
def test_workers_are_shared_out(allocation: str, expected: list[int]) -> None:
    found = stages(
        Node(MapTransform(dict), 2), Node(MapTransform(dict), 4), max_workers=3, worker_allocation=allocation
    )
    assert [workers for _, _, workers in found] == expected


@given(st.lists(st.integers(1, 16), min_size=1, max_size=5), st.integers(1, 20))
def test_a_global_budget_is_kept_unless_stages_outnumber_it(wishes: list[int], limit: int) -> None:
    nodes = [Node(MapTransform(dict), wish) for wish in wishes]
    wanted = [w for _, _, w in stages(*nodes)]
    for allocation in ("global", "fit_to_ops"):
        workers = [w for _, _, w in stages(*nodes, max_workers=limit, worker_allocation=allocation)]
        assert min(workers) >= 1
        assert sum(workers) <= max(limit, len(workers))
        if allocation == "fit_to_ops":
            assert all(map(operator.le, workers, wanted)) and (sum(wanted) > limit or workers == wanted)


def test_projection_is_worked_out_backwards() -> None:
    reads = MapBlock(dict, frozenset({"a.b", "c"}))
    assert projection([FETCH, Node(reads), Node(MapTransform(dict)), Node(Batch(2))]) == {"a", "a.b", "c"}
    assert projection([FETCH, Node(Select(("a", "b"))), Node(Batch(2))]) == {"a", "b"}
    assert projection([FETCH, Node(Filter(bool)), Node(Select(("a",))), Node(Batch(2))]) is None


def test_flush_applies_where_something_reorders() -> None:
    def every(*nodes: Node, **options: Any) -> int:
        return compile_plan([FETCH, *nodes], RuntimeOptions(**options), 2).flush_every

    assert every(Node(Batch(2))) == 0
    assert every(Node(Shuffle(4)), Node(Batch(2))) == 8
    assert every(Node(Shuffle(4)), flush_every_k_chunks=None) == 0
    assert every(Node(Shuffle(4)), flush_every_k_chunks=3) == 3


def test_the_description_names_workers_and_queues() -> None:
    plan = compile_plan([FETCH, Node(MapTransform(dict), 4), Node(Batch(2))], RuntimeOptions(prefetch_batches=12), 2)
    text = describe(plan)
    assert "Stage[0] runner=threads workers=4 ops=['fetch@p4', 'map_transform@p4']" in text
    assert "Stage[0] [in_q=10]-> fetch@p4 -> map_transform@p4 --> Stage[1]" in text
    assert "Stage[1] batch@p1 ==[final_prefetch=12]==> pipeline_end" in text

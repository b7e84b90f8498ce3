"""Through torch's loaders: the pipeline's own order with any number of workers, saved and resumed, also with another number.

Several tests keep reports of the field: a second resume that starts over, a restore that workers never see, state at the end of a
pass, another number of workers, state that is quietly not saved, ends that are multiplied by workers.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.core.block import Ragged
from headrace.errors import CheckpointError, ConfigError
from headrace.integrations import load_loader_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than this machine has processors
]
WORKERS = (0, 1, 2, 3)


def tokens(columns: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": Ragged.from_rows([np.arange(n % 9, dtype=np.int32) + 100 * n for n in columns["x"]])}


def build(lanes: int = 4, shards: int = 7, **source: Any) -> Pipeline:
    data = Dataset.from_dict("a", {i: InMemoryShard([{"x": 10 * i + k} for k in range(10)]) for i in range(shards)})
    settings = {"chunk_size": 8, "stop_after_passes": None, **source}
    work = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"a": 1.0}), **settings)
    chain = Pipeline(work).map_block(tokens, reads=["x"]).shuffle(10).pack_flat(12, algorithm="wrap").batch(2)
    return chain.options(canonical_replicas=lanes, auto_validation="off", runner="inline")


def ids(batch: Any) -> Any:
    return [np.asarray(record.payload["input_ids"]).tolist() for record in batch.records]


def loader(pipeline: Pipeline, workers: int, kind: Any = StatefulDataLoader, **options: Any) -> Any:
    return kind(pipeline.to_torch_dataset(), batch_size=None, num_workers=workers, **options)


def take(iterator: Any, count: int | None = None) -> list[Any]:
    return [ids(batch) for batch in islice(iterator, count)]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """The uninterrupted stream."""
    iterator = iter(build())
    got = take(iterator, 60)
    iterator.close()
    return got


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_the_loader_gives_the_pipelines_own_order(expected: list[Any], workers: int, kind: Any) -> None:
    assert take(iter(loader(build(), workers, kind)), 30) == expected[:30]


def test_workers_started_afresh_by_spawn_give_it_too(expected: list[Any]) -> None:
    shift = 0  # a closure: what plain pickle cannot take along

    def shifted(columns: dict[str, Any]) -> dict[str, Any]:
        return {"x": [x + shift for x in columns["x"]]}

    data = Dataset.from_dict("a", {i: InMemoryShard([{"x": 10 * i + k} for k in range(10)]) for i in range(7)})
    work = StaticMixtureWorkSource(
        datasets=[data], mixture=MixtureSpec({"a": 1.0}), chunk_size=8, stop_after_passes=None
    )
    chain = Pipeline(work).map_block(shifted, reads=["x"]).batch(2).options(canonical_replicas=2, auto_validation="off")
    alone = [batch.ids for batch in islice(iter(chain), 8)]
    iterator = iter(loader(chain, 1, DataLoader, multiprocessing_context="spawn"))
    assert [next(iterator).ids for _ in range(8)] == alone


@pytest.mark.parametrize("workers", WORKERS)
def test_a_chain_of_saves_equals_the_uninterrupted_run(expected: list[Any], workers: int) -> None:
    got: list[Any] = []
    state: Any = None
    for count in (7, 0, 1, 5, 4):
        made = loader(build(), workers)
        if state is not None:
            made.load_state_dict(state)
        got += take(iter(made), count)
        state = made.state_dict()
        del made
    assert got == expected[:17]


def test_another_number_of_workers_between_runs(expected: list[Any]) -> None:
    got: list[Any] = []
    state: Any = None
    for workers in (2, 0, 1, 3, 5, 2, 0):
        made = loader(build(), workers)
        if state is not None:
            load_loader_state(made, state)
        got += take(iter(made), 5)
        state = made.state_dict()
        del made
    assert got == expected[:35]


def test_state_of_a_loader_restores_a_plain_loader_and_a_pipeline(expected: list[Any]) -> None:
    made = loader(build(), 2)
    assert take(iter(made), 6) == expected[:6]
    state = made.state_dict()
    plain = loader(build(), 3, DataLoader)
    load_loader_state(plain, state)
    assert take(iter(plain), 5) == expected[6:11]
    iterator = iter(build())
    assert len(take(iterator, 6)) == 6
    iterator.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restored_pipeline_reaches_the_workers_once(expected: list[Any], workers: int) -> None:
    first = build(stop_after_passes=1)
    whole = [ids(batch) for batch in first]
    iterator = iter(first)
    assert take(iterator, 5) == whole[:5]
    state = first.checkpoint()
    iterator.close()
    second = build(stop_after_passes=1)
    second.restore(state)
    made = loader(second, workers, DataLoader)
    assert sorted(map(str, take(iter(made)))) == sorted(map(str, whole[5:]))
    assert sorted(map(str, take(iter(made)))) == sorted(map(str, whole)), "the next pass begins at the beginning"
    second.restore(state)
    assert sorted(map(str, take(iter(made)))) == sorted(map(str, whole[5:])), "restored again"


@pytest.mark.parametrize("persistent", [False, True])
def test_passes_over_persistent_workers(persistent: bool) -> None:
    whole = sorted(str(ids(batch)) for batch in build(stop_after_passes=1))
    made = loader(build(stop_after_passes=1), 2, persistent_workers=persistent)
    for _ in range(3):
        assert sorted(map(str, take(iter(made)))) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_saved_around_the_end_of_a_pass(workers: int) -> None:
    """Before the last batch, after it, and after the loop has seen the end; then the rest and one more pass."""
    finite = {"stop_after_passes": 1, "lanes": 2}
    whole = take(iter(loader(build(**finite), workers)))
    for stop in (len(whole) - 1, len(whole), len(whole) + 1):
        made = loader(build(**finite), workers)
        assert take(iter(made), stop) == whole[:stop]
        state = made.state_dict()
        for resumed in (workers, 3):
            fresh = loader(build(**finite), resumed)
            if resumed == workers:
                fresh.load_state_dict(state)
            else:
                load_loader_state(fresh, state)
            rest = take(iter(fresh))
            if stop <= len(whole):
                assert sorted(map(str, rest)) == sorted(map(str, whole[stop:]))
                rest = take(iter(fresh))
            assert sorted(map(str, rest)) == sorted(map(str, whole))


@pytest.mark.parametrize("workers", [0, 2, 5])
@pytest.mark.parametrize("shards", [1, 3, 7])
def test_every_row_once_per_pass_whatever_the_workers(workers: int, shards: int) -> None:
    data = Dataset.from_dict("a", {i: InMemoryShard([{"x": 10 * i + k} for k in range(10)]) for i in range(shards)})
    work = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"a": 1.0}), chunk_size=4, stop_after_passes=1)
    chain = Pipeline(work).batch(2, drop_last=False).options(canonical_replicas=4, runner="inline")
    seen = [record.payload["x"] for batch in loader(chain, workers, DataLoader) for record in batch.records]
    assert sorted(seen) == list(range(10 * shards))


def test_tensors_records_and_state_dicts_pass_through() -> None:
    chain = build().map_batch(lambda batch: batch.to_training(return_labels=True))
    for workers in (0, 2):
        first = next(iter(loader(chain, workers)))
        assert first["input_ids"].shape == (2, 11) and isinstance(first["labels"], torch.Tensor)
        gc.collect()
    data = Dataset.from_dict("a", {0: InMemoryShard([{"x": i} for i in range(10)])})
    work = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"a": 1.0}))
    records = list(loader(Pipeline(work).options(runner="inline"), 1))
    assert sorted(record.payload["x"] for record in records) == list(range(10))


def test_building_and_iterating_leave_the_global_generators_alone() -> None:
    def generators() -> Any:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = generators()
    iterator = iter(build())
    take(iterator, 5)
    iterator.close()
    assert generators() == before


# -- loud --------------------------------------------------------------------------------------------


def test_a_pipeline_whose_batches_go_through_workers_says_so() -> None:
    pipeline = build()
    made = loader(pipeline, 2)
    iterator = iter(made)
    take(iterator, 3)
    for ask in (pipeline.checkpoint, pipeline.state_dict):
        with pytest.raises(CheckpointError, match=r"workers of a DataLoader. Save StatefulDataLoader.state_dict\(\)"):
            ask()
    del iterator, made
    gc.collect()
    assert len(take(iter(loader(pipeline, 0)), 2)) == 2
    assert pipeline.checkpoint()["position"] == 2, "iterated here again, the pipeline knows"


def test_not_stateful_has_no_state() -> None:
    dataset = build().to_torch_dataset(stateful=False)
    assert not hasattr(dataset, "state_dict") and not hasattr(dataset, "load_state_dict")
    assert hasattr(build().to_torch_dataset(), "state_dict")


def test_states_that_do_not_fit_are_refused() -> None:
    made = loader(build(), 2)
    take(iter(made), 3)
    state = made.state_dict()
    worker = state["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]
    dataset = build().to_torch_dataset()
    with pytest.raises(CheckpointError, match="load_loader_state"):
        dataset.load_state_dict(worker)
    with pytest.raises(CheckpointError, match="not the state of a StatefulDataLoader"):
        load_loader_state(loader(build(), 0), {"model": 1})
    with pytest.raises(CheckpointError, match="not the state of a loader worker"):
        broken = {"_snapshot": {"_worker_snapshots": {"w": {"dataset_state": {"x": b""}}}}, "_steps_since_snapshot": 0}
        load_loader_state(loader(build(), 0), broken)
    sparse = loader(build(), 2, snapshot_every_n_steps=4)
    take(iter(sparse), 6)
    with pytest.raises(CheckpointError, match="snapshot_every_n_steps=1"):
        load_loader_state(loader(build(), 3), sparse.state_dict())


def test_sparse_snapshots_resume_with_the_same_workers(expected: list[Any]) -> None:
    sparse = loader(build(), 2, snapshot_every_n_steps=4)
    take(iter(sparse), 6)
    again = loader(build(), 2, snapshot_every_n_steps=4)
    again.load_state_dict(sparse.state_dict())
    assert take(iter(again), 5) == expected[6:11]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.options(mapping_strategy="contiguous"), "use 'interleaved', or num_workers=0"),
        (lambda p: p.options(runner="process"), "may not start: use num_workers=0"),
    ],
)
def test_what_cannot_run_in_loader_workers_is_refused(change: Callable[[Pipeline], Pipeline], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(iter(loader(change(build()), 2, DataLoader)))


def test_state_stays_small() -> None:
    """A few hundred bytes a lane, whatever has passed."""
    sizes = []
    for count in (2, 40):
        made = loader(build(lanes=8), 0)
        take(iter(made), count)
        sizes.append(sum(map(len, made.state_dict()["dataset_state"].values())))
    assert max(sizes) < 8 * 1200 and sizes[1] < 2 * sizes[0] + 2000

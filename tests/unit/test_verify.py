"""Comparing logs of digests: the first step, lane, dataset and sample that differ, by name."""

from __future__ import annotations

import threading
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource, verify
from headrace.core.block import Ragged
from headrace.errors import ConfigError, DataError, FormatError
from headrace.run import digest


def build(
    log: Path | None, wrong: Any = (), pack: bool = False, swap: bool = False, endless: bool = False, **options: Any
) -> Pipeline:
    """Two datasets of four shards; `wrong` lists values of x whose payload differs; `swap` exchanges two rows of a shard."""

    def shard(base: int, s: int) -> InMemoryShard:
        return InMemoryShard([{"x": base + 10 * s + k} for k in range(10)])

    data = [
        Dataset.from_dict(name, {s: shard(base, s) for s in range(4)}) for name, base in (("web", 0), ("code", 500))
    ]
    mixture = MixtureSpec({"web": 0.5, "code": 0.5})
    passes = None if endless else 1
    work = StaticMixtureWorkSource(
        datasets=data, mixture=mixture, chunk_size=8, seed=7 if swap else 0, stop_after_passes=passes
    )

    def tokens(columns: dict[str, Any]) -> dict[str, Any]:
        rows = [np.arange(3, dtype=np.int32) + 10 * x + (1 if x in wrong else 0) for x in columns["x"]]
        return {"input_ids": Ragged.from_rows(rows)}

    chain = Pipeline(work).map_block(tokens, reads=["x"])
    chain = chain.pack_flat(7, algorithm="wrap").batch(2) if pack else chain.batch(4)
    digests = {"digest": True, "digest_log": str(log)} if log is not None else {}
    return chain.options(canonical_replicas=2, runner="inline", auto_validation="off", **digests, **options)


def batches(pipeline: Pipeline) -> list[Any]:
    return [batch.records for batch in pipeline]


def some(pipeline: Pipeline, count: int) -> None:
    iterator = iter(pipeline)
    for _ in islice(iterator, count):
        pass
    iterator.close()


@pytest.mark.parametrize("pack", [False, True])
def test_a_changed_payload_is_found_down_to_the_row(tmp_path: Path, pack: bool) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    stream = batches(build(a, pack=pack))
    batches(build(b, wrong=[523], pack=pack))
    found = verify.diff(a, b, batches_per_step=4)
    assert found is not None

    def holds(record: Any) -> bool:
        return any(5230 <= int(token) <= 5232 for token in record.payload["input_ids"])

    j, row = next((j, row) for j, batch in enumerate(stream) for row, record in enumerate(batch) if holds(record))
    assert (found.batch, found.step, found.row) == (j, j // 4, row)
    assert found.lane == stream[j][0].meta.lane_id
    assert "another payload" in found.what and found.sample_a == found.sample_b
    assert found.sample_a is not None
    if not pack:
        assert found.dataset == "code" and (found.sample_a.shard, found.sample_a.row) == (2, 3)
        assert f"step {j // 4}, batch {j}, lane {found.lane}, row {row}" in str(found)
        assert "(dataset 'code', shard 2, row 3)" in str(found)


def test_another_order_names_both_samples(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    first, second = batches(build(a)), batches(build(b, swap=True))
    found = verify.diff(a, b)
    assert found is not None and "other samples" in found.what and found.step is None
    left, right = (s[found.batch][found.row or 0].meta.sample_id for s in (first, second))
    assert found.sample_a is not None and found.sample_b is not None
    assert (found.sample_a.shard, found.sample_a.row) == left[1:] and (
        found.sample_b.shard,
        found.sample_b.row,
    ) == right[1:]
    assert "a: dataset" in str(found) and "; b: dataset" in str(found)


def test_equal_streams_on_other_topologies_are_equal(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    some(build(alone, endless=True), 80)
    logs = [tmp_path / f"rank{r}" for r in range(2)]
    for rank, log in enumerate(logs):
        some(build(log, endless=True, dp_degree=2, dp_group_id=rank), 40)
    assert verify.diff(alone, logs) is None and verify.diff(logs, alone) is None
    assert verify.diff(logs[0], alone) is None, "one rank's log is compared for what it should hold"
    whole = verify.summary(alone)
    assert whole == verify.summary(logs) and whole.first == 0 and whole.end == whole.batches
    assert sorted(whole.lanes) == [0, 1] and len(whole.digest) == 32
    total = sum(int(verify.summary(log).digest, 16) for log in logs) % (1 << 128)
    assert f"{total:032x}" == whole.digest


def test_a_checkpoint_in_another_thread_loses_no_batch(tmp_path: Path, monkeypatch: Any) -> None:
    """It writes the log out while the loop goes on."""
    monkeypatch.setattr(digest, "GROUP", 3)
    log, iterator = tmp_path / "log", iter(build(tmp_path / "log", endless=True))
    digests, done = iterator.digests, threading.Event()
    assert digests is not None

    def flush() -> None:
        while not done.is_set():
            digests.flush()

    other = threading.Thread(target=flush)
    other.start()
    delivered = len(list(islice(iterator, 200)))
    done.set()
    other.join()
    iterator.close()
    found = verify.summary(log)
    assert (found.first, found.end, found.batches) == (0, delivered, delivered)


def test_a_missing_batch_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(digest, "GROUP", 1)
    a, b = tmp_path / "a", tmp_path / "b"
    batches(build(a))
    lines = a.read_bytes().splitlines(keepends=True)
    b.write_bytes(b"".join(lines[:4] + lines[5:]))
    found = verify.diff(a, b)
    assert found is not None and found.batch == 3 and found.what == "b lacks this batch" and found.sample_b is None
    swapped = verify.diff(b, a)
    assert swapped is not None and swapped.what == "a lacks this batch" and "nothing" in str(swapped)
    c = tmp_path / "c"
    c.write_bytes(b"".join(lines[:4]))
    assert verify.diff(a, c) is None, "a shorter run is equal as far as it goes"


def test_a_resumed_leg_in_the_same_file_must_repeat_itself(tmp_path: Path) -> None:
    log, alone = tmp_path / "log", tmp_path / "alone"
    batches(build(alone))

    def leg(state: Any, count: int, wrong: Any = ()) -> Any:
        pipeline = build(log, wrong)
        if state is not None:
            pipeline.restore(state)
        iterator = iter(pipeline)
        for _ in islice(iterator, 3):
            pass
        saved = pipeline.checkpoint()
        for _ in islice(iterator, count - 3):
            pass
        iterator.close()
        return saved

    state = leg(None, 6)
    with log.open("ab") as file:
        file.write(b'{"j": [6], "lane": [0], "dig')  # killed while writing
    leg(state, 8)
    assert verify.diff(log, alone) is None
    assert verify.summary(log).batches == 11
    everything = list(range(600))
    leg(state, 8, wrong=everything)
    found = verify.diff(alone, log)
    assert found is not None and found.batch == 3 and "delivered this batch twice, differently" in found.what
    assert str(log) in found.where_a and str(log) in found.where_b
    with pytest.raises(DataError, match="contradict each other"):
        verify.summary(log)


def test_a_log_is_there_after_a_checkpoint_and_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "sub" / "log"
    pipeline = build(log)
    iterator = iter(pipeline)
    for _ in islice(iterator, 3):
        pass
    pipeline.checkpoint()
    assert verify.summary(log).batches == 3
    next(iterator)
    iterator.close()
    assert verify.summary(log).batches == 4


def test_every_kind_of_item_is_digested(tmp_path: Path) -> None:
    for name, change in {
        "records": lambda p: p,
        "batches": lambda p: p.batch(3, drop_last=False),
        "values": lambda p: p.batch(3).map_batch(lambda b: {"x": [r.payload["x"] for r in b.records]}),
        "none": lambda p: p.batch(3).map_batch(lambda b: None if b.ids[0][2] % 2 else len(b)),
    }.items():
        logs = [tmp_path / f"{name}-{runner}" for runner in ("inline", "threads")]
        for log, runner in zip(logs, ("inline", "threads"), strict=True):
            data = Dataset.from_dict("a", {0: InMemoryShard([{"x": i, "t": str(i)} for i in range(50)])})
            work = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"a": 1.0}))
            chain = change(Pipeline(work)).options(runner=runner, digest=True, digest_log=str(log), micro_batch=7)
            list(chain)
        assert verify.diff(*logs) is None
        assert verify.summary(logs[0]).batches == {"records": 50, "batches": 17, "values": 16, "none": 16}[name]


def test_files_that_are_no_logs_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text('{"j": [1], "lane": [0], "digests": "AAAA"}\n')
    with pytest.raises(FormatError, match="not a digest log"):
        verify.summary(other)
    other.write_text("")
    with pytest.raises(FormatError, match="no run begins in it"):
        verify.summary(other)
    other.write_text(
        '{"headrace_digests":9,"recipe":"","lanes":1,"groups":1,"group":0,"mapping":"","position":0,"datasets":{}}\n'
    )
    with pytest.raises(FormatError, match="format 9"):
        verify.summary(other)
    other.write_text('{"headrace_digests":1}\n')
    with pytest.raises(FormatError, match="cannot be read"):
        verify.summary(other)


def test_settings_that_would_lose_digests_are_refused() -> None:
    with pytest.raises(ConfigError, match="without digest=True"):
        build(None).options(digest_log="x")
    with pytest.raises(ConfigError, match=r"put \{rank\} in its name"):
        build(None).options(digest=True, digest_log="x", world_size=2)
    options = build(None).options(digest=True, digest_log="x-{rank}", world_size=2, global_rank=1)._options
    assert options.digest_path == "x-1"

"""The data pipeline across processes: `mtp_mode`, killed workers, interrupted and exiting interpreters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.core.block import Ragged
from headrace.errors import OperatorError, WorkerDied

HANG = 60
"""Seconds after which something hangs; everything here takes a few on an idle machine."""


def build(rows: int = 4000, lanes: int = 1, **options: Any) -> Pipeline:
    shard = InMemoryShard([{"n": i} for i in range(rows)])
    work = StaticMixtureWorkSource(
        datasets=[Dataset.from_dict("toy", {0: shard})], mixture=MixtureSpec({"toy": 1.0}), chunk_size=500, seed=5
    )
    pipeline = (
        Pipeline(work).map_block(tokens, reads=["n"]).shuffle(200).pack_flat(64, algorithm="wrap", pad_token_id=0)
    )
    return pipeline.batch(4).options(canonical_replicas=lanes, auto_validation="off", **options)


def tokens(columns: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": Ragged.from_rows([np.arange(n % 30 + 1, dtype=np.int32) + n for n in columns["n"]])}


def shown(batch: Any) -> bytes:
    return batch.to_training(dtype=None)["input_ids"].__repr__().encode()


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def wait_until(condition: Any) -> bool:
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    before = {child.pid for child in children()}
    yield
    assert wait_until(lambda: all(child.pid in before for child in children()))


# -- mtp_mode --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 3])
def test_mtp_gives_the_same_batches_checkpoints_and_counts(lanes: int) -> None:
    here, there = build(lanes=lanes, runner="inline"), build(lanes=lanes, mtp_mode=True)
    a, b = iter(here), iter(there)
    assert [shown(x) for x in islice(a, 40)] == [shown(x) for x in islice(b, 40)]
    assert here.checkpoint(as_bytes=True) == there.checkpoint(as_bytes=True)
    assert sum(there.inflight_summary().values()) >= 1
    rest = [shown(x) for x in a]
    assert rest == [shown(x) for x in b]
    assert here.checkpoint(as_bytes=True) == there.checkpoint(as_bytes=True)
    mine, theirs = here.metrics_snapshot(), there.metrics_snapshot()
    assert mine is not None and theirs is not None
    assert mine.datasets == theirs.datasets and mine.tokens == theirs.tokens
    assert [op.rows_out for op in mine.operators] == [op.rows_out for op in theirs.operators]
    resumed = build(lanes=lanes, mtp_mode=True)
    state = here.checkpoint()
    fresh = build(lanes=lanes, runner="inline")
    first = iter(fresh)
    list(islice(first, 7))
    resumed.restore(fresh.checkpoint())
    second = iter(resumed)
    assert [shown(x) for x in islice(second, 5)] == [shown(x) for x in islice(first, 5)]
    first.close()
    second.close()
    assert state["position"] > 7


def test_mtp_errors_arrive_with_their_traceback() -> None:
    def breaks(columns: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("broken on purpose")

    pipeline = build(mtp_mode=True)
    pipeline._nodes.pop()
    pipeline.map_block(breaks).batch(2)
    with pytest.raises(OperatorError, match="broken on purpose") as caught:
        list(pipeline)
    assert "in breaks" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_a_killed_engine_is_an_error_within_two_seconds() -> None:
    pipeline = build(rows=200_000, mtp_mode=True, prefetch_batches=2)
    iterator = iter(pipeline)
    next(iterator)
    (engine,) = children()[:1]
    engine.kill()
    killed = time.monotonic()
    with pytest.raises(WorkerDied, match="engine"):
        for _ in iterator:
            pass
    assert time.monotonic() - killed < 10


def test_leaving_an_mtp_loop_leaves_nothing() -> None:
    for batch in build(mtp_mode=True):
        assert len(batch) == 4
        break


# -- killed workers --------------------------------------------------------------------------------


def slow_tokens(columns: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.01)
    return tokens(columns)


def test_killed_workers_do_not_change_the_stream() -> None:
    expected = [shown(x) for x in build(rows=2000, runner="inline")]

    def process() -> Pipeline:
        pipeline = build(rows=2000, runner="process", micro_batch=20, max_worker_retries=3)
        node = pipeline._nodes[0]
        pipeline._nodes[0] = type(node)(type(node.op)(slow_tokens, frozenset({"n"}), "off"), 2)
        return pipeline

    iterator = iter(process())
    got = [shown(next(iterator))]
    killed = 0
    for batch in iterator:
        got.append(shown(batch))
        if killed < 3 and len(got) % 40 == 0:
            workers = [p for p in children() if p.status() != psutil.STATUS_ZOMBIE]
            workers[-1].kill()
            killed += 1
    assert killed == 3
    assert got == expected


def dies(columns: dict[str, Any]) -> dict[str, Any]:
    if 777 in set(columns["n"].tolist() if hasattr(columns["n"], "tolist") else columns["n"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return tokens(columns)


def test_a_record_that_kills_every_worker_is_named() -> None:
    pipeline = build(rows=1000, runner="process", micro_batch=10, max_worker_retries=1)
    node = pipeline._nodes[0]
    pipeline._nodes[0] = type(node)(type(node.op)(dies, frozenset({"n"}), "off"), 1)
    with pytest.raises(
        WorkerDied, match=r"(?s)SIGKILL.*map_block.*dataset 0 shard 0|map_block.*SIGKILL.*dataset 0 shard 0"
    ):
        list(pipeline)


# -- interpreters ----------------------------------------------------------------------------------

PROGRAM = """
    import sys, time
    import numpy as np
    from headrace import *
    from headrace.core.block import Ragged

    def tokens(columns):
        return {"input_ids": Ragged.from_rows([np.arange(n % 30 + 1, dtype=np.int32) for n in columns["n"]])}

    if __name__ == "__main__":
        data = Dataset.from_dict("toy", {0: InMemoryShard([{"n": i} for i in range(20000)])})
        work = StaticMixtureWorkSource(datasets=[data], mixture={"toy": 1.0}, exhausted_policy="repeat")
        pipeline = Pipeline(work).map_block(tokens, reads=["n"], parallelism=2).batch(4).options(OPTIONS)
        iterator = iter(pipeline)
        for i in range(5):
            next(iterator)
        print("running", flush=True)
        ENDING
"""


def start_program(tmp_path: Path, options: str, ending: str) -> subprocess.Popen[str]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM).replace("OPTIONS", options).replace("ENDING", ending))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


@pytest.mark.parametrize("options", ["runner='threads'", "runner='process'", "mtp_mode=True"])
def test_an_interpreter_that_just_ends_is_quiet_and_leaves_nothing(tmp_path: Path, options: str) -> None:
    with start_program(tmp_path, options, "pass") as program:
        out, err = program.communicate(timeout=HANG)
        assert (program.returncode, out.strip(), err) == (0, "running", "")


@pytest.mark.parametrize("options", ["runner='threads'", "runner='process'", "mtp_mode=True"])
def test_an_interrupt_ends_everything(tmp_path: Path, options: str) -> None:
    ending = "\n            ".join(["for _ in iterator:", "    time.sleep(0.001)"])
    with start_program(tmp_path, options, ending) as program:
        assert program.stdout is not None
        assert program.stdout.readline().strip() == "running"
        workers = psutil.Process(program.pid).children(recursive=True)
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=HANG)
        assert "KeyboardInterrupt" in err and err.count("Traceback") == 1
        assert wait_until(
            lambda: not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
        )


def test_killing_the_trainer_takes_the_engine_along(tmp_path: Path) -> None:
    with start_program(tmp_path, "mtp_mode=True", "time.sleep(100)") as program:
        assert program.stdout is not None
        assert program.stdout.readline().strip() == "running"
        workers = psutil.Process(program.pid).children(recursive=True)
        assert workers
        program.kill()
        assert wait_until(
            lambda: not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
        )

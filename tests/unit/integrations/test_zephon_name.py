"""A program written for another name runs as it stands."""

from __future__ import annotations

import subprocess
import sys

import pytest

import headrace
from headrace import observability, ops, types
from headrace.errors import ConfigError

PROGRAM = """
import headrace
headrace.install_as_zephon()
headrace.install_as_zephon()

import zephon.work
from zephon import Pipeline
from zephon.io import Dataset, InMemoryShard
from zephon.observability import MTPQueueStats, PipelineSummary
from zephon.ops import DomainGroups, LossScope, MissingFieldMode, PackingAlgorithm, SpanSource, SpecialTokensMode
from zephon.options import RuntimeOptions
from zephon.pipeline import Pipeline as Again
from zephon.types import SampleBatch, SampleRecord, StreamItem
from zephon.work import MixtureSpec, StaticMixtureWorkSource

code, web = (Dataset.from_dict(name, {0: InMemoryShard([{"x": i} for i in range(64)])}) for name in ("code", "web"))
work_source = StaticMixtureWorkSource(datasets=[code, web], mixture=MixtureSpec({"code": 0.25, "web": 0.75}), seed=42)

if __name__ == "__main__":
    pipeline = Pipeline(work_source).batch(microbatch_size=32).options(mtp_mode=True)
    assert pipeline.mtp_queue_stats() is None
    for sample_batch in pipeline:
        assert isinstance(sample_batch, SampleBatch)
        stats = pipeline.mtp_queue_stats()
        assert isinstance(stats, MTPQueueStats) and 0 <= stats.depth <= stats.capacity
        print(len(sample_batch.records), "records")
    assert Again is Pipeline is headrace.Pipeline and zephon.work is headrace.work
    try:
        from zephon.work import TokenEstimation
    except ImportError as error:
        assert "TokenEstimation" in str(error)
    else:
        raise AssertionError
"""


def test_a_program_written_for_zephon_runs_as_it_stands(tmp_path: object) -> None:
    path = f"{tmp_path}/program.py"
    with open(path, "w") as file:
        file.write(PROGRAM)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "32 records\n" * 8


def test_two_packages_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zephon.io", types)
    with pytest.raises(ConfigError, match=r"zephon.io of another package was imported before"):
        headrace.install_as_zephon()
    assert "zephon" not in sys.modules


@pytest.mark.parametrize("module", [ops, observability, types])
def test_every_public_name_is_there(module: object) -> None:
    for name in module.__all__:  # type: ignore[attr-defined]
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError):
        getattr(module, "Nope")  # noqa: B009

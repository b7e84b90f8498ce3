"""Many threads on one reader, few open files, and memory that stays flat however much is read."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.core.block import Text, to_list
from headrace.io import Dataset
from headrace.io.formats import parquet

TEXT = frozenset({"text"})


def _corpus(folder: Path, kind: str, shards: int = 4, rows: int = 600) -> list[list[str]]:
    texts = [[f"{s}/{r} " + "x" * (r * 7 % 900) for r in range(rows)] for s in range(shards)]
    for s, shard in enumerate(texts):
        if kind == "parquet":
            pq.write_table(pa.table({"text": shard, "n": range(rows)}), folder / f"{s:02}.parquet", row_group_size=90)
        else:
            (folder / f"{s:02}.jsonl").write_text("".join(json.dumps({"text": t, "n": 1}) + "\n" for t in shard))
    return texts


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_threads_share_a_reader(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "UNIT_BYTES", 1)
    texts = _corpus(tmp_path, kind)
    reader = Dataset.from_path("d", tmp_path, options={"parquet": {"rg_cache": {"limit_bytes": 100_000}}}).open()

    def work(seed: int) -> bool:
        random = np.random.default_rng(seed)
        for _ in range(40):
            shard = int(random.integers(4))
            first = int(random.integers(560))
            rows = np.arange(first, first + 40) if random.random() < 0.5 else random.integers(0, 600, 40)
            got: Any = reader.read(shard, rows, TEXT)
            if to_list(got["text"]) != [texts[shard][r] for r in rows]:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_neighbours_decode_a_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _corpus(tmp_path, "parquet", shards=1)
    monkeypatch.setattr(parquet, "UNIT_BYTES", 1)
    reader = Dataset.from_path("d", tmp_path).open()
    decoded: list[int] = []
    inner = parquet.ParquetReader._decode

    def counting(self: Any, opened: Any, groups: range, fields: Any) -> Any:
        decoded.extend(groups)
        return inner(self, opened, groups, fields)

    monkeypatch.setattr(parquet.ParquetReader, "_decode", counting)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda first: reader.read(0, np.arange(first, first + 10), TEXT), range(0, 600, 10)))
    assert sorted(decoded) == list(range(7))


def test_parquet_decodes_only_what_is_wanted(tmp_path: Path) -> None:
    _corpus(tmp_path, "parquet", shards=1)
    got: Any = Dataset.from_path("d", tmp_path).open().read(0, np.array([5]), frozenset({"n", "absent", "n.x"}))
    assert list(got) == ["n"]
    assert Dataset.from_path("d", tmp_path).open().read(0, np.array([5]), frozenset()) == {}


def test_a_small_slice_does_not_keep_its_row_group(tmp_path: Path) -> None:
    _corpus(tmp_path, "parquet", shards=1)
    got: Any = Dataset.from_path("d", tmp_path).open().read(0, np.arange(10, 20), TEXT)
    assert isinstance(got["text"], Text)
    assert got["text"].data.nbytes == int(got["text"].offsets[-1])


def test_more_shards_than_open_files(tmp_path: Path) -> None:
    for i in range(300):
        (tmp_path / f"{i:03}.jsonl").write_text(f'{{"text": "{i}"}}\n')
    reader = Dataset.from_path("d", tmp_path).open()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        got = [reader.read(shard, np.array([0]), TEXT) for shard in range(300)]
        assert got == [{"text": [str(i)]} for i in range(300)]
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert len(os.listdir("/proc/self/fd")) - before <= min(300, soft // 16)
    reader.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


_MEASURE = """
import sys, numpy as np
from headrace.io import Dataset

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

data = Dataset.from_path("d", sys.argv[1])
reader = data.open()
seen, text = [], 0
for shard, count in enumerate(data.counts().tolist()):
    for first in range(0, count, 64):
        column = reader.read(shard, np.arange(first, min(first + 64, count)), frozenset({"text"}))["text"]
        text += len(column)
    seen.append(resident())
print(text, seen[len(seen) // 4], max(seen[len(seen) // 4:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_memory_stays_flat_over_340_megabytes(tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng(0)
    words = [random.bytes(6).hex() for _ in range(5000)]
    for s in range(16):
        rows = [" ".join(words[i] for i in random.integers(0, 5000, 400)) for _ in range(4100)]
        if kind == "parquet":
            pq.write_table(pa.table({"text": rows}), tmp_path / f"{s}.parquet", row_group_size=500, compression="zstd")
        else:
            (tmp_path / f"{s}.jsonl").write_text("".join(f'{{"text": "{row}"}}\n' for row in rows))
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=250, check=False
    )
    assert run.returncode == 0, run.stderr
    rows_read, early, late = map(int, run.stdout.split())
    assert rows_read == 16 * 4100
    assert late - early < 40 << 20

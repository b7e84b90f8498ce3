"""Which configurations each workload compares, and the reference points its ratios are taken against.

For zephon the default and the fastest forms found are listed, also with other encoders plugged in; for every other peer its
default and its better number of workers. `core` rows run in every round, the others in the first only.
"""

from __future__ import annotations

from typing import Any

from .runner import Config, Timing

LEAN: dict[str, Any] = {"lean": True, "row_group_cache": True, "tokenize_parallelism": 2}
SHUFFLE: dict[str, Any] = {"shuffle": 8192}


def row(loader: str, core: bool = True, **options: Any) -> Config:
    return Config(loader, options, core)


W1 = [
    row("headrace", fmt="jsonl"),
    row("headrace", fmt="parquet"),
    row("headrace", core=False, fmt="zst"),
    row("headrace", core=False, fmt="jsonl", run={"runner": "inline"}),
    row("headrace", encoder="reference", fmt="jsonl"),
    row("zephon", fmt="jsonl"),
    row("zephon"),
    row("zephon", **LEAN),
    row("zephon", core=False, tok="tiktoken", **LEAN),
    row("zephon", tok="gigatoken", lean=True, runner="inline"),
    row("zephon", core=False, tok="gigatoken", **LEAN),
    row("torchdata_nodes"),
    row("torchdata_nodes", core=False, tok="tiktoken"),
    row("torch_dl"),
    row("spdl_dl"),
    row("lit"),
    row("streaming"),
    row("wds"),
    row("grain_dl", workers=2),
    row("hf_datasets", core=False, workers=2),
    row("bare", tok="gigatoken", threads=2),
    row("bare", tok="fastokens", threads=2),
    row("bare", tok="gigatoken", threads=1),
    row("bare", tok="fastokens", threads=1),
    row("bare", tok="hf", threads=2),
    row("bare", whole=True, tok="gigatoken", threads=2, fmt="jsonl"),
]

W2 = [
    row("headrace", fmt="jsonl"),
    row("headrace", fmt="parquet"),
    row("headrace", core=False, fmt="jsonl", run={"runner": "inline"}),
    row("zephon", core=False, fmt="jsonl"),
    row("zephon"),
    row("zephon", max_batch=1024),
    row("zephon", core=False, row_group_cache=True),
    row("torchdata_nodes"),
    row("torchdata_nodes", core=False, fmt="jsonl"),
    row("torch_dl", workers=0),
    row("torch_dl", workers=0, fmt="jsonl"),
    row("lit", workers=0),
    row("streaming"),
    row("wds"),
    row("grain_dl"),
    row("hf_datasets"),
    row("spdl_dl"),
    row("bare", fmt="jsonl"),
    row("bare", fmt="parquet"),
]

W3 = [
    row("headrace", fmt="npy"),
    row("headrace", core=False, fmt="parquet_plain"),
    row("headrace", core=False, fmt="npy", run={"runner": "inline"}),
    row("zephon", core=False),
    row("zephon", fmt="litdata"),
    row("zephon", fmt="litdata", runner="inline"),
    row("torchdata_nodes"),
    row("torch_dl", workers=0),
    row("lit", workers=0),
    row("hf_datasets"),
    row("spdl_dl"),
    row("wds", workers=0),
    row("grain_dl"),
    row("streaming"),
    row("bare"),
]

W4 = [
    row("headrace", fmt="jsonl", **SHUFFLE),
    row("headrace", core=False, fmt="parquet", **SHUFFLE),
    row("headrace", core=False, fmt="jsonl"),
    row("zephon", fmt="jsonl", **SHUFFLE),
    row("zephon", core=False, **LEAN, **SHUFFLE),
    row("zephon", core=False),
    row("grain_dl", core=False, workers=2),
    row("torchdata_nodes", core=False),
]

MATRIX: dict[str, list[Config]] = {"W1": W1, "W2": W2, "W3": W3, "W4": W4}
"""W5, peak memory, is a column of every W1 run; `python -m benchmarks W5` prints that table alone."""

TIMING = {
    "W1": Timing(seconds=8.0, warm=2.5),
    "W2": Timing(seconds=5.0, warm=1.5),
    "W3": Timing(seconds=5.0, warm=1.5),
    "W4": Timing(seconds=1.0, warm=0.0, limit=240.0),
}
QUICK = {
    "W1": Timing(seconds=2.5, warm=0.5, limit=60.0),
    "W2": Timing(seconds=1.5, warm=0.3, limit=60.0),
    "W3": Timing(seconds=1.5, warm=0.3, limit=60.0),
    "W4": Timing(seconds=1.0, warm=0.0, limit=120.0),
}

"""python -m benchmarks.machinery: what the pipeline itself costs when the data cost nothing.

    ns a record      fetch and batch from memory, payloads of one int, by runner
    import           `import headrace` in a fresh interpreter, and whether torch came along
    checkpoint       bytes for two datasets, one lane, shuffle 8192, wrap packing, in the middle of the stream
    counters         time of the same stream with the always-on counters switched to no-ops, against the real ones

Needs no corpora and no peers. Prints one JSON object a line; figures are medians of interleaved repetitions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np

from headrace import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.io import InMemoryShard
from headrace.observe.counters import Counters, Deliveries, OperatorCounters

IMPORT = """
import sys, time
start = time.perf_counter()
import headrace
bare = time.perf_counter() - start
from headrace import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource
print(bare, time.perf_counter() - start, "torch" in sys.modules)
"""


ROWS, WARM_RECORDS = 20_000, 90_000
"""Rows of a dataset, and records after which every row was seen once (a shard is looked over on its first read)."""


def source(name_to_weight: dict[str, float], records: int, payload: Callable[[int], dict[str, Any]]) -> Any:
    """A curriculum over `records` rows a dataset, in memory, repeated as often as needed."""
    shards = 8
    datasets = []
    for name in name_to_weight:
        rows = [[payload(i) for i in range(k, records, shards)] for k in range(shards)]
        datasets.append(Dataset.from_dict(name, {k: InMemoryShard(part) for k, part in enumerate(rows)}))
    mixture = MixtureSpec(name_to_weight)
    return StaticMixtureWorkSource(datasets=datasets, mixture=mixture, seed=42, exhausted_policy="repeat")


def drain(pipeline: Any, records: int) -> tuple[float, float]:
    """(wall, CPU) nanoseconds a record over `records` delivered ones, after one pass over the data."""
    batches = iter(pipeline)
    warm = 0
    while warm < WARM_RECORDS:
        warm += len(next(batches))
    seen, wall, cpu = 0, time.perf_counter_ns(), time.process_time_ns()
    for batch in batches:
        seen += len(batch)
        if seen >= records:
            break
    wall, cpu = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
    pipeline.close()
    return wall / seen, cpu / seen


def fetch_and_batch(runner: str, microbatch: int = 256) -> Any:
    work = source({"a": 0.25, "b": 0.75}, ROWS, lambda i: {"x": i})
    return Pipeline(work).batch(microbatch).options(runner=runner)


@contextmanager
def without_counters() -> Iterator[None]:
    """The same code with every counting method replaced by nothing."""

    def nothing(*_: Any) -> None:
        return None

    counting = [(OperatorCounters, "add"), (Counters, "hand_out"), (Deliveries, "add")]
    with ExitStack() as stack:
        for owner, method in counting:
            stack.enter_context(patch.object(owner, method, nothing))
        yield


def report(name: str, **values: Any) -> None:
    print(json.dumps({"measure": name} | values), flush=True)


def records_per_second(repeats: int, records: int) -> None:
    """The wall time is what a user sees; the CPU time is what a busy machine leaves comparable."""
    for runner in ("inline", "threads"):
        for microbatch in (32, 256):
            walls, cpus = zip(
                *(drain(fetch_and_batch(runner, microbatch), records) for _ in range(repeats)), strict=True
            )
            report(
                "fetch_and_batch",
                runner=runner,
                batch=microbatch,
                ns_per_record=round(statistics.median(walls), 1),
                cpu_ns_per_record=round(statistics.median(cpus), 1),
                range=[round(min(walls), 1), round(max(walls), 1)],
                records_per_s=round(1e9 / statistics.median(walls)),
            )


def counters(repeats: int, records: int) -> None:
    """CPU time of pairs run back to back, in alternating order; the median ratio is robust to a noisy machine."""

    def measure(counting: bool) -> float:
        with nullcontext() if counting else without_counters():
            return drain(fetch_and_batch("inline"), records)[1]

    ratios = []
    for i in range(2 * repeats):
        times = {counting: measure(counting) for counting in ((True, False) if i % 2 else (False, True))}
        ratios.append(100 * (times[True] / times[False] - 1))
    report(
        "counters",
        percent=round(statistics.median(ratios), 2),
        range=[round(min(ratios), 2), round(max(ratios), 2)],
    )


def import_time(repeats: int) -> None:
    """`import headrace` alone, and with the names that a data pipeline needs."""
    found = []
    for _ in range(repeats + 1):
        out = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
        found.append(out.split())
    bare, names = ([float(times[i]) for times in found[1:]] for i in (0, 1))  # the first may still compile
    torch_came = any(times[2] == "True" for times in found)
    middle = [round(statistics.median(times), 3) for times in (bare, names)]
    report("import", seconds=middle[0], with_names=middle[1], least=round(min(names), 3), torch=torch_came)


def checkpoint_size() -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 50_000, int(length)).astype(np.int32) for length in rng.lognormal(6.3, 1.1, 4000)]
    work = source({"code": 0.25, "web": 0.75}, 40_000, lambda i: {"input_ids": ids[i % len(ids)]})
    pipeline = Pipeline(work).shuffle(buffer_size=8192).pack_flat(2048, algorithm="wrap").batch(8)
    batches = iter(pipeline)
    sizes, times = [], []
    for number in range(1, 401):
        next(batches)
        if number % 50 == 0:
            start = time.perf_counter()
            sizes.append(len(pipeline.checkpoint(as_bytes=True)))
            times.append(time.perf_counter() - start)
    pipeline.close()
    report(
        "checkpoint",
        bytes_median=round(statistics.median(sizes)),
        bytes_most=max(sizes),
        ms_median=round(1e3 * statistics.median(times), 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--records", type=int, default=400_000)
    args = parser.parse_args()
    import_time(args.repeats)
    records_per_second(args.repeats, args.records)
    counters(args.repeats, args.records)
    checkpoint_size()


if __name__ == "__main__":
    main()

"""Step pipelines against the field: python -m benchmarks.steps [W1 W2 W3 skew] [--rounds 3] [--peers a,b] [--scale 1.0]

Every run is a fresh process, and runs are interleaved (each configuration once, then all again), so that a slow minute
of the machine meets all alike. Times include starting and ending the workers; "from the first output on" is what a long run
would see. One JSON line a run is appended to `.bench/steps.jsonl`; a Markdown table of the best runs, with ratios to ours, goes
to standard output. A peer that is not installed is a row that says so: the peers are mpire, joblib, pypeln and torch, and belong
into an environment of their own (`python -m venv`, then `pip install -e . mpire joblib pypeln torch`).

W1    200 000 small dicts through three cheap steps
W2    20 000 items of about 0.19 ms of pure Python
W3    200 arrays of 8 MB, to a worker, times 2.0, and back
skew  20 000 items of no work, then 100 that sleep 20 ms
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import resource
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / ".bench" / "steps.jsonl"
WORKERS = len(os.sched_getaffinity(0))

# -- the work ------------------------------------------------------------------------------------------------------


def clean(row: dict[str, Any]) -> dict[str, Any]:
    row["text"] = row["text"].strip()
    return row


def count(row: dict[str, Any]) -> dict[str, Any]:
    row["length"] = len(row["text"])
    return row


def label(row: dict[str, Any]) -> dict[str, Any]:
    row["even"] = row["id"] % 2 == 0
    return row


def fused(row: dict[str, Any]) -> dict[str, Any]:
    return label(count(clean(row)))


LOOPS = 4400  # about 0.19 ms of pure Python on the machine of the first measurements


def spin(x: int) -> int:
    total = 0
    for k in range(LOOPS):
        total += k
    return x


def double(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array * 2.0


def sometimes_sleep(x: int) -> int:
    if x >= 20_000:
        time.sleep(0.02)
    return x


def rows(n: int) -> list[dict[str, Any]]:
    return [
        {"id": k, "text": f"  the text of row number {k}  ", "score": k * 0.5, "tags": ["a", "b"]} for k in range(n)
    ]


class Workload:
    """Items, the steps for us, and the same as one function for those who take one."""

    def __init__(self, items: Callable[[int], Iterable[Any]], n: int, steps: list[Any], one: Any, chunk: int) -> None:
        self.items, self.n, self.steps, self.one, self.chunk = items, n, steps, one, chunk


def arrays(n: int) -> Iterator[Any]:
    return itertools.repeat(np.ones(1_000_000), n)


WORKLOADS = {
    "W1": Workload(rows, 200_000, [clean, count, label], fused, 100),
    "W2": Workload(range, 20_000, [spin], spin, 100),
    "W3": Workload(arrays, 200, [double], double, 1),
    "skew": Workload(range, 20_100, [sometimes_sleep], sometimes_sleep, 100),
}

# -- ours and the field: each is a function (workload, items) -> iterator of outputs ------------------------------


def ours(work: Workload, items: Iterable[Any], **options: Any) -> Iterator[Any]:
    from headrace.steps import Pipeline

    with Pipeline(work.steps, **options) as pipeline:
        yield from pipeline.map(items)


def plain_loop(work: Workload, items: Iterable[Any]) -> Iterator[Any]:
    return map(work.one, items)


def pool(work: Workload, items: Iterable[Any], ordered: bool, chunk: int) -> Iterator[Any]:
    import multiprocessing

    with multiprocessing.Pool(WORKERS) as workers:
        method = workers.imap if ordered else workers.imap_unordered
        yield from method(work.one, items, chunksize=chunk)


def futures(work: Workload, items: Iterable[Any], chunk: int) -> Iterator[Any]:
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(WORKERS) as executor:
        yield from executor.map(work.one, items, chunksize=chunk)


def mpire(work: Workload, items: Iterable[Any], chunk: int | None) -> Iterator[Any]:
    from mpire import WorkerPool

    as_tuples = ((item,) for item in items)
    with WorkerPool(WORKERS) as workers:
        yield from workers.imap(work.one, as_tuples, iterable_len=work.n, chunk_size=chunk)


def joblib(work: Workload, items: Iterable[Any], batch: Any) -> Iterator[Any]:
    from joblib import Parallel, delayed

    parallel = Parallel(n_jobs=WORKERS, return_as="generator", batch_size=batch)
    yield from parallel(delayed(work.one)(item) for item in items)


def stand_in_for_pkg_resources() -> None:
    """pypeln's dependency asks it for a version; setuptools no longer has it."""
    module: Any = types.ModuleType("pkg_resources")
    module.get_distribution = lambda name: types.SimpleNamespace(version=name)
    module.DistributionNotFound = LookupError
    sys.modules.setdefault("pkg_resources", module)


def pypeln(work: Workload, items: Iterable[Any]) -> Iterator[Any]:
    import pypeln as pl

    yield from pl.process.map(work.one, items, workers=WORKERS, maxsize=1000)


def as_is(batch: list[Any]) -> list[Any]:
    return batch


class Indexed:
    """A dataset for torch: items by index, the work done in the worker."""

    def __init__(self, work: Workload, items: Iterable[Any]) -> None:
        self.work, self.items = work, list(items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, k: int) -> Any:
        return self.work.one(self.items[k])


def torch_loader(work: Workload, items: Iterable[Any], batch: int) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    loader = DataLoader(Indexed(work, items), batch_size=batch, num_workers=WORKERS, collate_fn=as_is)
    for outputs in loader:
        yield from outputs


def best(
    function: Callable[..., Iterator[Any]], work: Workload, items: Iterable[Any], **settings: Any
) -> Iterator[Any]:
    return function(work, items, **settings, chunk=work.chunk)


CONFIGS: dict[str, Callable[[Workload, Iterable[Any]], Iterator[Any]]] = {
    "headrace auto": ours,
    "headrace process": partial(ours, num_workers=WORKERS),
    "headrace unordered": partial(ours, num_workers=WORKERS, ordered=False),
    "headrace threads": partial(ours, num_workers=WORKERS, runner="threads"),
    "plain loop": plain_loop,
    "Pool.imap": partial(best, pool, ordered=True),
    "Pool.imap_unordered": partial(best, pool, ordered=False),
    "Pool.imap chunk 1": partial(pool, ordered=True, chunk=1),
    "concurrent.futures": partial(best, futures),
    "mpire": partial(mpire, chunk=None),
    "mpire chunk": partial(best, mpire),
    "joblib auto": partial(joblib, batch="auto"),
    "joblib 100": partial(joblib, batch=100),
    "pypeln": pypeln,
    "torch DataLoader": lambda work, items: torch_loader(work, items, work.chunk),
}
PARTS = {  # too slow for the whole workload: this share of it, times are for each item
    ("W1", "pypeln"): 0.02,
    ("W1", "Pool.imap chunk 1"): 0.1,
    ("skew", "pypeln"): 1.0,
}
SKIPPED = {("W3", "joblib 100"), ("W3", "Pool.imap chunk 1"), ("W1", "headrace threads"), ("W2", "headrace threads")}


def prepare(config: str) -> None:
    """Import what the configuration needs: nobody's imports are timed."""
    word = config.split()[0]
    if word == "pypeln":
        stand_in_for_pkg_resources()
    modules = {"headrace": "headrace.steps.pipeline", "torch": "torch.utils.data", "Pool.imap": "multiprocessing.pool"}
    modules |= {"Pool.imap_unordered": "multiprocessing.pool", "concurrent.futures": "concurrent.futures.process"}
    modules |= {"mpire": "mpire", "joblib": "joblib", "pypeln": "pypeln"}
    if word in modules:
        importlib.import_module(modules[word])
    if word == "headrace":
        for name in ("headrace.run.inline", "headrace.run.process", "headrace.run.threads"):
            importlib.import_module(name)


def measure(workload: str, config: str, scale: float) -> dict[str, Any]:
    """Run one configuration here; returns its figures."""
    warnings.simplefilter("ignore")
    work = WORKLOADS[workload]
    n = work.n if workload == "skew" else max(10, int(work.n * scale * PARTS.get((workload, config), 1.0)))
    work.n = n
    items = work.items(n)
    prepare(config)
    started = last = time.perf_counter()
    silence, outputs, first = 0.0, 0, 0.0
    for _ in CONFIGS[config](work, items):
        now = time.perf_counter()
        if outputs == 0:
            first = now - started
        elif now - last > silence:
            silence = now - last
        last = now
        outputs += 1
    seconds = time.perf_counter() - started
    assert outputs == n, f"{config} gave {outputs} of {n} outputs"
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in usage)
    return {
        "workload": workload,
        "config": config,
        "items": n,
        "seconds": seconds,
        "us_per_item": seconds / n * 1e6,
        "first": first,
        "later_us_per_item": (last - started - first) / max(1, outputs - 1) * 1e6,
        "silence": silence,
        "cpu_us_per_item": cpu / n * 1e6,
        "workers": WORKERS,
        "load": os.getloadavg()[0],
    }


def run_one(workload: str, config: str, scale: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.steps", "--one", workload, config, "--scale", str(scale)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled once, as every installed library is
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    except subprocess.TimeoutExpired:
        return {"workload": workload, "config": config, "error": "no end within 300 s"}
    if done.returncode:
        return {"workload": workload, "config": config, "error": (done.stderr.strip().splitlines() or ["?"])[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def table(runs: list[dict[str, Any]]) -> str:
    """The best run of each configuration, and its ratio to ours (above 1: ours is faster)."""
    lines = []
    for workload in dict.fromkeys(run["workload"] for run in runs):
        mine = [run for run in runs if run["workload"] == workload]
        least = {
            config: min(
                (run for run in mine if run["config"] == config and "error" not in run), key=_seconds, default=None
            )
            for config in dict.fromkeys(run["config"] for run in mine)
        }
        references = {name: least.get(f"headrace {name}") for name in ("process", "auto")}
        lines += [
            f"\n**{workload}** ({WORKLOADS[workload].__dict__['n']} items, {WORKERS} workers, best of the rounds)\n",
            "| | us an item | from the first output on | longest silence, s | to process | to auto |",
            "|---|---|---|---|---|---|",
        ]
        for config, run in sorted(least.items(), key=lambda pair: _seconds(pair[1])):
            if run is None:
                error = next(other["error"] for other in mine if other["config"] == config)
                lines.append(f"| {config} | {error} | | | | |")
                continue
            ratios = [f"{_seconds(run) / _seconds(ref):.2f}" if ref else "" for ref in references.values()]
            times = f"{run['us_per_item']:.2f} | {least_later(mine, config):.2f} | {run['silence']:.2f}"
            lines.append(f"| {config} | {times} | {ratios[0]} | {ratios[1]} |")
    return "\n".join(lines)


def least_later(runs: list[dict[str, Any]], config: str) -> float:
    return min(run["later_us_per_item"] for run in runs if run["config"] == config and "error" not in run)


def _seconds(run: dict[str, Any] | None) -> float:
    return run["us_per_item"] if run is not None else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="", help="comma-separated parts of configuration names; ours always run")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each workload")
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "CONFIG"), help="run one configuration here")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, args.scale)))
        return
    peers = [part for part in args.peers.split(",") if part]
    chosen = [name for name in CONFIGS if name.startswith("headrace") or not peers or any(p in name for p in peers)]
    RESULTS.parent.mkdir(exist_ok=True)
    runs: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for workload in args.workloads or list(WORKLOADS):
            for config in chosen:
                if (workload, config) in SKIPPED:
                    continue
                run = run_one(workload, config, args.scale) | {"round": number}
                runs.append(run)
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(run) + "\n")
                shown = run.get("error") or f"{run['us_per_item']:.2f} us an item, silence {run['silence']:.2f} s"
                print(f"{workload} {config}: {shown}", file=sys.stderr, flush=True)
    print(table(runs))


if __name__ == "__main__":
    main()

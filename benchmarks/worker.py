"""One run, inside the loader's own environment. Prints one JSON object; `runner` starts it and watches its memory.

    python -m benchmarks.worker --loader zephon --workload W1 --mode run|first|save|load --options '{"fmt": "jsonl"}'

Text must not repeat in a window: fast tokenizers remember words. So a W1 run ends, warm-up included, when one pass over
the corpora is nearly used up, however fast the loader is.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from .loaders.base import Loader

ONE_PASS_TOKENS = {"W1": 85_000_000}
WARM_TOKENS = 8_000_000


def since_exec() -> float:
    """Seconds since this process was started."""
    return time.time() - psutil.Process().create_time()


def cpu_of_tree() -> float:
    """CPU seconds used so far by this process and its children."""
    total = 0.0
    for process in [me := psutil.Process(), *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def cpu_of_machine() -> float:
    """CPU seconds used so far by everything on this machine."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def endless(loader: Loader, first: Iterator[Any]) -> Iterator[Any]:
    """Batches of one pass after another."""
    while True:
        yield from first
        first = loader.iterate()


def measure(loader: Loader, batches: Iterator[Any], seconds: float, warm: float) -> dict[str, Any]:
    """Count a warm-up, then a window of `seconds`, or as much of one pass as is left."""
    budget = ONE_PASS_TOKENS.get(loader.workload, 10**18)
    warm_until, warmed = time.perf_counter() + warm, 0
    while time.perf_counter() < warm_until and warmed < min(WARM_TOKENS, budget):
        warmed += loader.count(next(batches))[1]
    cpu, machine, waits = cpu_of_tree(), cpu_of_machine(), []
    records = tokens = 0
    start = last = time.perf_counter()
    while last < start + seconds and warmed + tokens < budget:
        batch = next(batches)
        waits.append(time.perf_counter() - last)
        more_records, more_tokens = loader.count(batch)
        records += more_records
        tokens += more_tokens
        last = time.perf_counter()
    wall = last - start
    cpu, machine = cpu_of_tree() - cpu, cpu_of_machine() - machine
    waits.sort()
    return {
        "seconds": round(wall, 3),
        "batches": len(waits),
        "records": records,
        "tokens": tokens,
        "records_per_s": round(records / wall, 1),
        "tokens_per_s": round(tokens / wall, 1),
        "wait_ms_p50": round(waits[len(waits) // 2] * 1e3, 3),
        "wait_ms_p99": round(waits[int(len(waits) * 0.99)] * 1e3, 3),
        "cpu_cores": round(cpu / wall, 2),
        "foreign_cores": round(max(0.0, machine - cpu) / wall, 2),
        "cpu_ns_per_token": round(cpu / max(1, tokens) * 1e9, 2),
        "cpu_us_per_record": round(cpu / max(1, records) * 1e6, 2),
    }


def save(loader: Loader, batches: Iterator[Any], args: argparse.Namespace) -> dict[str, Any]:
    """Deliver `--resume-at` batches (one is out already), save, and note what comes next."""
    start = time.perf_counter()
    for _ in range(args.resume_at - 1):
        next(batches)
    consumed, start = time.perf_counter() - start, time.perf_counter()
    state = loader.state()
    out = {"consume_s": round(consumed, 3), "state_s": round(time.perf_counter() - start, 4), "state_bytes": 0}
    if state is not None:
        blob = state if isinstance(state, bytes) else pickle.dumps(state)
        Path(args.state).write_bytes(pickle.dumps(state))
        out["state_bytes"] = len(blob)
    return out | {"next": loader.digest(next(batches))}


def run(args: argparse.Namespace) -> dict[str, Any]:
    module = importlib.import_module(f"benchmarks.loaders.{args.loader}")
    imported = since_exec()
    loader: Loader = module.LOADER(args.workload, json.loads(args.options))
    start, cpu = time.perf_counter(), cpu_of_tree()
    if args.mode == "load":
        loader.restore(pickle.loads(Path(args.state).read_bytes()))  # noqa: S301 (written by the run before)
    loader.build()
    built = time.perf_counter() - start
    batches = endless(loader, loader.iterate())
    batch = next(batches)
    loader.count(batch)
    out: dict[str, Any] = {
        "import_s": round(imported, 3),
        "build_s": round(built, 3),
        "first_batch_s": round(time.perf_counter() - start, 3),
        "first_batch_cpu_s": round(cpu_of_tree() - cpu, 2),
        "first_from_exec_s": round(since_exec(), 3),
    }
    match args.mode:
        case "run":
            out |= measure(loader, batches, args.seconds, args.warm)
        case "save":
            out |= save(loader, batches, args)
        case "load":
            out["next"] = loader.digest(batch)
    out |= getattr(loader, "extra", {})
    print("\n" + json.dumps(out), flush=True)
    loader.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loader", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--mode", default="run", choices=["run", "first", "save", "load"])
    parser.add_argument("--options", default="{}")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--warm", type=float, default=2.5)
    parser.add_argument("--resume-at", type=int, default=2000)
    parser.add_argument("--state", default="")
    run(parser.parse_args())
    sys.stdout.flush()
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)  # some peers hang in their finalizers


if __name__ == "__main__":
    main()

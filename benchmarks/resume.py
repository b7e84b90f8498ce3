"""Time from a checkpoint to the first batch, against the position in the run.

    python -m benchmarks.resume [--positions 50,500,5000] [--rounds 2] [--peers headrace,zephon] [--shuffle 8192]
    python -m benchmarks.resume --of FILE... --into docs/benchmarks.md      # the table of earlier runs

W1 with a shuffle of documents before packing. Each figure is a fresh process in the loader's own environment: build the pipeline,
restore, take one batch; the import of the library is not counted. `cold` is the same without a checkpoint. The run that saves
also notes the batch that follows, and a resume counts as exact if it delivers that one. `CPU` is processor time of the same span,
threads and processes ahead of the first batch included: the figure that other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from .paths import CACHE, RESULTS
from .report import machine, put_into
from .runner import Config, Timing, start

TIMING = Timing(seconds=1.0, warm=0.0, limit=900.0)
FLUSHES: tuple[int | None, ...] = (8, None)


def config(loader: str, flush: int | None, shuffle: int) -> Config:
    """The loader's options for this cadence; each has a place of its own for it."""
    options: dict[str, Any] = {"fmt": "jsonl", "shuffle": shuffle}
    setting = {"flush_every_k_chunks": flush}
    return Config(loader, options | ({"run": setting} if loader == "headrace" else setting))


def measure(config: Config, position: int, rounds: int) -> dict[str, Any]:
    """Save once at `position`, then resume and start cold in turn."""
    CACHE.mkdir(parents=True, exist_ok=True)
    state = CACHE / f"resume-{time.time_ns()}.bin"
    saved = start(config, "W1", TIMING, mode="save", state=state, resume_at=position)
    if not saved.get("state_bytes"):
        return {"error": saved.get("error", "no state")}
    cold, resumed = [], []
    for _ in range(rounds):
        cold.append(start(config, "W1", TIMING, mode="first"))
        resumed.append(start(config, "W1", TIMING, mode="load", state=state))
    state.unlink()
    failed = next((run["error"] for run in (*cold, *resumed) if "error" in run), None)
    if failed:
        return {"error": failed}
    return {
        "bytes": saved["state_bytes"],
        "save_s": saved["state_s"],
        "cold_s": statistics.median(run["first_batch_s"] for run in cold),
        "cold_cpu_s": statistics.median(run["first_batch_cpu_s"] for run in cold),
        "resume_s": statistics.median(run["first_batch_s"] for run in resumed),
        "resume_cpu_s": statistics.median(run["first_batch_cpu_s"] for run in resumed),
        "exact": all(run["next"] == saved["next"] for run in resumed),
    }


def row(run: dict[str, Any]) -> str:
    """One line of the table."""
    name = f"{run['loader']}, flush every {run['flush']} chunks" if run["flush"] else f"{run['loader']}, no flush"
    if "error" in run:
        return f"| {name} | {run['position']} | {run['error'][:60]} | | | | |"
    figures = (run["cold_s"], run["resume_s"], run["cold_cpu_s"], run["resume_cpu_s"])
    shown = " | ".join(f"{figure:.2f}" for figure in figures)
    return f"| {name} | {run['position']} | {shown} | {run['bytes']:,} | {'yes' if run['exact'] else 'no'} |"


HEAD = """| loader | batches before | cold, s | resume, s | cold, CPU s | resume, CPU s | bytes | exact |
|---|---|---|---|---|---|---|---|"""


def table(files: list[Path]) -> str:
    """The rows of these results, by position."""
    runs = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return "\n".join([machine(), "", HEAD, *map(row, sorted(runs, key=lambda run: run["position"])), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", default="50,500,5000")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peers", default="headrace,zephon")
    parser.add_argument("--shuffle", type=int, default=8192)
    parser.add_argument("--of", type=Path, nargs="+", default=None)
    parser.add_argument("--into", type=Path, default=None)
    args = parser.parse_args()
    files = [measured(args)] if args.of is None else args.of
    if args.into is not None:
        put_into(args.into, table(files), "resume")
    elif args.of is not None:
        print(table(files))


def measured(args: argparse.Namespace) -> Path:
    """Measure and print row by row; the file of results."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    results: Path = RESULTS / f"resume-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    print(HEAD)
    for position in map(int, args.positions.split(",")):
        for loader in args.peers.split(","):
            for flush in FLUSHES:
                found = measure(config(loader, flush, args.shuffle), position, args.rounds)
                run = {"loader": loader, "flush": flush, "position": position, **found}
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(run) + "\n")
                print(row(run), flush=True)
    return results


if __name__ == "__main__":
    main()

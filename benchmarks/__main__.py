"""python -m benchmarks [W1 W2 ... | all] [--peers a,b] [--rounds 3] [--quick]

Runs are interleaved: every configuration once, then all of them again, so that a slow minute of the machine meets all of
them alike. A run that saw much work of other processes is repeated up to twice at the end of its round.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import psutil

from . import setup
from .matrix import MATRIX, QUICK, TIMING
from .paths import RESULTS, ROOT
from .report import markdown
from .runner import Config, Timing, run_config

BUSY = 0.25
"""Cores used by other processes above which a run counts as disturbed."""


def wait_until_quiet(limit: float) -> None:
    """Wait for a second in which the machine does nothing else, `limit` seconds at most."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        if psutil.cpu_percent(interval=1.0) / 100 * (psutil.cpu_count() or 1) < BUSY:
            return


def one_run(config: Config, workload: str, timing: Timing, patience: float) -> dict[str, Any]:
    wait_until_quiet(patience)
    out = run_config(config, workload, timing)
    out["disturbed"] = out.get("foreign_cores", 0.0) > BUSY
    shown = out.get("error") or {
        "W1": f"{out.get('tokens_per_s', 0) / 1e6:.2f} M tokens/s",
        "W2": f"{out.get('records_per_s', 0) / 1e3:.1f} k records/s",
        "W3": f"{out.get('records_per_s', 0) / 1e3:.1f} k rows/s",
        "W4": f"first {out.get('first', {}).get('first_batch_s')} s, "
        f"resume {out.get('load', {}).get('first_batch_s')} s, exact {out.get('exact')}",
    }.get(workload)
    print(f"{workload} {config.label}: {shown}{' (disturbed)' if out['disturbed'] else ''}", flush=True)
    return out


def run_workload(workload: str, configs: list[Config], args: argparse.Namespace, results: Path) -> None:
    timing = (QUICK if args.quick else TIMING)[workload]
    for number in range(args.rounds):
        waiting = [(config, 0) for config in configs if config.core or number == 0]
        while waiting:
            config, tries = waiting.pop(0)
            out = one_run(config, workload, timing, args.patience)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(out | {"round": number}) + "\n")
            if out["disturbed"] and tries < args.retries:
                waiting.append((config, tries + 1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["all"], help="W1 W2 W3 W4 W5, or all (the default)")
    parser.add_argument("--peers", default="", help="loaders to run, separated by commas; all if not given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", action="store_true", help="only the main configurations")
    parser.add_argument("--quick", action="store_true", help="one round of short windows: does it run, not how fast")
    parser.add_argument("--patience", type=float, default=40.0, help="seconds to wait for a quiet machine before a run")
    parser.add_argument("--retries", type=int, default=2, help="how often a disturbed run is repeated")
    parser.add_argument("--results", type=Path, default=None, help="file of JSON lines to add to")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.patience, args.retries = 1, 0.0, 0
    return args


def main() -> None:
    args = parse()
    asked = [name.upper() for name in args.workloads]
    tables = [*MATRIX, "W5"] if asked == ["ALL"] else asked
    if unknown := set(tables) - {*MATRIX, "W5"}:
        raise SystemExit(f"unknown workload {', '.join(sorted(unknown))}: choose from {', '.join(MATRIX)}, W5, all")
    if not setup.is_ready():
        print(f"preparing {ROOT} (set HEADRACE_BENCH for another folder)", flush=True)
        setup.prepare()
    peers = set(filter(None, args.peers.split(",")))
    RESULTS.mkdir(parents=True, exist_ok=True)
    results = args.results or RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    for workload in dict.fromkeys("W1" if name == "W5" else name for name in tables):
        configs = [c for c in MATRIX[workload] if (not peers or c.loader in peers) and (c.core or not args.core)]
        run_workload(workload, configs, args, results)
    if results.exists():
        print("\n" + markdown(results, tables))


if __name__ == "__main__":
    main()

"""Results (one JSON object a run) to Markdown tables: medians over the undisturbed runs, their range, and ratios.

python -m benchmarks.report FILE... > table.md
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path

import psutil

from .goals import goals_table
from .results import Run, best, grouped, is_rival, median

UNITS = {
    "W1": ("tokens_per_s", 1e6, "M tokens/s"),
    "W2": ("records_per_s", 1e3, "k records/s"),
    "W3": ("records_per_s", 1e3, "k rows/s"),
}


def figure(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.{digits}f}"


def throughput_table(runs: list[Run], workload: str) -> list[str]:
    key, scale, unit = UNITS[workload]
    groups = grouped(runs, workload)
    rival = best(groups, key, is_rival)
    cpu = ("cpu_us_per_record", "CPU µs a record") if workload == "W2" else ("cpu_ns_per_token", "CPU ns a token")
    lines = [
        f"### {workload}",
        "",
        f"| loader | n | {unit}, median [range] | ratio to zephon's best | {cpu[1]} | cores | wait p99 ms | first batch s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ranked = sorted(groups.items(), key=lambda item: -(median(item[1], key) or 0.0))
    for name, found in ranked:
        if "error" in found[0]:
            lines.append(f"| {name} | - | failed: {found[0]['error'][:80]} | | | | | |")
            continue
        values = [run[key] / scale for run in found]
        mark = "~" if found[0].get("disturbed") else ""
        span = f"{figure(statistics.median(values))} [{figure(min(values))}-{figure(max(values))}]"
        ratio = figure(statistics.median(values) * scale / rival) if rival else "-"
        columns = [figure(median(found, column)) for column in (cpu[0], "cpu_cores", "wait_ms_p99", "first_batch_s")]
        lines.append(f"| {name} | {len(found)}{mark} | {span} | {ratio} | {' | '.join(columns)} |")
    return lines


def memory_table(runs: list[Run]) -> list[str]:
    lines = [
        "### W5 (peak memory of all processes during W1)",
        "",
        "| loader | peak RSS MB | peak PSS MB | processes |",
        "|---|---|---|---|",
    ]
    groups = {name: found for name, found in grouped(runs, "W1").items() if "error" not in found[0]}
    for name, found in sorted(groups.items(), key=lambda item: median(item[1], "peak_pss_mb") or 0.0):
        columns = [figure(median(found, key), 0) for key in ("peak_rss_mb", "peak_pss_mb", "processes")]
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return lines


def resume_table(runs: list[Run]) -> list[str]:
    lines = [
        "### W4 (first batch; save after 2000 batches; resume)",
        "",
        "| loader | import s | first batch s | 2000 batches s | save s | state bytes | restore to first batch s | exact |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in grouped(runs, "W4").items():
        columns = []
        for part, key in (
            ("first", "import_s"),
            ("first", "first_batch_s"),
            ("save", "consume_s"),
            ("save", "state_s"),
            ("save", "state_bytes"),
            ("load", "first_batch_s"),
        ):
            parts = [run[part] for run in found if part in run]
            errors = [run["error"] for run in parts if "error" in run]
            columns.append(errors[0][:60] if errors else figure(median(parts, key)))
        exact = {run.get("exact") for run in found}
        columns.append("-" if exact == {None} else "yes" if exact == {True} else "NO")
        lines.append(f"| {name} | {' | '.join(columns)} |")
    return lines


def markdown(path: Path, tables: list[str]) -> str:
    """The tables asked for, of the workloads that the file has."""
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    have = {run["workload"] for run in runs}
    lines: list[str] = []
    for table in tables:
        if table in UNITS and table in have:
            lines += [*throughput_table(runs, table), ""]
        elif table == "W4" and table in have:
            lines += [*resume_table(runs), ""]
        elif table == "W5" and "W1" in have:
            lines += [*memory_table(runs), ""]
    if any(run["loader"] == "headrace" for run in runs):
        lines += goals_table(runs)
    return "\n".join(lines)


def machine() -> str:
    """One line about where the runs were made."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = round(psutil.virtual_memory().total / 2**30)
    return f"{psutil.cpu_count()} x {model}, {memory} GiB, Python {platform.python_version()}, data in the page cache."


def put_into(page: Path, text: str, part: str = "results") -> None:
    """Replace what stands between the page's two markers for this part."""
    begin, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
    old = page.read_text(encoding="utf-8")
    head, rest = old.split(begin)
    page.write_text(f"{head}{begin}\n\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--into", type=Path, default=None)
    args = parser.parse_args()
    text = f"{machine()}\n\n{markdown(args.results, ['W1', 'W2', 'W3', 'W4', 'W5'])}"
    if args.into is None:
        print(text)
    else:
        put_into(args.into, text)


if __name__ == "__main__":
    main()

"""Start one run in its environment, watch its memory from outside, and return what it measured as one dict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .paths import CACHE, REPO, env_python

ENV_OF = {"streaming": "streaming", "headrace": "", "bare": ""}
"""Which environment a loader needs; "" is the interpreter that runs this, everything else is `peers`."""


@dataclass(frozen=True)
class Config:
    """One row of a table: a loader with options. `core` rows are measured in every round, others once."""

    loader: str
    options: dict[str, Any] = field(default_factory=dict)
    core: bool = True

    @property
    def label(self) -> str:
        options = " ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.loader} {options}".strip()


@dataclass(frozen=True)
class Timing:
    """How long a run lasts: warm-up, window, and the limit after which it is ended."""

    seconds: float
    warm: float
    limit: float = 150.0


def interpreter(loader: str) -> Path:
    env = ENV_OF.get(loader, "peers")
    return env_python(env) if env else Path(sys.executable)


def tree_of(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        try:
            stat = Path(f"/proc/{int(entry)}/stat").read_text()
        except (ValueError, OSError):
            continue
        children.setdefault(int(stat[stat.rindex(")") + 2 :].split()[1]), []).append(int(entry))
    out, waiting = [], [pid]
    while waiting:
        out.append(one := waiting.pop())
        waiting += children.get(one, [])
    return out


def memory_of(pids: list[int]) -> dict[str, int]:
    """Resident and proportional memory in kB, summed."""
    total = {"Rss": 0, "Pss": 0}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(":")
            if key in total:
                total[key] += int(value.split()[0])
    return total


class MemoryWatch:
    """Samples the memory of a process tree until stopped, and keeps the peaks (MB)."""

    def __init__(self, pid: int, period: float = 0.3) -> None:
        self.peak = {"peak_rss_mb": 0, "peak_pss_mb": 0, "processes": 0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(pid, period), daemon=True)
        self._thread.start()

    def _watch(self, pid: int, period: float) -> None:
        while not self._stop.wait(period):
            pids = tree_of(pid)
            now = memory_of(pids)
            seen = {
                "peak_rss_mb": now["Rss"] // 1024,
                "peak_pss_mb": now["Pss"] // 1024,
                "processes": len(pids),
            }
            self.peak = {key: max(self.peak[key], value) for key, value in seen.items()}

    def stop(self) -> dict[str, int]:
        self._stop.set()
        self._thread.join()
        return self.peak


def child_environment() -> dict[str, str]:
    """Offline, quiet, with this package importable; compiled files are kept so that imports are not paid twice."""
    paths = [str(REPO), str(REPO / "src")]
    extra = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(CACHE / "datasets"),
        "XDG_CACHE_HOME": str(CACHE / "xdg"),
        "NO_ALBUMENTATIONS_UPDATE": "1",
    }
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return kept | extra


def start(config: Config, workload: str, timing: Timing, **arguments: Any) -> dict[str, Any]:
    """One process from start to end. A failure comes back as `{"error": last line}`."""
    python = interpreter(config.loader)
    if not python.exists():
        return {"error": f"no environment {python.parent.parent.name}: run `python -m benchmarks.setup` first"}
    command = [str(python), "-m", "benchmarks.worker", "--loader", config.loader]
    command += ["--workload", workload, "--options", json.dumps(config.options)]
    command += ["--seconds", str(timing.seconds), "--warm", str(timing.warm)]
    for key, value in arguments.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
        cwd=REPO,
        start_new_session=True,
    )
    watch, timed_out = MemoryWatch(process.pid), False
    try:
        out, err = process.communicate(timeout=timing.limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        timed_out = True
    peak = watch.stop()
    line = next((line for line in reversed(out.splitlines()) if line.startswith("{")), None)
    if line is None:
        reason = [text for text in err.splitlines() if text.strip()] or [f"exit {process.returncode}"]
        return {"error": f"no result in {timing.limit:.0f} s" if timed_out else reason[-1][-300:]}
    return json.loads(line) | peak


def run_config(config: Config, workload: str, timing: Timing) -> dict[str, Any]:
    """One line of the results: a run of W1, W2 or W3; or the three runs of W4 (first batch, save, resume)."""
    began = round(time.time())
    if workload != "W4":
        out = start(config, workload, timing, mode="run")
    else:
        CACHE.mkdir(parents=True, exist_ok=True)
        state = CACHE / f"state-{os.getpid()}.bin"
        out = {"first": start(config, "W1", timing, mode="first")}
        out["save"] = start(config, "W1", timing, mode="save", state=state)
        if out["save"].get("state_bytes"):
            out["load"] = start(config, "W1", timing, mode="load", state=state)
            if "next" in out["load"]:
                out["exact"] = out["load"]["next"] == out["save"]["next"]
        state.unlink(missing_ok=True)
    return {"workload": workload, "loader": config.loader, "options": config.options, "began": began, **out}

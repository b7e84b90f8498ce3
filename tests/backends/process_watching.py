"""Whether processes that were started for a test are still there."""

from __future__ import annotations

import time

import psutil


def gone(processes: list[psutil.Process]) -> bool:
    """Whether they end within a second: the orphans' new parent collects them when it gets to it."""
    deadline = time.monotonic() + 1.0
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_alive, processes))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

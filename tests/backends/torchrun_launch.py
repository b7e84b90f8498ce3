"""Start a program in several processes, wait with a limit, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"
MODELS = HERE.parent / "unit" / "parallel_torch"


@dataclass(frozen=True)
class Finished:
    """How a launch ended: exit code (of each process, if started one by one) and everything it wrote."""

    codes: tuple[int, ...]
    text: str


def environment() -> dict[str, str]:
    """One thread a process, and our modules importable."""
    path = os.pathsep.join([str(SOURCE), str(MODELS), str(HERE / "programs"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "default"}


def torchrun(program: str, ranks: int, *arguments: str, seconds: float = 120) -> Finished:
    """Run a program of `programs/` under torchrun on this host."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "--max-restarts=0",
    ]
    return _finish([_start([*command, str(HERE / "programs" / program), *arguments], environment())], seconds)


def by_hand(program: str, ranks: int, *arguments: str, seconds: float = 120) -> Finished:
    """Run a program as torchrun would, without its agent, which ends the other ranks when one dies."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, str(HERE / "programs" / program), *arguments]
    return _finish(
        [_start(command, {**environment(), **rendezvous, "RANK": str(rank)}) for rank in range(ranks)], seconds
    )


def _start(command: Sequence[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _finish(processes: list[subprocess.Popen[str]], seconds: float) -> Finished:
    """Collect the processes; past the limit, and in any case at the end, their process groups are killed."""
    texts: list[str] = []
    try:
        for process in processes:
            texts.append(process.communicate(timeout=seconds)[0])
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{process.args} still ran after {seconds:g} s:\n{_rest(processes, texts)}") from error
    finally:
        for process in processes:
            _kill(process)
    return Finished(tuple(process.returncode for process in processes), "\n".join(texts))


def _rest(processes: list[subprocess.Popen[str]], texts: list[str]) -> str:
    for process in processes:
        _kill(process)
    return "\n".join([*texts, *(p.communicate(timeout=10)[0] for p in processes[len(texts) :])])


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)

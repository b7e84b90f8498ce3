"""Where a local rank stands on its node, and how ranks of one run find each other: a socket with a name that only they know.

The only place of the library that reads what a launcher says in the environment about local ranks.
"""

from __future__ import annotations

import itertools
import os
import stat
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from headrace.errors import ConfigError
from headrace.options import RuntimeOptions

LAUNCHER: Final = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
"""What tells one launch of a job from another, where a launcher sets it; the parent process tells it otherwise."""
_LONGEST: Final = 100
"""Bytes of a socket's path that every system takes."""

_sessions: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """Rank `rank` of the `size` ranks on this node."""

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this rank starts what the node shares."""
        return self.rank == 0


def local_place(options: RuntimeOptions) -> LocalPlace:
    """From the options, or else from LOCAL_RANK and LOCAL_WORLD_SIZE as `torchrun` sets them."""
    rank = _whole("LOCAL_RANK", "local_rank", options.local_rank)
    size = _whole("LOCAL_WORLD_SIZE", "local_world_size", options.local_world_size)
    if rank >= size:
        raise ConfigError(f"share='node': local_rank={rank} with local_world_size={size}: local ranks count from 0")
    return LocalPlace(rank, size)


def _whole(variable: str, option: str, given: int | None) -> int:
    if given is not None:
        return given
    text = os.environ.get(variable)
    if text is None:
        raise ConfigError(
            f"share='node' needs {option}: give options({option}=...), or start with a launcher that sets {variable}, "
            "such as torchrun"
        )
    if not text.isdecimal():
        raise ConfigError(f"share='node': the environment says {variable}={text!r}, which is not a rank; unset it")
    return int(text)


def next_session(run_id: str) -> str:
    """A name for the next shared iteration of this run: equal on the ranks of one launch, if all iterate in the same order."""
    launch = [os.environ[name] for name in LAUNCHER if name in os.environ] or _parent()
    return xxhash.xxh3_64_hexdigest("\0".join([run_id, str(next(_sessions[run_id])), *launch]).encode())


def _parent() -> list[str]:
    """The process that started us, and when it began where the system says so: numbers of processes are used again."""
    parent = os.getppid()
    try:
        begun = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        begun = ""
    return [str(parent), begun]


def messages_beside(path: Path) -> Path:
    """A folder for small messages among the ranks that meet at a socket; the engine's process removes it when it ends."""
    return path.with_suffix(".d")


def socket_path(session: str) -> Path:
    """Where the ranks of a session meet: in a folder that only this user can enter."""
    folder = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"share='node': {folder} is not a folder that only this user can enter; remove it, or set TMPDIR to another place"
        )
    path = folder / session
    if len(os.fsencode(path)) > _LONGEST:
        raise ConfigError(f"share='node': {folder} is too long for a socket's path; set TMPDIR to a shorter one")
    return path

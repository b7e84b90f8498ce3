"""The settings of a step pipeline: frozen, and checked where they are born."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from numbers import Real
from typing import Any, Literal

import xxhash

from headrace.arguments import flag, whole_number
from headrace.errors import ConfigError, UnknownOptionError
from headrace.run.executor import SLAB_BYTES
from headrace.steps.chain import Step

OnError = Literal["raise", "skip", "return"]
Runner = Literal["process", "threads", "inline"]
Mode = Literal["fused", "staged"]
Workers = int | Sequence[int] | Literal["auto"]

_AT_LEAST = {"max_retries": 0, "shuffle_buffer": 0, "max_pending": 1, "slab_bytes": 0}  # whole numbers


@dataclass(frozen=True, slots=True)
class Settings:
    """What a pipeline was asked for."""

    steps: tuple[Step, ...]
    num_workers: Workers = "auto"
    mode: Mode = "fused"
    runner: Runner = "process"
    ordered: bool = True
    on_error: OnError = "raise"
    max_retries: int = 2
    timeout: float | None = None
    assign: Callable[[Any], int] | None = None
    shuffle_buffer: int = 0
    seed: int | None = None
    max_pending: int = 100_000
    slab_bytes: int = SLAB_BYTES
    zero_copy: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot work; each message names the option, the value and what would do."""
        _one_of("mode", self.mode, ("fused", "staged"))
        _one_of("runner", self.runner, ("process", "threads", "inline"))
        _one_of("on_error", self.on_error, ("raise", "skip", "return"))
        for name in ("ordered", "zero_copy", "progress"):
            flag(name, getattr(self, name))
        for name, least in _AT_LEAST.items():
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if self.seed is not None:
            object.__setattr__(self, "seed", whole_number("seed", self.seed, 0))
            if self.seed >= 1 << 64:
                raise ConfigError(f"seed must be below 2**64, found {self.seed}")
        if self.timeout is not None:
            object.__setattr__(self, "timeout", _seconds("timeout", self.timeout))
        object.__setattr__(self, "num_workers", self._asked())
        self._check_together()

    def _asked(self) -> Workers:
        """`num_workers`, as plain numbers."""
        asked: Any = self.num_workers
        if isinstance(asked, str):
            _one_of("num_workers", asked, ("auto",))
            return "auto"
        if not isinstance(asked, Iterable):
            return whole_number("num_workers", asked, 1)
        stages = 1 if self.mode == "fused" else len(self.steps)
        counts = tuple(whole_number(f"num_workers[{n}]", count, 1) for n, count in enumerate(asked))
        if len(counts) != stages:
            raise ConfigError(f"num_workers has {len(counts)} numbers for {stages} stage(s) of mode {self.mode!r}")
        return counts

    def _check_together(self) -> None:
        """Refuse options that exclude each other."""
        if not self.steps:
            raise ConfigError("a pipeline needs at least one step")
        if self.assign is not None and self.mode == "staged":
            raise ConfigError("assign= chooses a worker by the item that enters, so it needs mode='fused'")
        if self.shuffle_buffer and self.seed is None:
            raise ConfigError("shuffle_buffer= needs seed=, so that the same run can be had again")
        if self.timeout is not None and self.runner == "inline":
            raise ConfigError("timeout= needs runner='process' or 'threads': nobody watches an inline step")
        if self.timeout is not None and self.seed is not None and self.runner == "threads":
            raise ConfigError(
                f"timeout={self.timeout} and seed={self.seed} do not go together with runner='threads': all threads draw from the "
                "same generators, so seeded steps take turns, and one that hangs would keep the turn for ever; use "
                "runner='process', or leave one of the two out"
            )

    @property
    def may_stay_home(self) -> bool:
        """Whether the first items may run in the caller's process: they leave no state there and nobody watches them."""
        return self.auto and self.runner == "process" and self.assign is None and self.timeout is None

    @property
    def auto(self) -> bool:
        """Whether the number of workers, and whether to have any, is ours to find."""
        return self.num_workers == "auto"

    @property
    def groups(self) -> tuple[tuple[tuple[Step, ...], int], ...]:
        """The steps of each stage, and its workers."""
        stages = [self.steps] if self.mode == "fused" else [(step,) for step in self.steps]
        return tuple(zip(stages, self._counts(len(stages)), strict=True))

    def _counts(self, stages: int) -> list[int]:
        asked = self.num_workers
        if isinstance(asked, str):
            return [max(1, cores() // stages)] * stages
        return [asked] * stages if isinstance(asked, int) else list(asked)


def cores() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < inf:
        raise ConfigError(f"{name} must be a number of seconds above 0, or None for no limit; found {value!r}")
    return float(value)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnknownOptionError(name, str(value), known)


def make_steps(steps: Iterable[Any]) -> tuple[Step, ...]:
    """The user's steps, looked at once: a name, and whether each yields many outputs."""
    made: list[Step] = []
    for number, step in enumerate(steps):
        if not callable(step):
            raise ConfigError(f"step {number} is {step!r}, which cannot be called")
        if inspect.iscoroutinefunction(step):
            raise ConfigError(
                f"step {number} ({_name(step)}) is a coroutine function; steps are plain functions or generators"
            )
        made.append(Step(_name(step), step, _yields(step)))
    return tuple(made)


def _name(step: Any) -> str:
    while isinstance(step, partial):
        step = step.func
    return getattr(step, "__name__", None) or type(step).__name__


def _yields(step: Any) -> bool:
    while isinstance(step, partial):
        step = step.func
    return inspect.isgeneratorfunction(step) or inspect.isgeneratorfunction(type(step).__call__)


def assigner(key: Any) -> Callable[[Any], int] | None:
    """The `assign` argument as a function from an item to a number that says which worker it belongs to."""
    if key == "any" or key is None:
        return None
    if not callable(key):
        raise ConfigError(f"assign must be 'any' or a function from an item to its key, got {key!r}")
    return lambda item: number_of(key(item))


def number_of(key: Any) -> int:
    """A number for a key that is the same in every process and run (Python's `hash` is not)."""
    if isinstance(key, int):
        return int(key)
    if isinstance(key, str):
        return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"))
    if isinstance(key, bytes):
        return xxhash.xxh3_64_intdigest(key)
    if isinstance(key, tuple):
        return xxhash.xxh3_64_intdigest(b"".join(number_of(part).to_bytes(16, "little", signed=True) for part in key))
    raise ConfigError(
        f"a key of assign= must be an int, str, bytes or a tuple of these, got {type(key).__name__}: {key!r}"
    )

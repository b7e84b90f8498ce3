"""The settings of a step pipeline: frozen, and checked where they are born."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import xxhash

from headrace.errors import ConfigError, UnknownOptionError
from headrace.run.executor import SLAB_BYTES
from headrace.steps.chain import Step

OnError = Literal["raise", "skip", "return"]
Runner = Literal["process", "threads", "inline"]
Mode = Literal["fused", "staged"]
Workers = int | Sequence[int] | Literal["auto"]


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
        """Refuse what cannot work."""
        _one_of("mode", self.mode, ("fused", "staged"))
        _one_of("runner", self.runner, ("process", "threads", "inline"))
        _one_of("on_error", self.on_error, ("raise", "skip", "return"))
        if self.ordered not in (True, False):
            raise ConfigError(f"ordered must be True or False, got {self.ordered!r}")
        if not self.steps:
            raise ConfigError("a pipeline needs at least one step")
        if self.shuffle_buffer < 0 or self.max_pending < 1:
            raise ConfigError("shuffle_buffer must not be negative and max_pending must be positive")
        if self.assign is not None and self.mode == "staged":
            raise ConfigError("assign= chooses a worker by the item that enters, so it needs mode='fused'")
        if self.shuffle_buffer and self.seed is None:
            raise ConfigError("shuffle_buffer= needs seed=, so that the same run can be had again")
        if self.timeout is not None and self.runner == "inline":
            raise ConfigError("timeout= needs runner='process' or 'threads': nobody watches an inline step")
        _ = self.groups  # checks num_workers

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
            _one_of("num_workers", asked, ("auto",))
            return [max(1, cores() // stages)] * stages
        counts = [asked] * stages if isinstance(asked, int) else list(asked)
        if len(counts) != stages:
            raise ConfigError(f"num_workers has {len(counts)} numbers for {stages} stage(s) of mode {self.mode!r}")
        for count in counts:
            if count < 1:
                raise ConfigError(f"num_workers must be at least 1 for every stage, got {asked!r}")
        return counts


def cores() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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

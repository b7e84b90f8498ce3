"""From settings to workers: what each worker runs, and the stages of a flow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from headrace.run.executor import ExecutorConfig, Group
from headrace.run.failure import shorten
from headrace.steps.chain import Chain, Step
from headrace.steps.flow import StageFlow
from headrace.steps.seeded import SeededChain
from headrace.steps.settings import Settings
from headrace.steps.statistics import Ledger


def stages(settings: Settings, ledger: Ledger, background: bool) -> list[StageFlow]:
    """The stages of one flow; workers are numbered through all of them."""
    ends = list(accumulate(count for _, count in settings.groups))
    return [
        StageFlow(group, range(end - count, end), settings, ledger, background)
        for group, (end, (_, count)) in enumerate(zip(ends, settings.groups, strict=True))
    ]


def config(settings: Settings) -> ExecutorConfig:
    """The executor of a pipeline: one group of workers for each stage."""
    groups: list[Group] = []
    done = 0
    for number, (steps, count) in enumerate(settings.groups):
        options: dict[str, Any] = {
            "on_error": settings.on_error,
            "passes_failed": number > 0 and settings.on_error == "return",
        }
        make: type[Chain] = Chain
        if settings.seed is not None:
            make = SeededChain
            options |= {"seed": settings.seed, "first_step": done, "passes_on": number + 1 < len(settings.groups)}
        factory: Callable[[], Any] = partial(make, steps, **options)
        if settings.runner == "threads":
            factory = partial(_in_thread, make, steps, options)
        if settings.assign is not None:
            factory = partial(NumberedChain, factory)
        groups.append(Group(factory, count))
        done += len(steps)
    return ExecutorConfig(
        tuple(groups),
        name="steps",
        max_retries=settings.max_retries if settings.assign is None else 0,
        describe=None if settings.assign is None else lambda numbered: shorten(numbered[1]),
        timeout=settings.timeout,
        hand_back=settings.assign is None,
        slab_bytes=settings.slab_bytes,
        zero_copy=settings.zero_copy,
        modules=(Chain.__module__,),
    )


def _in_thread(make: type[Chain], steps: tuple[Step, ...], options: dict[str, Any]) -> Chain:
    """A chain whose steps with set-up or tear-down are copies: those of other threads work while it sets up or tears down."""
    return make(tuple(_own(step) for step in steps), **options)


def _own(step: Step) -> Step:
    call = step.call
    if not hasattr(call, "setup") and not hasattr(call, "teardown"):
        return step
    return Step(step.name, copy.copy(call), step.many)


def by_number(settings: Settings) -> ExecutorConfig:
    """The executor of a dataset: any (number, item) in any order, each answered by the list of its outputs."""
    plain = config(settings)
    (group,) = plain.groups
    return replace(
        plain,
        groups=(Group(partial(NumberedChain, group.factory), group.workers),),
        describe=lambda numbered: f"row {numbered[0]}: {shorten(numbered[1])}",
    )


class NumberedChain:
    """A chain for items that are not neighbours: each comes with its index and leaves alone."""

    def __init__(self, factory: Callable[[], Chain]) -> None:
        """Build the chain."""
        self._chain = factory()
        self._chain.one_by_one()
        self.report = self._chain.report
        self.close = self._chain.close

    @property
    def where(self) -> str:
        """See `Chain`."""
        return self._chain.where

    def __call__(self, indexed: tuple[int, Any]) -> list[Any]:
        """The outputs of one item."""
        index, item = indexed
        self._chain.at(index)
        return self._chain(item)

"""Executors that are closed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from executor_functions import identity

from headrace.run.executor import Executor, make_executor


@pytest.fixture(params=["inline", "threads", "process"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make(kind: str) -> Iterator[Callable[..., Executor]]:
    made: list[Executor] = []

    def build(fn: Callable[[Any], Any], **settings: Any) -> Executor:
        made.append(make_executor(kind, partial(identity, fn), settings.pop("workers", 2), name="op", **settings))
        return made[-1]

    yield build
    for executor in made:
        executor.close()


@pytest.fixture
def processes() -> Iterator[Callable[..., Executor]]:
    made: list[Executor] = []

    def build(fn: Callable[[Any], Any], **settings: Any) -> Executor:
        made.append(make_executor("process", partial(identity, fn), settings.pop("workers", 2), name="op", **settings))
        return made[-1]

    yield build
    for executor in made:
        executor.close()

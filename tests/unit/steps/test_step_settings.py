"""Settings and steps of a step pipeline that cannot work are refused where they are given."""

from __future__ import annotations

from typing import Any

import pytest
from step_functions import add_1, double, every_runner

from headrace.errors import ConfigError, UnknownOptionError
from headrace.steps import Pipeline


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_worker": 2}, UnknownOptionError, "did you mean 'num_workers'"),
        ({"runner": "proces"}, UnknownOptionError, "did you mean 'process'"),
        ({"mode": "fuse"}, UnknownOptionError, "did you mean 'fused'"),
        ({"on_error": "ignore"}, UnknownOptionError, "on_error"),
        ({"ordered": None}, ConfigError, "True or False"),
        ({"num_workers": 0}, ConfigError, "at least 1"),
        ({"num_workers": [1, 2]}, ConfigError, "2 numbers for 1 stage"),
        ({"num_workers": [1, 2, 3], "mode": "staged"}, ConfigError, "3 numbers for 2 stage"),
        ({"assign": "all"}, ConfigError, "assign"),
        ({"assign": len, "mode": "staged"}, ConfigError, "fused"),
        ({"shuffle_buffer": 5}, ConfigError, "seed"),
        ({"timeout": 1.0, "runner": "inline"}, ConfigError, "inline"),
        ({"timeout": -1.0, "num_workers": 1}, ConfigError, "timeout"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        Pipeline([add_1, double], **options).start()


@pytest.mark.parametrize("steps", [[], [3], [None], [add_1, "double"]])
def test_steps_that_cannot_work_are_refused(steps: list[Any]) -> None:
    with pytest.raises(ConfigError):
        Pipeline(steps)


async def coroutine(x: int) -> int:
    return x


def test_a_coroutine_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="coroutine"):
        Pipeline([coroutine])


@every_runner
def test_a_key_that_cannot_be_numbered_is_refused(runner: str) -> None:
    pipeline = Pipeline([add_1], num_workers=1, runner=runner, assign=lambda x: x / 2)
    with pipeline, pytest.raises(ConfigError, match="key"):
        list(pipeline.map([1]))

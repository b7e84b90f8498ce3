"""Settings and steps of a step pipeline that cannot work are refused where they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
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
        ({"runner": None}, UnknownOptionError, "runner"),
        ({"ordered": None}, ConfigError, "ordered must be True or False"),
        ({"ordered": 1}, ConfigError, "ordered must be True or False"),
        ({"zero_copy": "no"}, ConfigError, "zero_copy must be True or False"),
        ({"progress": 0}, ConfigError, "progress must be True or False"),
        ({"max_retries": -1}, ConfigError, "max_retries must be at least 0"),
        ({"max_retries": None}, ConfigError, "max_retries must be a whole number"),
        ({"max_pending": 0}, ConfigError, "max_pending must be at least 1"),
        ({"max_pending": 1.5}, ConfigError, "max_pending must be a whole number"),
        ({"slab_bytes": -1}, ConfigError, "slab_bytes must be at least 0"),
        ({"slab_bytes": 1e6}, ConfigError, "slab_bytes must be a whole number"),
        ({"shuffle_buffer": -1, "seed": 1}, ConfigError, "shuffle_buffer must be at least 0"),
        ({"shuffle_buffer": True, "seed": 1}, ConfigError, "shuffle_buffer must be a whole number"),
        ({"seed": -1, "shuffle_buffer": 4}, ConfigError, "seed must be at least 0, found -1"),
        ({"seed": 1.0}, ConfigError, "seed must be a whole number"),
        ({"seed": "a"}, ConfigError, "seed must be a whole number"),
        ({"seed": True}, ConfigError, "seed must be a whole number"),
        ({"seed": 1 << 64}, ConfigError, "seed must be below"),
        ({"num_workers": 0}, ConfigError, "at least 1"),
        ({"num_workers": None}, ConfigError, "num_workers must be a whole number, found None"),
        ({"num_workers": 2.0}, ConfigError, "num_workers must be a whole number, found 2.0"),
        ({"num_workers": True}, ConfigError, "num_workers must be a whole number, found True"),
        ({"num_workers": "2"}, UnknownOptionError, "num_workers"),
        ({"num_workers": [1, 0], "mode": "staged"}, ConfigError, r"num_workers\[1\] must be at least 1, found 0"),
        ({"num_workers": (1, 2.0), "mode": "staged"}, ConfigError, r"num_workers\[1\] must be a whole number"),
        ({"num_workers": [1, 2]}, ConfigError, "2 numbers for 1 stage"),
        ({"num_workers": [1, 2, 3], "mode": "staged"}, ConfigError, "3 numbers for 2 stage"),
        ({"assign": "all"}, ConfigError, "assign"),
        ({"assign": len, "mode": "staged"}, ConfigError, "fused"),
        ({"shuffle_buffer": 5}, ConfigError, "seed"),
        ({"timeout": 1.0, "runner": "inline"}, ConfigError, "inline"),
        ({"timeout": -1.0}, ConfigError, "timeout must be a number of seconds above 0.* found -1.0"),
        ({"timeout": 0}, ConfigError, "timeout must be"),
        ({"timeout": float("nan")}, ConfigError, "timeout must be"),
        ({"timeout": float("inf")}, ConfigError, "None for no limit"),
        ({"timeout": True}, ConfigError, "timeout must be"),
        ({"timeout": "2"}, ConfigError, "timeout must be"),
        (
            {"timeout": 1.0, "seed": 1, "runner": "threads"},
            ConfigError,
            "runner='process', or leave one of the two out",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        Pipeline([add_1, double], **options)


def test_numbers_of_numpy_are_numbers() -> None:
    options: Any = {"num_workers": np.int64(1), "seed": np.uint64(3), "timeout": np.float32(60)}
    with Pipeline([add_1], **options) as pipeline, Pipeline([add_1], num_workers=1, seed=3) as plain:
        assert list(pipeline.map(range(5))) == list(plain.map(range(5)))
    staged = Pipeline([add_1, double], mode="staged", num_workers=np.array([1, 2]))  # type: ignore[arg-type]
    assert [count for _, count in staged.settings.groups] == [1, 2]


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

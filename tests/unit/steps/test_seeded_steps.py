"""Steps with a seed: what they draw, what becomes of failures among them, and that they leave the user's numbers alone."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from step_functions import add_1, draw, every_runner

from headrace.errors import WorkerDied
from headrace.steps import Failed, Pipeline

WAYS: list[dict[str, Any]] = [
    {"runner": "inline"},
    {"runner": "inline", "mode": "staged"},
    {},
    {"mode": "staged"},
    {"runner": "inline", "assign": lambda x: 0},
    {"runner": "process", "num_workers": 1},
]


def own_draws(number: int) -> list[tuple[int, float]]:
    """What a loop draws that begins with these seeds; an odd number of normal ones, of which numpy keeps a second in hand."""
    random.seed(0)
    np.random.seed(0)
    return [(random.randrange(1000), np.random.normal()) for _ in range(number)]


@pytest.mark.parametrize("options", WAYS)
def test_the_loops_own_random_numbers_do_not_depend_on_the_runner(options: dict[str, Any]) -> None:
    expected = own_draws(301)
    own_draws(0)
    drawn: list[tuple[int, float]] = []
    for _ in Pipeline([draw, draw], seed=1, **options).map([0.0] * 301):
        drawn.append((random.randrange(1000), np.random.normal()))  # noqa: PERF401 (it is the loop that matters)
    assert drawn == expected


@every_runner
def test_the_generators_go_on_where_they_were_after_a_seeded_run(runner: Any) -> None:
    expected = own_draws(5)
    own_draws(2)
    assert len(list(Pipeline([draw], seed=1, runner=runner, num_workers=2).map([0.0] * 50))) == 50
    assert [(random.randrange(1000), np.random.normal()) for _ in range(3)] == expected[2:]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_generators_go_on_where_they_were_after_a_step_that_raises(error: type[BaseException]) -> None:
    def stop(x: float) -> float:
        if x == 3:
            raise error
        return draw(x)

    expected = own_draws(5)
    own_draws(2)
    with Pipeline([stop], seed=1, runner="inline") as pipeline:
        with pytest.raises(error):
            list(pipeline.map(range(5)))
        assert [(random.randrange(1000), np.random.normal()) for _ in range(3)] == expected[2:]
        other = threading.Thread(target=lambda: list(Pipeline([draw], seed=1, runner="inline").map([0.0])))
        other.start()
        other.join(30)
        assert not other.is_alive(), "the generators are still taken"


def test_a_seeded_step_may_run_a_seeded_pipeline_of_its_own() -> None:
    inner = Pipeline([draw], seed=2, runner="inline")

    def outer(x: float) -> tuple[float, list[float], float]:
        return draw(x), list(inner.map([0.0] * 3)), draw(x)

    def alone(x: float) -> tuple[float, float]:
        return draw(x), draw(x)

    found = list(Pipeline([outer], seed=1, runner="inline").map([0.0] * 20))
    assert [(a, b) for a, _, b in found] == list(Pipeline([alone], seed=1, runner="inline").map([0.0] * 20))
    assert all(numbers == list(inner.map([0.0] * 3)) for _, numbers, _ in found)


LOADED_BY_A_STEP = """
import sys
from headrace.steps import Pipeline

def step(x):
    import numpy as np
    return float(np.random.random())

assert "numpy" not in sys.modules
seeded = list(Pipeline([step, step], seed=1, runner="inline").map(range(3)))
import numpy as np
print(np.random.random() not in seeded, len(set(np.random.get_state(legacy=False)["state"]["key"].tolist())) > 600)
print(np.random.random())
"""


def test_a_generator_that_a_step_has_loaded_is_not_left_seeded() -> None:
    runs = [subprocess.run([sys.executable, "-c", LOADED_BY_A_STEP], capture_output=True, text=True) for _ in range(2)]
    (said, first), (_, second) = (run.stdout.splitlines() for run in runs)
    assert said == "True True" and first != second


# -- failures ---------------------------------------------------------------------------------------------------------


def hang_at_2(x: int) -> int:
    if x == 2:
        time.sleep(60)
    return x


def die_at_2(x: int) -> int:
    if x == 2:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
    return x


def times_10(x: int) -> int:
    return 10 * x


def kind(x: Any) -> tuple[str, str]:
    return "handled", type(x).__name__


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(
    ("first", "options", "error"),
    [(hang_at_2, {"timeout": 2.0}, TimeoutError), (die_at_2, {"max_retries": 0}, WorkerDied)],
)
def test_a_failure_that_the_parent_makes_goes_past_later_stages(
    first: Any, options: dict[str, Any], error: type[Exception], seed: int | None
) -> None:
    steps = [add_1, first, times_10, add_1]
    with Pipeline(steps, mode="staged", num_workers=1, on_error="return", seed=seed, **options) as pipeline:
        outputs = list(pipeline.map(range(4)))
    (failed,) = [output for output in outputs if isinstance(output, Failed)]
    assert [output for output in outputs if output is not failed] == [11, 31, 41]
    assert outputs.index(failed) == 1 and isinstance(failed.error, error) and failed.item == "2"


def old_failure() -> list[Any]:
    return list(Pipeline([lambda x: 1 / x], runner="inline", on_error="return").map([0, 1]))


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("on_error", ["raise", "skip", "return"])
@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_failure_among_the_inputs_is_an_item_like_any_other(seed: int | None, on_error: Any, mode: Any) -> None:
    pipeline = Pipeline([kind, kind], runner="inline", seed=seed, on_error=on_error, mode=mode)
    assert list(pipeline.map(old_failure())) == [("handled", "tuple")] * 2
    assert next(iter(Pipeline([kind], runner="inline", seed=seed, mode=mode).map(old_failure()))) == (
        "handled",
        "Failed",
    )


def fail_sometimes(x: int) -> Iterator[int]:
    yield x
    if x % 3 == 0:
        raise ValueError(x)
    yield x + 100


@every_runner
@pytest.mark.parametrize("on_error", ["skip", "return"])
def test_seeded_stages_treat_errors_as_one_chain_does(runner: Any, on_error: Any) -> None:
    def run(**options: Any) -> tuple[list[str], int]:
        pipeline = Pipeline([add_1, fail_sometimes, times_10, fail_sometimes], on_error=on_error, **options)
        with pipeline:
            outputs = [repr(output) for output in pipeline.map(range(40))]
            stats = pipeline.statistics()
        assert stats.received == stats.finished == 40
        return outputs, stats.skipped

    assert run(runner=runner, num_workers=1, mode="staged", seed=1) == run(runner="inline")

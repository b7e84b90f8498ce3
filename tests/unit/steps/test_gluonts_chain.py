"""A real GluonTS transformation chain, whose instance splitter has zero or more outputs for a series, runs unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

gluonts = pytest.importorskip("gluonts", reason="the test extra installs gluonts")
pd = pytest.importorskip("pandas")

from gluonts.dataset.field_names import FieldName  # noqa: E402
from gluonts.transform import (  # noqa: E402
    AddAgeFeature,
    AddObservedValuesIndicator,
    AsNumpyArray,
    Chain,
    InstanceSplitter,
    TestSplitSampler,
    UniformSplitSampler,
)

from headrace.steps import Pipeline, iterate  # noqa: E402
from headrace.steps.seeded import key, reseed  # noqa: E402

PAST, FUTURE = 20, 5


def transformation(sampler: Any) -> Any:
    return Chain(
        [
            AsNumpyArray(field=FieldName.TARGET, expected_ndim=1),
            AddObservedValuesIndicator(target_field=FieldName.TARGET, output_field=FieldName.OBSERVED_VALUES),
            AddAgeFeature(target_field=FieldName.TARGET, output_field=FieldName.FEAT_AGE, pred_length=FUTURE),
            InstanceSplitter(
                target_field=FieldName.TARGET,
                is_pad_field=FieldName.IS_PAD,
                start_field=FieldName.START,
                forecast_start_field=FieldName.FORECAST_START,
                instance_sampler=sampler,
                past_length=PAST,
                future_length=FUTURE,
                time_series_fields=[FieldName.OBSERVED_VALUES, FieldName.FEAT_AGE],
            ),
        ]
    )


def series(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 80, count)
    start = pd.Period("2020-01-01", "D")
    return [
        {"target": rng.normal(size=n).astype(np.float32), "start": start, "item_id": str(k)}
        for k, n in enumerate(lengths)
    ]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        np.array_equal(left[name], right[name]) if isinstance(left[name], np.ndarray) else left[name] == right[name]
        for name in left
    )


@pytest.mark.parametrize("runner", ["inline", "threads", "process"])
def test_every_window_equals_the_single_process_loop(runner: str) -> None:
    data = series(60)
    every = transformation(UniformSplitSampler(p=1.0, min_past=3, min_future=FUTURE))  # every place: nothing is random
    expected = list(every(iter(data), is_train=True))
    with Pipeline([iterate(every, is_train=True)], num_workers=2, runner=runner) as pipeline:
        instances = list(pipeline.map(data))
        received, produced = pipeline.statistics().steps[0].received, pipeline.statistics().steps[0].produced
    assert (received, produced) == (60, len(expected))
    assert len(instances) == len(expected) > 1000
    assert all(map(same, instances, expected))


def test_prediction_instances_equal_the_single_process_loop() -> None:
    data = series(40)
    chain = transformation(TestSplitSampler())
    expected = list(chain(iter(data), is_train=False))
    with Pipeline([iterate(chain, is_train=False)], num_workers=2) as pipeline:
        instances = list(pipeline.map(data))
    assert len(instances) == len(expected) == 40
    assert all(map(same, instances, expected))


@pytest.mark.parametrize("runner", ["inline", "process"])
def test_random_windows_do_not_depend_on_the_workers(runner: str) -> None:
    """Its samplers draw from numpy's global generator: seeded for each series, they draw the same wherever they run."""
    data = series(60)
    chain = transformation(UniformSplitSampler(p=0.2, min_past=3, min_future=FUTURE))
    expected = []
    for k, one in enumerate(data):
        reseed(key(key(7, k), -1))
        expected += list(chain([one], is_train=True))
    with Pipeline([iterate(chain, is_train=True)], num_workers=2, runner=runner, seed=7) as pipeline:
        instances = list(pipeline.map(data))
    assert 50 < len(instances) == len(expected)
    assert all(map(same, instances, expected))

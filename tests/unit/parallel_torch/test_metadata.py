"""Shapes between stages, found without running a stage on data."""

from __future__ import annotations

import msgspec
import pytest
import torch
from pipeline_models import language_model
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.parallel.torch_metadata import Boundaries, TensorSpec, infer_outputs, shadow
from headrace.parallel.torch_stage import PipelineStage


def test_shapes_flow_through_a_language_model() -> None:
    model = shadow(language_model(2, tied=True))
    (out,) = infer_outputs(model, 0, (TensorSpec((3, 5), "int64", False),))
    assert out == TensorSpec((3, 5, 17), "float64", True)
    assert out.num_bytes == 3 * 5 * 17 * 8


def test_shadow_has_no_data_and_keeps_sharing() -> None:
    model = language_model(1, tied=True)
    copy = shadow(model)
    assert all(p.is_meta for p in copy.parameters())
    assert copy[0].weight is copy[2].weight
    assert not model[0].weight.is_meta


def test_running_statistics_are_untouched() -> None:
    norm = nn.BatchNorm1d(3)
    infer_outputs(shadow(norm), 0, (TensorSpec((4, 3), "float32", True),))
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert int(norm.num_batches_tracked) == 0


def test_frozen_stage_hands_on_no_gradient() -> None:
    layer = nn.Linear(2, 2).requires_grad_(False)
    (out,) = infer_outputs(shadow(layer), 0, (TensorSpec((1, 2), "float32", False),))
    assert not out.requires_grad


def test_misfit_names_the_stage() -> None:
    with pytest.raises(ConfigError, match=r"stage 3 does not accept what stage 2 hands it.*float32\[1, 4\]"):
        infer_outputs(shadow(PipelineStage(nn.Linear(2, 2))), 3, (TensorSpec((1, 4), "float32", True),))


def test_data_dependent_stage_is_refused() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    with pytest.raises(ConfigError, match="needs data to know its shapes"):
        infer_outputs(shadow(Branch()), 0, (TensorSpec((1, 4), "float32", True),))


def test_boundaries_travel_as_json() -> None:
    one, two = (TensorSpec((1, 2), "float32", False),), (TensorSpec((1, 3), "bfloat16", True),)
    boundaries = Boundaries((one, two), one)
    assert msgspec.json.decode(msgspec.json.encode(boundaries), type=Boundaries) == boundaries
    assert boundaries.into(1) == boundaries.out_of(0) == two
    assert boundaries.out_of(1) == one

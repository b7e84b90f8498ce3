"""What travels between stages, known before anything runs: shapes, types, and whether a gradient comes back.

torch would find this out by running each stage once on uninitialised memory. That changes the running statistics of
a batch norm by garbage and makes an embedding read out of range. Here each stage has a *shadow*: a copy whose parameters
are on the meta device, which has shapes but no data and costs no memory. Shapes flow through the shadows.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.parallel.torch_stage import check_activation


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of one microbatch: shape, element type (as `"float32"`), and whether it carries a gradient."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """The description of a tensor."""
        return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor of this description with no contents of meaning."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


Specs = tuple[TensorSpec, ...]


class Boundaries(msgspec.Struct, frozen=True):
    """The inputs of every stage, and the outputs of the last, for one shape of microbatch."""

    inputs: tuple[Specs, ...]
    outputs: Specs

    def into(self, stage: int) -> Specs:
        """What a stage receives."""
        return self.inputs[stage]

    def out_of(self, stage: int) -> Specs:
        """What a stage sends on (the last one: returns)."""
        return self.inputs[stage + 1] if stage + 1 < len(self.inputs) else self.outputs


def shadow(stage: nn.Module) -> nn.Module:
    """A copy of a stage that has shapes but no data.

    Made before the stage is wrapped for data parallelism, so that finding shapes starts no collective.
    """
    memo: dict[int, Any] = {}
    for tensor in (*stage.parameters(), *stage.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(stage, memo)


def infer_outputs(stage_shadow: nn.Module, stage: int, inputs: Specs) -> Specs:
    """The outputs of a stage for given inputs, without data."""
    fake = [spec.empty("meta").requires_grad_(spec.requires_grad) for spec in inputs]
    try:
        with torch.enable_grad(), torch.device("meta"):
            value = stage_shadow(*fake)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's forward raises: we only add where and what to do
        shapes = ", ".join(f"{s.dtype}{list(s.shape)}" for s in inputs)
        raise ConfigError(
            f"stage {stage} does not accept what stage {stage - 1} hands it, or needs data to know its shapes: its "
            f"forward failed on {shapes} without data: {type(error).__name__}: {error}. Make the stages fit, register "
            "tensors that the module makes for itself as buffers, and keep data-dependent branches inside a custom operator"
        ) from error
    return tuple(TensorSpec.of(t) for t in check_activation(stage, 0, value))

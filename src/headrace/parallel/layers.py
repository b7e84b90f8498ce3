"""Costs by layer, as a measurement gives them, and their sums over stages."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import msgspec

from headrace.errors import ConfigError, FormatError
from headrace.parallel.costs import StageCosts


@dataclass(frozen=True)
class LayerCost:
    """One layer, for one microbatch.

    Seconds: `forward`, `backward_input`, `backward_weight`. Bytes: `activation` saved for the backward, `output` handed to the next
    layer, `parameters`. Layers with the same `tied` name share their parameters. `glued` forbids a cut behind this layer.
    """

    name: str
    forward: float
    backward_input: float
    backward_weight: float
    activation: int = 0
    output: int = 0
    parameters: int = 0
    tied: str | None = None
    glued: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured."""
        for what in ("forward", "backward_input", "backward_weight", "activation", "output", "parameters"):
            value = getattr(self, what)
            if value != value or value < 0:
                raise ConfigError(f"layer {self.name!r}: {what} is {value}; times and bytes cannot be negative or NaN")

    @staticmethod
    def of(name: str, forward: float, backward: float, activation: int = 0) -> LayerCost:
        """From forward and full backward, split evenly between input and weights."""
        return LayerCost(name, forward, backward / 2, backward / 2, activation)

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Hardware:
    """What the plan assumes of the machines: links between ranks, and bytes kept per byte of parameters.

    `state_factor` 4 is parameter, gradient and two moments of an optimizer, all in the parameters' type. `overlap` as in
    `StageCosts`.
    """

    latency: float = 0.0
    bandwidth: float = math.inf
    state_factor: float = 4.0
    overlap: float = 0.0


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Equal numbers of layers; the first stages take the remainder."""
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(f"{num_layers} layers cannot fill {num_stages} stages; each stage holds at least one layer")
    each, rest = divmod(num_layers, num_stages)
    return tuple(each + (stage < rest) for stage in range(num_stages))


def cut(layers: Sequence[LayerCost], counts: Sequence[int]) -> list[Sequence[LayerCost]]:
    """The layers of each stage, for a list of layers per stage."""
    if sum(counts) != len(layers) or any(c < 1 for c in counts):
        stage = next((i for i, c in enumerate(counts) if c < 1), None)
        fault = f"stage {stage} gets {counts[stage]} layers" if stage is not None else f"they sum to {sum(counts)}"
        raise ConfigError(
            f"layers per stage {list(counts)} do not cut {len(layers)} layers: {fault}; give every stage one or more, "
            f"{len(layers)} in all"
        )
    ends = list(accumulate(counts))
    return [layers[end - count : end] for end, count in zip(ends, counts, strict=True)]


def parameter_bytes(layers: Sequence[LayerCost], known: Collection[str] = ()) -> int:
    """Bytes of parameters of a stage; layers tied to each other count once, those of a `known` tie not at all."""
    tied = {layer.tied: layer.parameters for layer in layers if layer.tied is not None and layer.tied not in known}
    return sum(tied.values()) + sum(layer.parameters for layer in layers if layer.tied is None)


def stage_costs(
    layers: Sequence[LayerCost],
    counts: Sequence[int],
    hardware: Hardware | None = None,
    stage_to_rank: Sequence[int] | None = None,
) -> StageCosts:
    """Sum the layers of each stage. With a placement, layers tied on one rank are held once, by its first stage."""
    hardware = hardware or Hardware()
    stages = cut(layers, counts)
    links = len(stages) - 1
    state: list[int] = []
    known: dict[int, set[str]] = {}
    for index, stage in enumerate(stages):
        mine = known.setdefault(stage_to_rank[index] if stage_to_rank is not None else index, set())
        state.append(round(parameter_bytes(stage, mine) * hardware.state_factor))
        mine.update(layer.tied for layer in stage if layer.tied is not None)
    return StageCosts(
        tuple(sum(x.forward for x in stage) for stage in stages),
        tuple(sum(x.backward_input for x in stage) for stage in stages),
        tuple(sum(x.backward_weight for x in stage) for stage in stages),
        (hardware.latency,) * links,
        (hardware.bandwidth,) * links,
        tuple(stage[-1].output for stage in stages[:-1]),
        tuple(sum(x.activation for x in stage) for stage in stages),
        tuple(state),
        hardware.overlap,
    )


def with_checkpointing(layers: Sequence[LayerCost]) -> list[LayerCost]:
    """The same layers with full activation checkpointing: each keeps its input only, and runs forward again in the backward.

    The second forward is charged to the input gradient, as with deferred weight gradients it runs once. The activations of
    the one layer being recomputed are not counted here; see `recompute_peak`.
    """
    result: list[LayerCost] = []
    arrives = 0
    for layer in layers:
        kept = min(layer.activation, arrives) if arrives else 0
        result.append(
            LayerCost(
                layer.name,
                layer.forward,
                layer.backward_input + layer.forward,
                layer.backward_weight,
                kept,
                layer.output,
                layer.parameters,
                layer.tied,
                layer.glued,
            )
        )
        arrives = layer.output
    return result


def recompute_peak(layers: Sequence[LayerCost]) -> int:
    """Bytes that the layer being recomputed needs on top, at most."""
    return max((layer.activation for layer in layers), default=0)


def ties_across(layers: Sequence[LayerCost], counts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Tied names whose layers fall on several stages, with these stages: their gradients must be summed over them."""
    where: dict[str, set[int]] = {}
    for stage, members in enumerate(cut(layers, counts)):
        for layer in members:
            if layer.tied is not None:
                where.setdefault(layer.tied, set()).add(stage)
    return {name: tuple(sorted(stages)) for name, stages in where.items() if len(stages) > 1}


def load_layers(path: str | Path) -> list[LayerCost]:
    """Read a profile: a JSON list of objects with the fields of `LayerCost`; what may be left out there may be left out here."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[LayerCost])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise FormatError(
            f"{path} is not a profile of layers: {error}; write a JSON list such as "
            '[{"name": "block0", "forward": 0.01, "backward_input": 0.01, "backward_weight": 0.01}]'
        ) from None


def save_layers(layers: Sequence[LayerCost], path: str | Path) -> None:
    """Write a profile that `load_layers` reads."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(list(layers)), indent=1))

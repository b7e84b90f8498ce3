"""One stage of a model: the module that a rank holds, and how a list of layers becomes stages.

    PipelineStage(module)                  any module whose forward maps activation(s) to activation(s)
    split_model(model, [3, 4, 4, 2])       a list of layers, cut; each stage keeps the names of the whole model
    find_ties(stages)                      parameters that several stages share

Between stages travel tensors: one, or a tuple of them. A tensor that only a later stage wants (a skip connection) is
carried through the stages between as one more output: `carry=1` says that the last input is passed on untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.errors import ConfigError, OperatorError
from headrace.parallel.layers import even_split

Activation = Tensor | tuple[Tensor, ...]
Layers = nn.Sequential | nn.ModuleList | Sequence[nn.Module] | Sequence[tuple[str, nn.Module]]


class PipelineStage(nn.Module):
    """A module that holds one stage's parameters; `forward(activation)` gives the next stage's activation.

    Wrap a module, or subclass and write `forward`. `carry` is the number of trailing inputs that pass through
    unchanged, appended to the outputs. `recompute=True` drops the stage's activations after the forward and computes
    them again in the backward (activation checkpointing, always of the non-reentrant kind: the reentrant one silently
    gives the first stage no gradients).

    >>> stage = PipelineStage(nn.Linear(4, 2))
    >>> stage(torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """

    module: nn.Module | None

    def __init__(self, module: nn.Module | None = None, *, carry: int = 0, recompute: bool = False) -> None:
        """Hold `module`; a subclass with its own `forward` gives none."""
        super().__init__()
        if module is None and type(self).forward is PipelineStage.forward:
            raise ConfigError(
                "PipelineStage() holds no module and has no forward of its own; pass a module, or subclass it and "
                "write forward(activation)"
            )
        if module is None and (carry or recompute):
            raise ConfigError("carry and recompute apply to a wrapped module; a subclass does both in its own forward")
        if carry < 0:
            raise ConfigError(f"carry is the number of inputs passed through, so at least 0; got {carry}")
        self.module = module
        self.carry = carry
        self.recompute = recompute

    def forward(self, *activations: Tensor) -> Activation:
        """Apply the wrapped module to the inputs that are not carried, and pass the carried ones on."""
        cut = len(activations) - self.carry
        if cut < 1:
            raise ConfigError(
                f"this stage carries {self.carry} inputs through and got {len(activations)} in all; it needs at least "
                "one more: return the carried tensors after the activation on the stage before"
            )
        own, carried = activations[:cut], activations[cut:]
        module = cast(Callable[..., Any], self.module)
        out = rerun(module, *own) if self.recompute and torch.is_grad_enabled() else module(*own)
        if not carried:
            return out
        # A view, not the tensor itself: an output that is also an input could not be a fresh end of the graph.
        return (*as_tuple(out), *(tensor.view_as(tensor) for tensor in carried))


class LayerStack(nn.Module):
    """Layers in order, registered under the names they have in the whole model.

    The names are what makes a checkpoint independent of the cut: stage 2 of 4 and stage 1 of 2 both call the layer
    `blocks.7`. `recompute` drops the activations inside each layer and keeps those between them. `cut` is how many layers
    each stage of the model got and `place` which of them this is, for ranks that hold only their own.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        *,
        recompute: bool = False,
        cut: Sequence[int] = (),
        place: int = 0,
    ) -> None:
        """Register each layer under its dotted name."""
        super().__init__()
        self.cut = tuple(cut)
        self.place = place
        self.names = [name for name, _ in layers]
        self.recompute = recompute
        for name, layer in layers:
            _register(self, name, layer)

    def forward(self, *activations: Tensor) -> Activation:
        """Apply the layers one after the other; a layer that returns a tuple feeds all of it to the next."""
        flow: Any = activations
        for name in self.names:
            layer = self.get_submodule(name)
            rerun_it = self.recompute and torch.is_grad_enabled()
            flow = rerun(layer, *as_tuple(flow)) if rerun_it else layer(*as_tuple(flow))
        return flow


def rerun(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Run `function` now, forget what it saved for the backward, and run it once more when the backward comes."""
    return checkpoint(function, *inputs, use_reentrant=False)


def named_layers(model: Layers) -> list[tuple[str, nn.Module]]:
    """The layers of a model with their names: of an `nn.Sequential` or `nn.ModuleList`, or of a list of modules or pairs.

    Give `(name, module)` pairs for a model whose layers live deeper, such as `("model.layers.0", model.model.layers[0])`.
    """
    if isinstance(model, nn.Sequential | nn.ModuleList):
        # named_children() gives a layer that is used twice only once
        everything = model.named_modules(remove_duplicate=False)
        return [(name, layer) for name, layer in everything if name and "." not in name]
    if isinstance(cast(object, model), nn.Module):
        raise ConfigError(
            f"a {type(model).__name__} is not a list of layers; pass an nn.Sequential, or (name, module) pairs such as "
            '[("embed", model.embed), ("blocks.0", model.blocks[0]), ...]'
        )
    found: list[tuple[str, nn.Module]] = []
    for index, item in enumerate(model):
        name, layer = item if isinstance(item, tuple) else (str(index), item)
        if not isinstance(cast(object, layer), nn.Module):
            raise ConfigError(f"layer {index} is a {type(layer).__name__}, not an nn.Module")
        found.append((name, layer))
    repeated = sorted({name for name, _ in found if sum(name == other for other, _ in found) > 1})
    if repeated:
        raise ConfigError(
            f"two layers are called {repeated[0]!r}; names of layers are the names in checkpoints: rename one"
        )
    return found


def split_model(
    model: Layers,
    num_layers_per_stage: Sequence[int] | None = None,
    *,
    num_stages: int | None = None,
    recompute: bool = False,
) -> list[PipelineStage]:
    """Cut a list of layers into stages: by counts, or evenly into `num_stages`.

    The layers keep their names, so every cut writes the same checkpoint. Uneven counts are the point: an embedding and
    a head cost other than a block, and equal *time* per stage is what shrinks the bubble.

    >>> [len(s.module.names) for s in split_model([nn.Linear(2, 2) for _ in range(5)], [2, 3])]
    [2, 3]
    """
    layers = named_layers(model)
    counts = _counts(len(layers), num_layers_per_stage, num_stages)
    stages: list[PipelineStage] = []
    first = 0
    for place, count in enumerate(counts):
        own = layers[first : first + count]
        stages.append(PipelineStage(LayerStack(own, recompute=recompute, cut=counts, place=place)))
        first += count
    return stages


def _counts(num_layers: int, given: Sequence[int] | None, num_stages: int | None) -> list[int]:
    """Layers of each stage, checked."""
    if (given is None) == (num_stages is None):
        raise ConfigError("say num_layers_per_stage=[...] or num_stages=..., one of the two")
    if given is None:
        return list(even_split(num_layers, cast(int, num_stages)))
    counts = list(given)
    for stage, count in enumerate(counts):
        if count < 1:
            raise ConfigError(f"num_layers_per_stage gives stage {stage} {count} layers; a stage holds at least one")
    if sum(counts) != num_layers:
        raise ConfigError(
            f"num_layers_per_stage={counts} adds up to {sum(counts)} layers, but the model has {num_layers}; "
            "change a count so that every layer has a stage"
        )
    return counts


@dataclass(frozen=True)
class Tie:
    """One parameter that several stages share: `(stage, name in that stage)` for each place, in order of stages."""

    places: tuple[tuple[int, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that share it."""
        return tuple(dict.fromkeys(stage for stage, _ in self.places))


def find_ties(stages: Iterable[nn.Module] | Mapping[int, nn.Module]) -> tuple[Tie, ...]:
    """Parameters that are the same object in more than one stage, such as an embedding and its head.

    In one process they simply share; across ranks each stage has a copy, and the copies stay equal only if their
    gradients are added up.
    """
    places: dict[int, list[tuple[int, str]]] = {}
    numbered = cast(Mapping[int, nn.Module], stages).items() if isinstance(stages, Mapping) else enumerate(stages)
    for index, stage in numbered:
        for name, parameter in stage.named_parameters():
            places.setdefault(id(parameter), []).append((index, name))
    return tuple(Tie(tuple(where)) for where in places.values() if len({stage for stage, _ in where}) > 1)


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    """What a stage returned, as a tuple of tensors."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def check_activation(stage: int, microbatch: int, value: Any) -> tuple[Tensor, ...]:
    """The outputs of a stage, or an error that names it: only tensors travel between stages."""
    outputs = as_tuple(value)
    for position, tensor in enumerate(outputs):
        if not isinstance(cast(object, tensor), Tensor):
            raise ConfigError(
                f"stage {stage}, microbatch {microbatch}: output {position} is a {type(tensor).__name__}; a stage "
                "returns a tensor or a tuple of tensors"
            )
    return outputs


def stage_error(
    stage: int, microbatch: int, what: str, inputs: Iterable[Tensor], cause: BaseException
) -> OperatorError:
    """The error for a stage whose forward or backward raised: where it was and what it was given."""
    given = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs)
    before = f", or let stage {stage - 1} hand on what it accepts" if stage and what == "forward" else ""
    return OperatorError(
        f"stage {stage}, microbatch {microbatch}: {what} failed on {given or 'no input'}: {type(cause).__name__}: {cause}. "
        f"Mend the stage's module{before}"
    )


def _register(root: nn.Module, name: str, layer: nn.Module) -> None:
    """Put `layer` under a dotted name, making the containers on the way."""
    *parents, leaf = name.split(".")
    here = root
    for part in parents:
        child = dict(here.named_children()).get(part)
        if child is None:
            child = nn.Module()
            here.add_module(part, child)
        here = child
    here.add_module(leaf, layer)

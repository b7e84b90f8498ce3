"""The pipeline over processes: one rank's stages, run by torch's pipeline runtime under `torchrun`.

    dist.init_process_group("gloo")                     # or "nccl"
    stages = split_model(model, [3, 4, 4, 2])           # on every rank; each keeps its own
    pipeline = DistributedPipeline(stages, num_microbatches=8, schedule="1f1b", loss_fn=loss_fn)
    result = pipeline.step(batch, target)               # batch on the first stage's rank, target on the last's

What it promises: a schedule that is not proved does not run; gradients equal the full batch's; the loss is known on
every rank; if one rank fails, every other raises `WorkerDied` with both positions in the schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from headrace.errors import ConfigError, ScheduleError
from headrace.parallel.action import Action, Kind, leaves
from headrace.parallel.check import prove
from headrace.parallel.compare import Comparison, compare
from headrace.parallel.costs import StageCosts
from headrace.parallel.planner import Plan
from headrace.parallel.schedule import Schedule
from headrace.parallel.simulate import Simulation, simulate
from headrace.parallel.timeline import Span, Timeline
from headrace.parallel.torch_agree import Terms, actions_digest, crossing_ties, exchange, known_of, verdict
from headrace.parallel.torch_batch import (
    Batch,
    CountFunction,
    LossFunction,
    Reduction,
    ScaledLoss,
    check_same_rows,
    given_microbatches,
    merge_outputs,
    row_counts,
    split_batch,
)
from headrace.parallel.torch_defer import defer_weight_gradients
from headrace.parallel.torch_group import Group, SharedWeights, clock_offset, gradient_norm
from headrace.parallel.torch_guard import FailureGuard
from headrace.parallel.torch_metadata import Boundaries, Specs, TensorSpec, infer_outputs, shadow
from headrace.parallel.torch_pipeline import make_schedule
from headrace.parallel.torch_record import Position, Recorder
from headrace.parallel.torch_runtime import Engine, any_wrapped_for_sharding
from headrace.parallel.torch_stage import PipelineStage, Tie, find_ties


@dataclass(frozen=True)
class RunOptions:
    """How a distributed pipeline runs.

    `group`: the ranks of this pipeline (None: all processes); with data parallelism, this replica's column.
    `wrap`: applied to each local stage, for `fully_shard(stage, mesh=...)`, `replicate(...)` or `DistributedDataParallel`.
    `reduction`: what `loss_fn` does over a microbatch. `count`: what its mean averages over, as a function of the target;
    by default the entries of the target, in one of integers those that are not -100. `variable_shapes`: let batches
    change shape between steps, and microbatches within one; costs one small broadcast a step. `ties`: weights that
    stages share, where stages are given one by one. `watchdog`: learn of failed ranks; a rank silent for `silence` seconds
    counts as failed. `keep_outputs`: return the last stage's outputs.
    """

    group: dist.ProcessGroup | None = None
    wrap: Callable[[PipelineStage], nn.Module] | None = None
    reduction: Reduction = "mean"
    count: CountFunction | None = None
    variable_shapes: bool = False
    ties: Sequence[Tie] | None = None
    watchdog: bool = True
    silence: float = 15.0
    keep_outputs: bool = True


@dataclass(frozen=True)
class RankResult:
    """What a step gave: the full-batch loss on every rank, outputs on the last stage's rank, this rank's spans."""

    loss: Tensor | None
    outputs: Any
    spans: tuple[Span, ...]


class DistributedPipeline:
    """This rank's part of a pipeline.

    `stages` is the list of all stages (each rank keeps its own, the others' parameters are let go with the list) or
    a mapping from stage number to the local stages only. All ranks construct it together. `modules` are the local
    stages, wrapped if `options.wrap` says so; `parameters()` is what the optimizer gets.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module] | Mapping[int, nn.Module],
        num_microbatches: int,
        schedule: str | Schedule = "1f1b",
        loss_fn: LossFunction | None = None,
        options: RunOptions | None = None,
    ) -> None:
        """Build and prove the schedule, compare with the other ranks, connect the watchdog, place the stages."""
        self.options = options or RunOptions()
        self.group = Group(self.options.group)
        self.num_microbatches = num_microbatches
        self._known_shapes: dict[Specs, Boundaries] = {}
        self._shapes: dict[bool, list[Specs]] = {}  # of training and of evaluation
        self._placed: list[Specs] | None = None
        self.position = Position()
        self.guard: FailureGuard | None = None
        given: dict[int, PipelineStage] = {}
        terms = Terms(
            str(num_microbatches),
            schedule.name if isinstance(schedule, Schedule) else str(schedule),
            self.options.variable_shapes,
            self.options.watchdog,
        )
        failed: Exception | None = None
        try:
            self.loss = ScaledLoss(loss_fn, self.options.reduction, self.options.count)
            numbered = stages.items() if isinstance(stages, Mapping) else enumerate(stages)
            given.update((index, _as_stage(stage)) for index, stage in numbered)
            if not isinstance(stages, Mapping):
                terms = replace(terms, whole=True, **known_of(given))
            self.schedule = self._schedule(schedule, stages, num_microbatches)
            self.train, self.evaluate = proved(self.schedule)
            terms = self._complete(terms, given)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait to hear of it
            failed = error
            terms = replace(terms, failed=f"{type(error).__name__}: {error}")
        self._agree(terms, failed)
        with self.guarded():
            self._place(given)

    def _complete(self, terms: Terms, stages: dict[int, PipelineStage]) -> Terms:
        """Add what the schedule says to the terms; an error if this rank lacks one of its stages."""
        mine = self.schedule.stages_of(self.group.rank)
        if missing := [s for s in mine if s not in stages]:
            raise ConfigError(
                f"rank {self.group.rank} runs stages {list(mine)} of schedule {self.schedule.name!r} but got no stage "
                f"{missing[0]}; pass the list of all stages, or a mapping with this rank's"
            )
        self._ties = find_ties(stages) if self.options.ties is None else self.options.ties
        if not terms.whole:
            terms = replace(terms, **known_of({s: stages[s] for s in mine}, self.schedule.num_stages))
        ties = crossing_ties(self._ties, self.schedule, stages)
        return replace(terms, actions=actions_digest(self.schedule), ties=ties)

    def _agree(self, terms: Terms, failed: Exception | None) -> None:
        """Compare with the pipeline's other ranks, and connect the watchdog; an error, on every rank, if they differ.

        Processes of other pipelines wait at the watchdog, so it is connected first to tell them.
        """
        everyone = exchange(self.group, terms)
        error = verdict(everyone, self.group.rank, failed)
        world = dist.get_world_size()
        if error is not None and self.group.size == world:
            raise error
        if world > 1 and any(t.watchdog for t in everyone):
            self.guard = FailureGuard(self.position, self.options.silence)
        with self.guarded():
            if error is not None:
                raise error

    def _place(self, stages: dict[int, PipelineStage]) -> None:
        """Wrap this rank's stages, hand them to the engine, and find the weights they share with others."""
        mine = self.schedule.stages_of(self.group.rank)
        self._shadows = self._make_shadows({s: stages[s] for s in mine})
        device = _device(stages[s] for s in mine)
        self.modules: dict[int, nn.Module] = {s: self._wrap(s, stages[s]) for s in mine}
        lists = (self.train, self.evaluate)
        self.engine = Engine(
            self.modules, lists, self._scaled_loss, self.options.group, Recorder(self.group.rank, device)
        )
        self.engine.position = self.position
        if self.schedule.splits_backward:
            for stage in self.engine.stages:
                defer_weight_gradients(stage.submod, stage.gradients)
        self.shared = SharedWeights(self._ties, self.modules, self.schedule.stage_to_rank, self.group)
        self.shared.align()

    # -- what a training loop calls

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage, and so gives the batch."""
        return 0 in self.modules

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, and so gives the target and sees the outputs."""
        return self.schedule.num_stages - 1 in self.modules

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank, each once."""
        seen: set[int] = set()
        for module in self.modules.values():
            for parameter in module.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def step(self, batch: Batch | None = None, target: Batch | None = None, *, align: bool = False) -> RankResult:
        """Forward and backward of one batch; every rank calls it.

        The first stage's rank gives `batch`, the last's `target`; the others may give nothing (what they give is not
        looked at). `align` starts all ranks together, for measuring.
        """
        with self.guarded():
            return self._run(*self._split(batch, target), train=True, align=align)

    def step_microbatches(
        self, inputs: Sequence[Batch] | None = None, targets: Sequence[Batch] | None = None
    ) -> RankResult:
        """The same with microbatches of the caller's making; with `variable_shapes` they may differ in shape."""
        m = self.num_microbatches
        with self.guarded():
            mine = given_microbatches(inputs, m, "inputs") if self.is_first else None
            theirs = given_microbatches(targets, m, "targets") if self.is_last else None
            return self._run(mine, theirs, train=True, same_rows=False)

    def eval(self, batch: Batch | None = None, target: Batch | None = None) -> RankResult:
        """The forwards only, without gradients, on any schedule; modules stay in the mode they are in."""
        with self.guarded(), torch.no_grad():
            return self._run(*self._split(batch, target), train=False)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm over the whole pipeline, shared weights counted once; every rank calls it, and gets the norm."""
        given = [p for p in self.parameters() if p.grad is not None]
        with self.guarded():
            counted = [p.grad for p in given if p.grad is not None and id(p) not in self.shared.duplicates]
            norm = gradient_norm(counted, self.group, norm_type)
        if not bool(torch.isfinite(norm)):  # the same on every rank, so no rank has failed
            raise ConfigError(
                f"the gradient norm over the pipeline is {float(norm)}; some gradient is not a number: lower the learning "
                "rate, or scale the loss"
            )
        torch.nn.utils.clip_grads_with_norm_(given, max_norm, norm, foreach=False)
        return norm

    def timeline(self) -> Timeline:
        """What every rank did when in the last step, on one clock; every rank calls it."""
        with self.guarded():
            offset = clock_offset(self.group)
            mine = [(str(s.action), s.start + offset, s.end + offset) for s in self.engine.recorder.finish()]
            everyone = self.group.gather_bytes(msgspec.json.encode(mine))
        rows = [msgspec.json.decode(data, type=list[tuple[str, float, float]]) for data in everyone]
        began = min((start for row in rows for _, start, _ in row), default=0.0)
        return Timeline.of(
            (
                Span(rank, Action.parse(text), start - began, end - began)
                for rank, row in enumerate(rows)
                for text, start, end in row
            ),
            self.group.size,
            "measured",
        )

    def compare(self, predicted: Plan | Simulation | StageCosts) -> Comparison:
        """The last step beside what was predicted, and where the lost time went; every rank calls it.

        The prediction is simulated again for the list that ran: an overlapped pair runs in turn here.
        """
        if isinstance(predicted, Plan):
            predicted = predicted.simulation
        costs = predicted if isinstance(predicted, StageCosts) else predicted.costs
        return compare(simulate(self.schedule, costs), self.timeline())

    def close(self) -> None:
        """Say goodbye to the other ranks; every rank calls it at the end. Leaves the process group alone."""
        if self.guard is not None:
            self.guard.close()

    # -- how

    def _schedule(self, schedule: str | Schedule, stages: Any, num_microbatches: int) -> Schedule:
        if isinstance(stages, Mapping) and isinstance(schedule, str):
            raise ConfigError(
                f"schedule {schedule!r} by name needs the number of stages; pass the list of all stages, or a Schedule "
                "from build_schedule()"
            )
        if isinstance(schedule, Schedule):
            num_stages = schedule.num_stages if isinstance(stages, Mapping) else len(stages)
        else:
            num_stages = len(stages)
        return make_schedule(schedule, num_stages, num_microbatches, self.group.size)

    def _make_shadows(self, stages: dict[int, PipelineStage]) -> dict[int, nn.Module]:
        for index, stage in stages.items():
            if any_wrapped_for_sharding(stage) or isinstance(stage.module, DistributedDataParallel):
                raise ConfigError(
                    f"stage {index} is wrapped for data parallelism already; pass the plain stage, and the wrapping as "
                    "RunOptions(wrap=lambda stage: fully_shard(stage, mesh=...))"
                )
        return {index: shadow(stage) for index, stage in stages.items()}

    def _wrap(self, index: int, stage: PipelineStage) -> nn.Module:
        wrapped = stage if self.options.wrap is None else self.options.wrap(stage)
        if isinstance(wrapped, DistributedDataParallel) and self.schedule.splits_backward:
            raise ConfigError(
                f"stage {index}: schedule {self.schedule.name!r} splits the backward, and DistributedDataParallel would "
                "never reduce the weight gradients that come later (wrong gradients, no error); wrap with fully_shard() "
                "or replicate() instead, or take a schedule with full backwards such as 1f1b"
            )
        return wrapped

    def _scaled_loss(self, output: Any, entry: Any) -> Tensor:
        targets, share, mb = entry
        return self.loss(output, targets, share, f"stage {self.schedule.num_stages - 1}, microbatch {mb}")

    def _split(self, batch: Any, target: Any) -> tuple[Any, Any]:
        """This rank's microbatches of inputs and targets; what the rank has no use for is not looked at."""
        m = self.num_microbatches
        inputs = split_batch(batch, m, "batch") if self.is_first and batch is not None else None
        targets = split_batch(target, m, "target") if self.is_last and target is not None else None
        return inputs, targets

    @contextlib.contextmanager
    def guarded(self, *, alike: bool = False) -> Generator[None]:
        """Turn whatever goes wrong, here or elsewhere, into one error on every rank.

        `alike`: what goes wrong here, goes wrong on every rank and fails none; only another rank's end is turned.
        """
        if self.guard is None:
            yield
            return
        self.guard.refuse_if_failed()
        try:
            yield
        except BaseException as error:  # also an interrupt must free the other ranks
            if alike:
                self.guard.raise_cause(error)
                raise
            self.guard.fail(error)

    def _run(
        self, inputs: Any, targets: Any, *, train: bool, align: bool = False, same_rows: bool = True
    ) -> RankResult:
        if self.is_first and inputs is None:
            raise ConfigError(f"rank {self.group.rank} holds stage 0 and got no batch; pass it to step() on this rank")
        if self.is_last and (train or targets is not None):
            self.loss.check_arguments(targets)
        shapes = self._agree_on_shapes(inputs, train)
        wants_loss = train or targets is not None or self.loss.loss_fn is None
        entries = None
        if self.is_last and wants_loss:
            rows = row_counts([specs[0].shape if specs else () for specs in shapes])
            if same_rows:
                check_same_rows(rows, targets)
            shares = self.loss.shares(rows, targets)
            entries = [(None if targets is None else targets[m], shares[m], m) for m in range(self.num_microbatches)]
        before = self.shared.snapshot() if train else []
        if align:
            self.group.barrier()
        given = inputs if inputs is not None else [()] * self.num_microbatches
        losses = self.engine.step(given, entries, train=train, keep_outputs=self.options.keep_outputs)
        if train:
            self.shared.add_gradients(before)
        loss = self._broadcast_loss(losses, entries is not None)
        outputs = None
        if self.is_last and self.options.keep_outputs:
            outputs = merge_outputs([_detached(o) for o in self.engine.outputs()])
        return RankResult(loss, outputs, tuple(self.engine.recorder.finish()))

    def _broadcast_loss(self, losses: list[Tensor], has_loss: bool) -> Tensor | None:
        """The sum of the scaled losses, on every rank; None if the last stage's rank has none: an evaluation without target."""
        mine = torch.stack([x.detach() for x in losses]).sum() if losses else 0.0
        told, number = self.group.broadcast_numbers([float(has_loss), mine], self.schedule.stage_to_rank[-1])
        return number if bool(told) else None

    def _agree_on_shapes(self, inputs: Any, train: bool) -> list[Specs]:
        """Every rank learns the shapes of this step's microbatches; a shape seen first flows through the shadows."""
        mine = [tuple(TensorSpec.of(t) for t in mb) for mb in inputs] if self.is_first else None
        shapes = self._shapes.get(train)
        if shapes is None or self.options.variable_shapes:
            data = None if mine is None else msgspec.json.encode(mine)
            data = self.group.broadcast_bytes(data, self.schedule.stage_to_rank[0])
            shapes = self._shapes[train] = msgspec.json.decode(data, type=list[Specs])
        elif mine is not None and mine != shapes:
            raise ConfigError(
                f"the batch changed shape: microbatches of {_text(shapes[0])} before, of {_text(mine[0])} now; "
                "pass RunOptions(variable_shapes=True) if that is meant, or pad to one shape"
            )
        if shapes != self._placed:
            if len({len(specs) for specs in shapes}) != 1:
                raise ConfigError("the microbatches of a step have different numbers of tensors; give each the same")
            for specs in dict.fromkeys(shapes):
                if specs not in self._known_shapes:
                    self._known_shapes[specs] = self._infer(specs)
            self.engine.set_shapes([self._known_shapes[specs] for specs in shapes])
            self._placed = shapes
        return shapes

    def _infer(self, specs: Specs) -> Boundaries:
        """Let shapes flow through the stages, each on its own rank; a stage that fails, fails on every rank."""
        into: list[Specs] = [specs]
        for stage, owner in enumerate(self.schedule.stage_to_rank):
            answer: bytes | None = None
            if owner == self.group.rank:
                answer = msgspec.json.encode(infer_outputs(self._shadows[stage], stage, into[-1]))
            into.append(msgspec.json.decode(self.group.broadcast_bytes(answer, owner), type=Specs))
        return Boundaries(tuple(into[:-1]), into[-1])


def proved(schedule: Schedule) -> tuple[Schedule, Schedule]:
    """The lowered schedules for training and for evaluation, proved; an error if they are not, or if torch would run them wrong."""
    train, evaluate = prove(schedule).lowered, prove(schedule.forward_only()).lowered
    last = schedule.num_stages - 1
    order = [a.microbatch for row in schedule.rows for a in leaves(row) if a.stage == last and a.kind is Kind.F]
    if order != sorted(order, key=lambda m: -1 if m is None else m):
        raise ScheduleError(
            f"schedule {schedule.name!r}: the last stage ({last}) runs its forwards in the order {order}. torch files losses "
            "by their turn, not by their microbatch, and would differentiate the wrong ones; let the last stage go through "
            "its microbatches in ascending order"
        )
    return train, evaluate


def _as_stage(module: nn.Module) -> PipelineStage:
    return module if isinstance(module, PipelineStage) else PipelineStage(module)


def _device(stages: Iterable[nn.Module]) -> torch.device:
    for stage in stages:
        for tensor in (*stage.parameters(), *stage.buffers()):
            return tensor.device
    return torch.device("cpu")


def _text(specs: Specs) -> str:
    return ", ".join(f"{s.dtype}{list(s.shape)}" for s in specs)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else tuple(t.detach() for t in value)

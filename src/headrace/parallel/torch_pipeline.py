"""The pipeline in one process: any schedule, exact gradients, and a simulated clock for each rank.

`Pipeline` runs the very action lists that the distributed run uses, over stages that all live here. Nothing overlaps in
fact; each rank has a clock of its own that advances by the time its action took (or is said to take), and waits for the
tensors it needs. So a laptop shows the gradient, the bubble and the activations in flight that a cluster would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError, HeadraceError, ScheduleError
from headrace.parallel.action import Action, Kind, leaves
from headrace.parallel.builders.registry import build, recipe
from headrace.parallel.check import prove
from headrace.parallel.costs import StageCosts
from headrace.parallel.schedule import Schedule
from headrace.parallel.timeline import Span, Timeline
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
from headrace.parallel.torch_defer import DeferredGradients, defer_weight_gradients, restore_forwards
from headrace.parallel.torch_stage import PipelineStage, check_activation, stage_error


@dataclass(frozen=True)
class StepResult:
    """What one step gave.

    `loss` is the full-batch loss, detached. `outputs` are the last stage's outputs, joined over microbatches and
    detached. `timeline` is in seconds of the simulated clocks (in the units of `costs`, if given). `peak_in_flight[s]` is
    the largest number of microbatches whose activations stage `s` held at once.
    """

    loss: Tensor | None
    outputs: Any
    timeline: Timeline
    peak_in_flight: tuple[int, ...]


class Pipeline:
    """Stages and a schedule; `step(batch, target)` leaves the full-batch gradients on the parameters.

    `schedule` is a name (`"gpipe"`, `"1f1b"`, `"zb-h1"`, ...) or a `Schedule`. Schedules that put several stages on a
    rank divide the stages over fewer ranks: 8 stages of `interleaved-1f1b` are 4 ranks of 2 (say `num_ranks` for more
    per rank). `loss_fn(output, target)` averages over the entries of the target, in one of integers over those that are not
    -100; for another mean give `count`, a function of the target, for a sum `reduction="sum"`. Without `loss_fn` the last
    stage returns the loss. `costs` gives each action's time and each link's for the simulated clocks; without it, an action
    takes the time that it takes here, and links are free. `keep_outputs=False` lets the outputs of all microbatches go,
    which may be most of the memory. Gradients accumulate into `.grad`, as everywhere in torch:
    clear them between optimizer steps.

    >>> stages = [PipelineStage(nn.Linear(4, 4)) for _ in range(2)]
    >>> pipe = Pipeline(stages, num_microbatches=4, schedule="1f1b", loss_fn=nn.functional.mse_loss)
    >>> result = pipe.step(torch.ones(8, 4), torch.zeros(8, 4))
    >>> result.peak_in_flight
    (2, 1)
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        num_microbatches: int,
        schedule: str | Schedule = "gpipe",
        loss_fn: LossFunction | None = None,
        *,
        num_ranks: int | None = None,
        reduction: Reduction = "mean",
        count: CountFunction | None = None,
        costs: StageCosts | None = None,
        keep_outputs: bool = True,
    ) -> None:
        """Build and check the schedule for these stages."""
        self.stages = [s if isinstance(s, PipelineStage) else PipelineStage(s) for s in stages]
        self.schedule = make_schedule(schedule, len(self.stages), num_microbatches, num_ranks)
        self.num_microbatches = num_microbatches
        self.loss = ScaledLoss(loss_fn, reduction, count)
        self.costs = check_costs(costs, self.schedule)
        self.keep_outputs = keep_outputs

    def step(self, batch: Batch, target: Batch | None = None) -> StepResult:
        """Run the schedule forward and backward on one batch, cut into equal microbatches along dimension 0."""
        return self._run(self.schedule, *self._split(batch, target), train=True)

    def step_microbatches(self, inputs: Sequence[Batch], targets: Sequence[Batch] | None = None) -> StepResult:
        """The same with microbatches of the caller's making, which may differ in shape and in rows."""
        checked = given_microbatches(inputs, self.num_microbatches, "inputs") or []
        return self._run(
            self.schedule, checked, given_microbatches(targets, self.num_microbatches, "targets"), train=True
        )

    def eval(self, batch: Batch, target: Batch | None = None) -> StepResult:
        """Run the forwards only, without gradients; the loss if a target (or a last stage that is the loss) is given.

        It does not switch modules to evaluation mode; that is `stage.eval()`.
        """
        with torch.no_grad():
            return self._run(self.schedule.forward_only(), *self._split(batch, target), train=False)

    def _split(
        self, batch: Batch, target: Batch | None
    ) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]] | None]:
        inputs = split_batch(batch, self.num_microbatches, "batch")
        targets = None if target is None else split_batch(target, self.num_microbatches, "target")
        check_same_rows(_rows(inputs), targets)
        return inputs, targets

    def _run(
        self,
        schedule: Schedule,
        inputs: list[tuple[Tensor, ...]],
        targets: list[tuple[Tensor, ...]] | None,
        *,
        train: bool,
    ) -> StepResult:
        if train or targets is not None:
            self.loss.check_arguments(targets)
        run = _Run(self, schedule, inputs, targets, train)
        stores = run.stores if train and schedule.splits_backward else {}
        try:
            for index, store in stores.items():
                defer_weight_gradients(self.stages[index], store)
            return run.all()
        finally:
            for index in stores:
                restore_forwards(self.stages[index])


@dataclass
class _Run:
    """One step in progress: what is computed, what waits, and each rank's clock."""

    pipeline: Pipeline
    schedule: Schedule
    inputs: list[tuple[Tensor, ...]]
    targets: list[tuple[Tensor, ...]] | None
    train: bool
    saved: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = field(default_factory=dict)
    arrived: dict[tuple[Kind, int, int], tuple[float, tuple[Tensor | None, ...]]] = field(default_factory=dict)
    weights: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    peak: list[int] = field(default_factory=list)
    link_free: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Cut the work to size."""
        stages = self.schedule.num_stages
        self.last = stages - 1
        self.shares = self.pipeline.loss.shares(_rows(self.inputs), self.targets)
        self.stores = {stage: DeferredGradients() for stage in range(stages)}
        self.held = [0] * stages
        self.peak = [0] * stages

    def all(self) -> StepResult:
        """Run every row to its end, always the action that its rank's clock would start first."""
        rows = [list(row) for row in self.schedule.rows]
        clocks = [0.0] * len(rows)
        at = [0] * len(rows)
        spans: list[Span] = []
        while any(at[rank] < len(row) for rank, row in enumerate(rows)):
            starts = {
                rank: max(clocks[rank], ready)
                for rank, row in enumerate(rows)
                if at[rank] < len(row) and (ready := self.ready(row[at[rank]])) is not None
            }
            if not starts:
                stuck = {rank: row[at[rank]] for rank, row in enumerate(rows) if at[rank] < len(row)}
                raise ScheduleError(f"schedule {self.schedule.name!r} cannot go on; each rank waits at {stuck}")
            rank = min(starts, key=lambda r: (starts[r], r))
            action = rows[rank][at[rank]]
            end = self.timed(action, starts[rank])
            spans.append(Span(rank, action, starts[rank], end))
            clocks[rank] = end
            at[rank] += 1
        loss = torch.stack([self.losses[m].detach() for m in sorted(self.losses)]).sum() if self.losses else None
        outputs = merge_outputs([self.outputs[m] for m in sorted(self.outputs)])
        return StepResult(loss, outputs, Timeline.of(spans, len(rows)), tuple(self.peak))

    def ready(self, action: Action) -> float | None:
        """When the tensors that an action needs are there, on the simulated clock; None if they are not computed yet."""
        stage, mb = action.stage, int(action.microbatch or 0)
        if action.kind is Kind.F:
            return 0.0 if stage == 0 else self._arrival(Kind.F, stage, mb)
        if action.kind is Kind.W:
            return 0.0 if (stage, mb) in self.weights else None
        if (stage, mb) not in self.saved:
            return None
        return 0.0 if stage == self.last else self._arrival(Kind.B, stage, mb)

    def _arrival(self, kind: Kind, stage: int, mb: int) -> float | None:
        found = self.arrived.get((kind, stage, mb))
        return None if found is None else found[0]

    def timed(self, action: Action, start: float) -> float:
        """Run an action, and stamp what it produced with the simulated time at which it ends."""
        began = time.perf_counter()
        produced = self.perform(action)
        if self.inputs[0][0].is_cuda:
            torch.cuda.synchronize(self.inputs[0][0].device)
        spent = time.perf_counter() - began
        costs = self.pipeline.costs
        end = start + (spent if costs is None else _seconds(costs, action))
        if produced is not None:
            kind, stage, tensors = produced
            arrival = end if costs is None else self.travel(costs, kind, stage, end)
            self.arrived[kind, stage, int(action.microbatch or 0)] = (arrival, tensors)
        return end

    def travel(self, costs: StageCosts, kind: Kind, stage: int, ready: float) -> float:
        """When a tensor for `stage` arrives; messages between two ranks queue in each direction."""
        place = self.schedule.stage_to_rank
        sender = stage - 1 if kind is Kind.F else stage + 1
        ranks = (place[sender], place[stage])
        if ranks[0] == ranks[1]:
            return ready
        link = min(sender, stage)
        left = max(ready, self.link_free.get(ranks, 0)) + costs.wire(link)
        self.link_free[ranks] = left
        return left + costs.latency[link]

    def perform(self, action: Action) -> tuple[Kind, int, tuple[Tensor | None, ...]] | None:
        """Compute one action; returns what it sends on: which kind, to which stage, which tensors."""
        stage, mb = action.stage, int(action.microbatch or 0)
        if action.kind is Kind.F:
            outputs = self.forward(stage, mb)
            return None if stage == self.last else (Kind.F, stage + 1, outputs)
        if action.kind is Kind.W:
            self.weights.pop((stage, mb))()
            return None
        grads = self.backward(stage, mb, split=action.kind is Kind.I)
        return None if stage == 0 else (Kind.B, stage - 1, grads)

    def forward(self, stage: int, mb: int) -> tuple[Tensor, ...]:
        """The forward of one microbatch on one stage; on the last stage also its loss."""
        module = self.pipeline.stages[stage]
        if stage == 0:
            inputs: tuple[Tensor, ...] = self.inputs[mb]
        else:
            _, received = self.arrived.pop((Kind.F, stage, mb))
            inputs = tuple(t.detach().requires_grad_(t.requires_grad) for t in received if t is not None)
        try:
            value = module(*inputs)
        except HeadraceError:
            raise
        except Exception as error:  # whatever the module raises: we add which stage and what it was given
            raise stage_error(stage, mb, "forward", inputs, error) from error
        outputs = check_activation(stage, mb, value)
        if stage == self.last:
            if self.pipeline.keep_outputs:
                self.outputs[mb] = _detached(value)
            outputs = self._loss(value, mb)
        if self.train:
            self.saved[stage, mb] = (inputs, outputs)
            self.held[stage] += 1
            self.peak[stage] = max(self.peak[stage], self.held[stage])
        return outputs

    def _loss(self, value: Any, mb: int) -> tuple[Tensor, ...]:
        """The scaled loss of a microbatch, as the one output of the last stage."""
        loss = self.pipeline.loss
        if not self.train and self.targets is None and loss.loss_fn is not None:
            return ()
        where = f"stage {self.last}, microbatch {mb}"
        targets = None if self.targets is None else self.targets[mb]
        self.losses[mb] = loss(value, targets, self.shares[mb], where)
        return (self.losses[mb],)

    def backward(self, stage: int, mb: int, *, split: bool) -> tuple[Tensor | None, ...]:
        """Gradients of one microbatch on one stage; those of its weights wait if `split`. Frees the activations."""
        inputs, outputs = self.saved.pop((stage, mb))
        grads: tuple[Tensor | None, ...] = (None,)
        if stage != self.last:
            _, grads = self.arrived.pop((Kind.B, stage, mb))
        pairs = [
            (out, grad)
            for out, grad in zip(outputs, grads, strict=True)
            if out.requires_grad and (grad is not None or stage == self.last)
        ]
        store = self.stores[stage]
        store.deferring = split
        try:
            if pairs:
                torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        except Exception as error:  # as above
            raise stage_error(stage, mb, "backward", inputs, error) from error
        finally:
            store.deferring = False
        if split:
            self.weights[stage, mb] = store.take()
        self.held[stage] -= 1
        received = tuple(t.grad if stage else None for t in inputs)
        if stage:
            for tensor in inputs:
                tensor.grad = None
        return received


def make_schedule(
    schedule: str | Schedule, num_stages: int, num_microbatches: int, num_ranks: int | None = None
) -> Schedule:
    """The schedule for a number of stages: built by name, or the given one, checked against stages and microbatches."""
    if num_stages < 1:
        raise ConfigError("there are no stages; a pipeline needs at least one PipelineStage")
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches is {num_microbatches}; a step needs at least one microbatch")
    if isinstance(schedule, str):
        found = recipe(schedule)
        chunks = found.chunks
        ranks = num_ranks if num_ranks is not None else num_stages // chunks
        if found.free_chunks and num_ranks:
            chunks = num_stages // num_ranks
        if ranks < 1 or ranks * chunks != num_stages:
            raise ConfigError(
                f"schedule {schedule!r} puts {chunks} stages on each rank, and {num_stages} stages do not make whole "
                f"ranks of it{'' if num_ranks is None else f' with num_ranks={num_ranks}'}; give a multiple of {chunks} "
                "stages, or another num_ranks"
            )
        built = build(found.name, ranks, num_microbatches, chunks=chunks)
    else:
        built = schedule.compute_only()
        prove(built)
    if built.num_stages != num_stages:
        raise ConfigError(
            f"schedule {built.name!r} is made for {built.num_stages} stages, but {num_stages} are given; build the "
            "schedule for the same number"
        )
    if built.num_microbatches != num_microbatches:
        raise ConfigError(
            f"schedule {built.name!r} is made for {built.num_microbatches} microbatches, but num_microbatches is "
            f"{num_microbatches}; make them equal"
        )
    if num_ranks is not None and built.num_ranks != num_ranks:
        raise ConfigError(f"schedule {built.name!r} runs on {built.num_ranks} ranks, not on num_ranks={num_ranks}")
    return in_turn(built)


def in_turn(schedule: Schedule) -> Schedule:
    """The schedule with overlapped pairs taken apart, as the engines here run them: first the one, then the other."""
    return replace(schedule, rows=tuple(tuple(leaves(row)) for row in schedule.rows))


def check_costs(costs: StageCosts | None, schedule: Schedule) -> StageCosts | None:
    """Costs that describe as many stages as the schedule has, or None."""
    if costs is not None and costs.num_stages != schedule.num_stages:
        raise ConfigError(
            f"costs describe {costs.num_stages} stages, the pipeline has {schedule.num_stages}; give one a stage"
        )
    return costs


def _seconds(costs: StageCosts, action: Action) -> float:
    """What an action takes by the table of costs."""
    table = {
        Kind.F: costs.forward,
        Kind.I: costs.backward_input,
        Kind.W: costs.backward_weight,
        Kind.B: costs.backward,
    }
    return table[action.kind][action.stage]


def _rows(microbatches: Sequence[tuple[Tensor, ...]]) -> list[int]:
    return row_counts([m[0].shape if m else () for m in microbatches])


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else tuple(t.detach() for t in value)

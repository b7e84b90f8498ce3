"""The one file that touches the private interface of torch's pipeline runtime.

`torch.distributed.pipelining` runs a list of actions for each rank (`_PipelineScheduleRuntime`) and has the pieces of a
stage (buffers, sends, receives, FSDP hooks). `Engine` feeds it our own proved lists and differs from it in four ways:

* shapes are given, never found by running a stage on uninitialised memory, and each microbatch may have its own;
* receive buffers live from their receive to their use, not M of them from the first step to the last, and the loss of a
  microbatch lets go of its graph after its backward. What was sent is held to the end of the step: torch waits for it there;
* a split backward defers weight gradients (`torch_defer`), so activation checkpointing recomputes once;
* every action is timed, and its place in the list is known to the watchdog while it runs.

What is used is listed in `INTERFACE`; `check_interface()` says what is missing when torch has changed, and the contract
tests say what behaves differently. Tried with torch 2.13.
"""

# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining import stage as torch_stage

from headrace.errors import ConfigError, InternalError
from headrace.parallel.action import Action, Kind
from headrace.parallel.schedule import Schedule
from headrace.parallel.torch_defer import DeferredGradients
from headrace.parallel.torch_metadata import Boundaries, TensorSpec
from headrace.parallel.torch_record import Position, Recorder, WatchedRow, named

# (where, name, what we use it for): the private interface, all of it.
INTERFACE: tuple[tuple[Any, str, str], ...] = (
    (torch_schedules, "_PipelineScheduleRuntime", "runs a rank's list of actions"),
    (torch_schedules, "_Action", "one action of the list, made from its text"),
    (getattr(torch_schedules, "_Action", None), "from_str", "text to action"),
    (getattr(torch_schedules, "_PipelineScheduleRuntime", None), "_prepare_schedule_with_comms", "takes the lists"),
    (getattr(torch_schedules, "_PipelineScheduleRuntime", None), "_step_microbatches", "runs one step"),
    (getattr(torch_schedules, "_PipelineScheduleRuntime", None), "_initialize_stages", "replaced: shapes are given"),
    (getattr(torch_schedules, "_PipelineScheduleRuntime", None), "_warmup_p2p", "connects each pair of ranks in order"),
    (torch_stage, "_RecvInfo", "one tensor that a stage receives"),
    (torch_stage, "_make_tensor_from_meta", "a receive buffer"),
    (torch_stage, "_TensorMeta", "shape, strides and type of a tensor"),
    (TorchStage, "forward_one_chunk", "a forward"),
    (TorchStage, "backward_one_chunk", "a backward, full or of the input only"),
    (TorchStage, "backward_weight_one_chunk", "the deferred weight gradient"),
    (TorchStage, "forward_maybe_with_nosync", "calls the module"),
    (TorchStage, "get_fwd_recv_ops", "posts the receive of an activation"),
    (TorchStage, "get_bwd_recv_ops", "posts the receive of a gradient"),
    (TorchStage, "get_bwd_send_ops", "sends a gradient"),
    (TorchStage, "set_local_bwd_input", "a gradient from a stage of the same rank"),
    (TorchStage, "perform_reduce_grad", "reduces gradients over replicas (FSDP2, replicate)"),
    (TorchStage, "clear_runtime_states", "forgets the last step"),
)


def check_interface() -> list[str]:
    """What our use of torch's private interface finds missing: one line each, empty if all is there."""
    return [
        f"{getattr(owner, '__name__', owner)}.{name} ({purpose}) is gone in torch {torch.__version__}"
        for owner, name, purpose in INTERFACE
        if not hasattr(owner, name)
    ]


class _Stage(TorchStage):
    """torch's stage, with given shapes, buffers that come and go, deferred weight gradients, and a clock."""

    def __init__(
        self, module: nn.Module, index: int, schedule: Schedule, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self.gradients = DeferredGradients()
        # Without I and W, torch calls the builder after each full backward: leave it out and save the call.
        builder = self.gradients.take if schedule.splits_backward else None
        super().__init__(module, index, schedule.num_stages, device, group=group, dw_builder=builder)
        self.recorder: Recorder
        self.kept: dict[int, Any] = {}

    def set_shapes(self, boundaries: Sequence[Boundaries]) -> None:
        """Say what each microbatch looks like when it comes in and when it goes out; allocates nothing."""
        self.chunks = len(boundaries)
        self.args_recv_info = {m: self._receives(b.into(self.stage_index)) for m, b in enumerate(boundaries)}
        outs = [b.out_of(self.stage_index) for b in boundaries]
        following: list[int] = [] if self.is_last else [self.stage_index + 1]
        self.act_send_info = {position: list(following) for position in range(len(outs[0]))}
        self.grad_recv_info = {m: () if self.is_last else self._gradients(out) for m, out in enumerate(outs)}
        self.grad_send_info = None
        self._stage_meta.inputs = tuple(map(_meta, boundaries[0].into(self.stage_index)))
        self._stage_meta.outputs = tuple(map(_meta, outs[0]))

    def _receives(self, specs: Sequence[TensorSpec]) -> tuple[Any, ...]:
        source = None if self.is_first else self.stage_index - 1
        return tuple(
            torch_stage._RecvInfo(f"input {i}", source, None, _meta(spec), is_root_arg=self.is_first)
            for i, spec in enumerate(specs)
        )

    def _gradients(self, specs: Sequence[TensorSpec]) -> tuple[Any, ...]:
        """One entry for each output; an output without gradient has no description and gets no message."""
        return tuple(
            torch_stage._RecvInfo(
                f"gradient of output {i}",
                self.stage_index + 1,
                None,
                _meta(spec, False) if spec.requires_grad else None,
            )
            for i, spec in enumerate(specs)
        )

    def _fill(self, infos: tuple[Any, ...]) -> None:
        """Make the buffers of one receive."""
        for info in infos:
            if info.buffer is None and info.tensor_meta is not None and not info.is_root_arg:
                info.buffer = torch_stage._make_tensor_from_meta(info.tensor_meta, self.device)

    @staticmethod
    def _empty(infos: tuple[Any, ...]) -> None:
        """Drop the buffers of one receive; who still needs a tensor holds it."""
        for info in infos:
            info.buffer = None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._fill(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        self._fill(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        self._fill(self.grad_recv_info[mb_index])
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        # torch sends zeros for an input that got no gradient, in the shape of `input_grads`: this microbatch's.
        metas = (info.tensor_meta for info in self.args_recv_info[bwd_chunk_id])
        self._stage_meta.input_grads = tuple(
            torch_stage._TensorMeta(shape=m.shape, stride=m.stride, dtype=m.dtype, requires_grad=False)
            if m.requires_grad
            else None
            for m in metas
        )
        return super().get_bwd_send_ops(bwd_chunk_id)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward_maybe_with_nosync(*args, **kwargs)
        if self.is_last:
            return out
        # A message is the tensor's memory as it lies: make it lie as the receiver expects.
        return out.contiguous() if isinstance(out, Tensor) else tuple(t.contiguous() for t in out)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        action = Action(self.stage_index, Kind.F, fwd_chunk_id)
        run = super().forward_one_chunk
        inputs = args or tuple(i.buffer for i in self.args_recv_info[fwd_chunk_id] if i.buffer is not None)
        with named(action, inputs):
            output = self.recorder.timed(action, lambda: run(fwd_chunk_id, args, kwargs, save_forward_output=False))
        self._empty(self.args_recv_info[fwd_chunk_id])
        if self.is_last and save_forward_output:
            self.kept[fwd_chunk_id] = output
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        action = Action(self.stage_index, Kind.B if full_backward else Kind.I, bwd_chunk_id)
        run = super().backward_one_chunk
        self.gradients.deferring = not full_backward
        try:
            with named(action, ()):
                self.recorder.timed(
                    action,
                    lambda: run(bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward),
                )
        finally:
            self.gradients.deferring = False
        if loss is not None:
            loss.detach_()  # torch keeps the losses of the step, whose graphs hold the stage's inputs
        self._empty(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        action = Action(self.stage_index, Kind.W, bwd_chunk_id)
        run = super().backward_weight_one_chunk
        self.recorder.timed(action, lambda: run(bwd_chunk_id, last_backward=last_backward))


class _Runtime(torch_schedules._PipelineScheduleRuntime):
    """torch's runtime, without its search for shapes."""

    connected = False

    def _initialize_stages(self, args: Any, kwargs: Any, target: Any = None, loss_kwargs: Any = None) -> None:
        if not self.connected:  # on NCCL each pair's communicator must come to be in an order that cannot deadlock
            self._warmup_p2p(self._stages, self._has_backward, False)
            self.connected = True


class Engine:
    """One rank's stages under torch's runtime.

    `lists` are lowered, proved schedules. `position` is kept up to date while a step runs. `loss(output, target_entry)`
    gives a microbatch's scaled loss; a target entry is whatever `step` is given for that microbatch.
    """

    def __init__(
        self,
        modules: dict[int, nn.Module],
        lists: tuple[Schedule, Schedule],
        loss: Callable[[Any, Any], Tensor],
        group: dist.ProcessGroup | None,
        recorder: Recorder,
    ) -> None:
        """Make torch's stages and runtime; opens no connection yet. `lists` are for training and evaluation."""
        if missing := check_interface():
            raise InternalError("torch's pipeline runtime has changed: " + "; ".join(missing))
        self.rank = recorder.rank
        self.position = Position()
        self.recorder = recorder
        self.train, self.evaluate = lists
        self.loss = loss
        self.stages = [_Stage(module, s, self.train, recorder.device, group) for s, module in sorted(modules.items())]
        for stage in self.stages:
            stage.recorder = recorder
        runtime = _Runtime(self.stages, self.train.num_microbatches, loss_fn=loss, scale_grads=False)
        self.runtime: Any = runtime
        self._prepare(runtime)

    def _prepare(self, runtime: Any) -> None:
        """Hand over the lists: torch checks their counts and learns where each stage lives."""
        parse = torch_schedules._Action.from_str
        rows = {r: [parse(str(a)) for a in row] for r, row in enumerate(self.train.rows)}
        try:
            runtime._prepare_schedule_with_comms(rows, format="compute_comms")
        except AssertionError as error:
            raise ConfigError(f"torch refuses schedule {self.train.name!r}: {error}") from error
        self._rows: dict[bool, Any] = {}
        for training, schedule in ((True, self.train), (False, self.evaluate)):
            lists = {r: [parse(str(a)) for a in row] for r, row in enumerate(schedule.rows)}
            self._rows[training] = lists

    def set_shapes(self, boundaries: Sequence[Boundaries]) -> None:
        """Say what the microbatches of the coming steps look like."""
        for stage in self.stages:
            stage.set_shapes(boundaries)

    def step(self, inputs: list[Any], targets: list[Any] | None, *, train: bool, keep_outputs: bool) -> list[Tensor]:
        """Run one step; the scaled losses of the microbatches on the rank of the last stage, else nothing."""
        runtime = self.runtime
        runtime._has_backward = train
        runtime._loss_fn = self.loss if targets is not None else None
        row = (self.train if train else self.evaluate).rows[self.rank]
        watched = WatchedRow(self._rows[train][self.rank], self.position, row)
        runtime.pipeline_order_with_comms = {**self._rows[train], self.rank: watched}
        for pending in (runtime.fwd_recv_ops, runtime.bwd_recv_ops):
            pending.clear()
        for stage in self.stages:
            stage.has_backward = train
            stage.clear_runtime_states()
            stage.kept.clear()
        self.recorder.begin_step()
        losses: list[Tensor] = []
        into = losses if targets is not None else None
        try:
            runtime._step_microbatches(inputs, None, targets, into, keep_outputs)
        finally:
            runtime._internal_losses.clear()
        self.position.step += 1
        return losses

    def outputs(self) -> list[Any]:
        """What the last stage returned for each microbatch, in their order; nothing on other ranks."""
        kept = self.stages[-1].kept
        return [kept[m] for m in sorted(kept)]


def abort_process_groups() -> None:
    """Make every blocked communication of this process return with an error.

    NCCL has an abort. Gloo's leaves calls blocked, but a call of its that times out closes all its connections, so a
    receive that nobody will answer, with a millisecond to wait, sets the blocked ones free.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if size < 2 or rank < 0:
            continue
        try:
            if dist.get_backend(group) == "gloo":
                group.recv([torch.empty(1)], (rank + 1) % size, 987_654).wait(timedelta(milliseconds=1))
            else:
                group.abort()
        except Exception:  # noqa: BLE001 - the error is the purpose, and an aborted group raises another
            continue


def any_wrapped_for_sharding(module: nn.Module) -> bool:
    """Whether FSDP2 or `replicate` has taken hold of a module."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(m, FSDPModule) for m in module.modules())


def _meta(spec: TensorSpec, requires_grad: bool | None = None) -> Any:
    """torch's description of a contiguous tensor."""
    shape = torch.Size(spec.shape)
    wants = spec.requires_grad if requires_grad is None else requires_grad
    stride = torch.empty(shape, device="meta").stride()
    return torch_stage._TensorMeta(shape=shape, stride=stride, dtype=getattr(torch, spec.dtype), requires_grad=wants)

"""What we rely on in torch's private pipeline runtime. A failure here says what changed in torch, and where we use it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import schedules as torch_schedules

from headrace.errors import ConfigError
from headrace.parallel import Action, Kind, Schedule, build_schedule, schedules
from headrace.parallel.action import overlap
from headrace.parallel.lower import lower
from headrace.parallel.torch_distributed import DistributedPipeline, RunOptions, proved
from headrace.parallel.torch_memory import LiveBytes
from headrace.parallel.torch_pipeline import Pipeline
from headrace.parallel.torch_record import Position, WatchedRow
from headrace.parallel.torch_runtime import check_interface
from headrace.parallel.torch_stage import PipelineStage


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_private_name_is_there() -> None:
    assert check_interface() == []


def test_a_missing_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_schedules._PipelineSchedule, "_warmup_p2p")
    (line,) = check_interface()
    assert "_PipelineScheduleRuntime._warmup_p2p (connects each pair of ranks in order) is gone" in line


@pytest.mark.parametrize("kind", [k for k in Kind if k is not Kind.OVERLAP_F_B])
def test_actions_have_one_spelling(kind: Kind) -> None:
    """Our text of an action is torch's text of the same action."""
    mb = None if kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD) else 7
    theirs = torch_schedules._Action.from_str(str(Action(3, kind, mb)))
    assert (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index) == (3, kind.value, mb)
    assert Action.parse(str(theirs)) == Action(3, kind, mb)


def test_compound_actions_have_one_spelling() -> None:
    pair = overlap(Action(0, Kind.F, 3), Action(7, Kind.B, 1))
    theirs = torch_schedules._Action.from_str(str(pair))
    assert [str(a) for a in theirs.sub_actions or ()] == ["0F3", "7B1"]
    assert Action.parse(str(theirs)) == pair


@pytest.mark.parametrize("name", schedules())
@pytest.mark.parametrize(("ranks", "num_microbatches"), [(2, 4), (3, 7), (4, 8), (4, 2)])
def test_we_lower_as_torch_does(name: str, ranks: int, num_microbatches: int) -> None:
    """Sends, receives and sharding stand where torch's own lowering would put them."""
    schedule = build_schedule(name, ranks, num_microbatches)
    runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime.pp_group_size, runtime._num_stages = ranks, schedule.num_stages
    runtime._n_microbatches, runtime._stages, runtime._defer_pp_recv = num_microbatches, [], False
    parse = torch_schedules._Action.from_str
    runtime._prepare_schedule_with_comms({r: [parse(str(a)) for a in row] for r, row in enumerate(schedule.rows)})
    theirs = {r: [str(a) for a in row] for r, row in runtime.pipeline_order_with_comms.items()}
    assert theirs == {r: [str(a) for a in row] for r, row in enumerate(lower(schedule).rows)}


def test_the_runtime_walks_the_list_it_is_given() -> None:
    """`enumerate(self.pipeline_order_with_comms[self.rank])`: our list tells the position as it is walked."""
    source = inspect.getsource(torch_schedules._PipelineScheduleRuntime._step_microbatches)
    assert "in enumerate(self.pipeline_order_with_comms[self.rank])" in source
    rows = (Action(0, Kind.F, 0), Action(0, Kind.B, 0))
    position = Position()
    seen = [str(position) for _ in WatchedRow(["x", "y"], position, rows)]
    assert seen == ["step 0, 0F0 (action 1 of 2)", "step 0, 0B0 (action 2 of 2)"]
    assert str(position) == "before its first step"


def test_losses_are_filed_by_turn() -> None:
    """Why a last stage must go through its microbatches in order."""
    assert "self._internal_losses[mb_index]" in inspect.getsource(torch_schedules._PipelineSchedule._maybe_get_loss)


def test_weight_gradients_go_through_the_builder(alone: None) -> None:
    """`backward_one_chunk(full_backward=False)` asks the builder once; `backward_weight_one_chunk` runs what it gave."""
    log: list[str] = []

    def builder() -> object:
        log.append("built")
        return lambda: log.append("ran")

    stage = TorchStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"), dw_builder=builder)  # type: ignore[arg-type]
    stage.has_backward, stage.chunks = True, 1
    stage._stage_meta.inputs = ()
    out = stage.forward_one_chunk(0, (torch.ones(1, 2),))
    stage.backward_one_chunk(0, loss=out.sum(), full_backward=False)
    assert log == ["built"]
    stage.backward_weight_one_chunk(0)
    assert log == ["built", "ran"]


def test_one_rank_of_several_stages(alone: None) -> None:
    """The engine on one process: no communication, and buffers that are gone after their use."""
    stages = [PipelineStage(nn.Linear(2, 2).double()) for _ in range(2)]
    schedule = "0F0,1F0,0F1,1F1,1I0,0I0,1W0,0W0,1B1,0B1\n"
    pipeline = DistributedPipeline(stages, 2, Schedule.from_csv(schedule), nn.functional.mse_loss)
    batch = torch.randn(4, 2, dtype=torch.float64)
    loss = nn.functional.mse_loss(stages[1](stages[0](batch)), torch.zeros_like(batch)).detach()
    result = pipeline.step(batch, torch.zeros_like(batch))
    assert result.loss is not None
    assert float((result.loss - loss).abs()) < 1e-12
    infos = [
        i for s in pipeline.engine.stages for r in (s.args_recv_info, s.grad_recv_info) for m in r.values() for i in m
    ]
    assert infos
    assert all(info.buffer is None for info in infos)
    timeline = pipeline.timeline()
    assert [str(s.action) for s in timeline.spans] == schedule.strip().split(",")
    pipeline.close()


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("rows", ["0F0,1F0,1B0,0B0", "0F0,1F0,1I0,0I0,1W0,0W0"])
def test_frozen_stages(alone: None, frozen: int, rows: str) -> None:
    """A stage without a trainable parameter: the first sends no gradient on, a later one lets gradients through."""
    stages = [PipelineStage(nn.Linear(2, 2)) for _ in range(2)]
    stages[frozen].requires_grad_(False)
    trained = stages[1 - frozen]
    batch = torch.randn(3, 2)
    loss = nn.functional.mse_loss(stages[1](stages[0](batch)), torch.zeros(3, 2))
    wanted = torch.autograd.grad(loss, list(trained.parameters()))
    for pipeline in (
        DistributedPipeline(stages, 1, Schedule.from_csv(rows), nn.functional.mse_loss),
        Pipeline(stages, 1, Schedule.from_csv(rows), nn.functional.mse_loss),
    ):
        trained.zero_grad()
        pipeline.step(batch, torch.zeros(3, 2))
        assert all(torch.allclose(p.grad, g) for p, g in zip(trained.parameters(), wanted, strict=True))  # type: ignore[arg-type]
        assert all(p.grad is None for p in stages[frozen].parameters())


def test_compiled_stages_do_not_split(alone: None) -> None:
    stages = [PipelineStage(torch.compile(nn.Linear(2, 2), backend="eager"))]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"torch.compile cannot put off"):
        DistributedPipeline(stages, 1, Schedule.from_csv("0F0,0I0,0W0"), nn.functional.mse_loss)
    DistributedPipeline(stages, 1, Schedule.from_csv("0F0,0B0"), nn.functional.mse_loss).close()


def test_local_stages_only(alone: None) -> None:
    """A mapping names the stages; ties between local stages are found under their numbers."""
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    pipeline = DistributedPipeline({0: first, 1: last}, 1, Schedule.from_csv("0F0,1F0,1B0,0B0"), nn.functional.mse_loss)
    pipeline.step(torch.ones(1, 2), torch.zeros(1, 2))
    assert len(list(pipeline.parameters())) == 3
    wanted = torch.autograd.grad(nn.functional.mse_loss(last(first(torch.ones(1, 2))), torch.zeros(1, 2)), first.weight)
    assert torch.allclose(first.weight.grad, wanted[0])  # type: ignore[arg-type]


def test_proved_gives_both_lists() -> None:
    train, evaluate = proved(build_schedule("zbv", 2, 4))
    assert train.is_lowered
    kinds = {a.kind for row in evaluate.rows for a in row}
    assert not kinds & {Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B}


def test_the_evaluation_loss_of_a_diverged_model_is_not_none(alone: None) -> None:
    """NaN is a loss; None says that there was no target."""
    stages = [PipelineStage(nn.Linear(2, 2))]
    pipeline = DistributedPipeline(stages, 1, Schedule.from_csv("0F0,0B0"), nn.functional.mse_loss)
    batch = torch.full((1, 2), float("nan"))
    loss = pipeline.eval(batch, torch.zeros(1, 2)).loss
    assert loss is not None
    assert loss.isnan()
    assert pipeline.eval(batch).loss is None


class Scale(nn.Module):
    """A stage whose activation is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_memory_does_not_grow_with_the_microbatches(alone: None) -> None:
    """One microbatch after the other on one rank: the losses that torch keeps must not keep the inputs of their stage."""
    peaks: list[float] = []
    for count in (2, 16):
        text = ",".join(f"0F{m},1F{m},1B{m},0B{m}" for m in range(count))
        options = RunOptions(keep_outputs=False)
        stages = [PipelineStage(Scale()) for _ in range(2)]
        pipeline = DistributedPipeline(stages, count, Schedule.from_csv(text), nn.functional.mse_loss, options)
        batch, target = torch.ones(count, 4096), torch.zeros(count, 4096)
        pipeline.step(batch, target)
        with LiveBytes() as live:
            pipeline.step(batch, target)
        peaks.append(live.peak / (4096 * 4))
    assert peaks[1] < peaks[0] + 1

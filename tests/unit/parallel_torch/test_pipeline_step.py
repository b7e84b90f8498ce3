"""The single-process pipeline: clocks, memory, outputs, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_models import blocks, cut, language_model, relative_error, token_loss
from torch import Tensor, nn

from headrace.errors import ConfigError, OperatorError, ScheduleError
from headrace.parallel import Schedule, bubble_fraction, build_schedule, schedules
from headrace.parallel.costs import StageCosts
from headrace.parallel.memory import peak_in_flight
from headrace.parallel.simulate import simulate
from headrace.parallel.torch_pipeline import Pipeline
from headrace.parallel.torch_stage import PipelineStage, find_ties, split_model

MSE = nn.functional.mse_loss


def linears(count: int) -> list[PipelineStage]:
    torch.manual_seed(0)
    return [PipelineStage(nn.Linear(2, 2)) for _ in range(count)]


@given(
    name=st.sampled_from(schedules()),
    num_microbatches=st.integers(1, 9),
    times=st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=4, max_size=4),
    latency=st.integers(0, 4),
    boundary=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_clocks_agree_with_the_simulator(
    name: str, num_microbatches: int, times: list[tuple[int, int, int]], latency: int, boundary: int
) -> None:
    """Running the tensors and simulating the times give the same timeline, to the last span."""
    f, i, w = zip(*times, strict=True)
    costs = StageCosts(f, i, w, (latency,) * 3, (1.0,) * 3, (boundary,) * 3)
    pipeline = Pipeline(linears(4), num_microbatches, name, MSE, costs=costs)
    result = pipeline.step(torch.ones(num_microbatches, 2), torch.ones(num_microbatches, 2))
    predicted = simulate(pipeline.schedule, costs).timeline
    if (
        name == "dualpipe-v"
    ):  # the simulator starts an overlapped pair when both inputs are there; in turn, one may start first
        assert result.timeline.makespan <= predicted.makespan
        return
    assert {s.action: s.end for s in result.timeline.spans} == {s.action: s.end for s in predicted.spans}
    assert result.timeline.makespan == predicted.makespan


@pytest.mark.parametrize("name", schedules())
def test_activations_in_flight(name: str) -> None:
    pipeline = Pipeline(linears(8), 8, name, MSE, num_ranks=4 if build_schedule(name, 4, 8).num_stages == 8 else None)
    result = pipeline.step(torch.ones(8, 2), torch.ones(8, 2))
    assert result.peak_in_flight == peak_in_flight(pipeline.schedule, "I").stages


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(4, 8), (4, 64), (2, 1), (3, 2)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_is_the_closed_form(name: str, num_stages: int, num_microbatches: int) -> None:
    costs = StageCosts.uniform(num_stages)
    pipeline = Pipeline(linears(num_stages), num_microbatches, name, MSE, costs=costs)
    result = pipeline.step(torch.ones(num_microbatches, 2), torch.ones(num_microbatches, 2))
    assert result.timeline.bubble == pytest.approx(bubble_fraction(num_stages, num_microbatches), abs=1e-12)
    held = [num_microbatches if name == "gpipe" else min(num_microbatches, num_stages - s) for s in range(num_stages)]
    assert list(result.peak_in_flight) == held


def test_measured_clock_counts_the_work() -> None:
    """Without costs the clock runs on measured time: every rank is busy for a while, and none runs backwards."""
    result = Pipeline(linears(3), 4, "1f1b", MSE).step(torch.ones(4, 2), torch.ones(4, 2))
    assert all(busy > 0 for busy in result.timeline.busy())
    for rank in range(3):
        spans = result.timeline.of_rank(rank)
        assert all(a.end <= b.start for a, b in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize("name", schedules())
def test_outputs_and_eval(name: str) -> None:
    model = blocks(8)
    pipeline = Pipeline(cut(model, [2, 2, 2, 2]), 4, name, MSE)
    batch, target = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    stepped, evaluated = pipeline.step(batch, target), pipeline.eval(batch, target)
    assert relative_error(stepped.outputs, model(batch)) < 1e-12
    assert torch.equal(stepped.outputs, evaluated.outputs)
    assert stepped.loss is not None
    assert evaluated.loss is not None
    assert torch.equal(stepped.loss, evaluated.loss)
    assert not stepped.outputs.requires_grad
    assert pipeline.eval(batch).loss is None
    assert evaluated.peak_in_flight == (0, 0, 0, 0)


def test_last_stage_may_be_the_loss() -> None:
    model = blocks(2)
    stages = [PipelineStage(model[0]), PipelineStage(nn.Sequential(model[1], Mean()))]
    result = Pipeline(stages, 3, "1f1b").step(torch.ones(6, 8, dtype=torch.float64))
    assert result.loss is not None
    assert relative_error(result.loss, model(torch.ones(6, 8, dtype=torch.float64)).mean()) < 1e-12


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Split(nn.Module):
    """Gives the activation and a tensor that a later stage wants."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.inner(x), 2 * x, torch.arange(len(x))


class Join(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, skip: Tensor, ids: Tensor) -> Tensor:
        return self.inner(x + skip * (1 + ids[:, None]))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", [False, True])
def test_skip_connections_are_carried(name: str, recompute: bool) -> None:
    """A tensor from stage 0 reaches stage 3 through 1 and 2, with its gradient, beside one of integers."""
    model = blocks(5)
    stages = [
        PipelineStage(nn.Sequential(model[0], Split(model[1]))),
        PipelineStage(model[2], carry=2, recompute=recompute),
        PipelineStage(model[3], carry=2, recompute=recompute),
        PipelineStage(Join(model[4])),
    ]

    def whole(x: Tensor) -> Tensor:
        first = model[0](x)
        return model[4](model[3](model[2](model[1](first))) + 2 * first)

    batch, target = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    named = dict(model.named_parameters())
    wanted = torch.autograd.grad(MSE(whole(batch), target), list(named.values()))
    Pipeline(stages, 4, name, MSE).step(batch, target)  # one row a microbatch, so that ids are 0
    for parameter, grad in zip(named.values(), wanted, strict=True):
        assert parameter.grad is not None
        assert relative_error(parameter.grad, grad) < 1e-12


def test_microbatches_of_unequal_shape() -> None:
    """Microbatches may differ in rows and in length; the mean is over all tokens."""
    model = language_model(2, tied=False)
    stages = cut(model, [2, 2])
    sizes = [(2, 5), (1, 3), (3, 7)]
    tokens = [torch.randint(0, 17, size) for size in sizes]
    labels = [torch.randint(0, 17, size) for size in sizes]
    wanted = sum(token_loss(model(t), y) * y.numel() / 34 for t, y in zip(tokens, labels, strict=True))
    grads = torch.autograd.grad(wanted, list(model.parameters()))  # type: ignore[arg-type]
    result = Pipeline(stages, 3, "1f1b", token_loss).step_microbatches(tokens, labels)
    assert isinstance(result.outputs, tuple)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is not None
        assert relative_error(parameter.grad, grad) < 1e-12


def test_sum_reduction_for_losses_normalised_by_tokens() -> None:
    model = blocks(2)
    batch, target = torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)

    def by_count(out: Tensor, wanted: Tensor) -> Tensor:
        return ((out - wanted) ** 2).sum() / 48

    result = Pipeline(cut(model, [1, 1]), 3, "1f1b", by_count, reduction="sum").step(batch, target)
    assert result.loss is not None
    assert relative_error(result.loss, MSE(model(batch), target)) < 1e-12


def test_a_stage_may_be_a_subclass() -> None:
    class Doubling(PipelineStage):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, activation: Tensor) -> Tensor:
            return 2 * self.linear(activation)

    stages = [Doubling(), Doubling()]
    batch = torch.ones(4, 2)
    result = Pipeline(stages, 2, "1f1b", MSE).step(batch, batch)
    assert torch.equal(result.outputs, stages[1](stages[0](batch)).detach())
    assert [name for name, _ in stages[0].named_parameters()] == ["linear.weight", "linear.bias"]
    with pytest.raises(ConfigError, match="subclass does both"):
        PipelineStage.__init__(stages[0], carry=1)


def test_errors_of_a_stage_name_it() -> None:
    stages = [PipelineStage(nn.Linear(2, 3)), PipelineStage(nn.Linear(2, 2))]
    with pytest.raises(
        OperatorError, match=r"stage 1, microbatch 0: forward failed on float32\[2, 3\].*let stage 0 hand on"
    ):
        Pipeline(stages, 2, "1f1b", MSE).step(torch.ones(4, 2), torch.ones(4, 2))


def test_an_incomplete_schedule_does_not_run() -> None:
    with pytest.raises(ScheduleError, match="stage 1"):
        Pipeline(linears(2), 2, Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n", num_microbatches=2), MSE)


def test_several_inputs_per_microbatch() -> None:
    class Add(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    first = PipelineStage(Add())
    pipeline = Pipeline([first, *linears(1)], 2, "gpipe", MSE)
    result = pipeline.step((torch.ones(4, 2), torch.ones(4, 2)), torch.zeros(4, 2))
    assert result.outputs.shape == (4, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pipeline([], 2), "no stages"),
        (lambda: Pipeline(linears(2), 0), "num_microbatches is 0"),
        (lambda: Pipeline(linears(3), 2, "zbv"), "multiple of 2"),
        (lambda: Pipeline(linears(2), 2, "1f1c"), "1f1b"),
        (lambda: Pipeline(linears(2), 2, build_schedule("1f1b", 3, 2)), "made for 3 stages"),
        (lambda: Pipeline(linears(3), 2, build_schedule("1f1b", 3, 4)), "made for 4 microbatches"),
        (lambda: Pipeline(linears(2), 2, costs=StageCosts.uniform(3)), "costs describe 3 stages"),
        (lambda: Pipeline(linears(2), 2, reduction="max"), "reduction"),  # type: ignore[arg-type]
        (lambda: PipelineStage(), "write forward"),
        (lambda: PipelineStage(nn.Linear(2, 2), carry=-1), "carry"),
        (lambda: PipelineStage(nn.Linear(2, 2), carry=1)(torch.ones(1, 2)), "carries 1 inputs"),
        (lambda: split_model(nn.Linear(2, 2), [1]), "not a list of layers"),  # type: ignore[arg-type]
        (lambda: split_model([nn.Linear(2, 2)] * 3, [1, 1]), "adds up to 2"),
        (lambda: split_model([nn.Linear(2, 2)] * 3, [3, 0]), "stage 1 0 layers"),
        (lambda: split_model([nn.Linear(2, 2)] * 3, num_stages=4), "3 layers cannot fill 4 stages"),
        (lambda: split_model([nn.Linear(2, 2)], [1], num_stages=1), "one of the two"),
        (lambda: split_model([("a", nn.Linear(2, 2))] * 2, [1, 1]), "called 'a'"),
    ],
)
def test_bad_construction_is_refused(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("batch", "target", "words"),
    [
        (torch.ones(5, 2), torch.ones(5, 2), "5 rows, which do not divide into 2 microbatches"),
        (torch.ones(4, 2), torch.ones(3, 2), "target has 3 rows"),
        (torch.ones(0, 2), torch.ones(0, 2), "0 rows"),
        (torch.tensor(1.0), None, "scalar"),
        ((torch.ones(4, 2), torch.ones(2, 2)), None, r"\[2, 4\] rows"),
        ("text", None, "holds a str"),
        ((), None, "empty"),
    ],
)
def test_bad_batches_are_refused(batch: object, target: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Pipeline(linears(2), 2, "gpipe", MSE).step(batch, target)  # type: ignore[arg-type]


def test_bad_stages_are_named() -> None:
    class Text(nn.Module):
        def forward(self, x: Tensor) -> str:
            return "no tensor"

    class Detach(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach()

    with pytest.raises(ConfigError, match="stage 1, microbatch 0: output 0 is a str"):
        Pipeline([*linears(1), PipelineStage(Text())], 2, "gpipe", MSE).step(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(ConfigError, match="stage 1, microbatch 0: there is no loss"):
        Pipeline(linears(2), 2, "gpipe").step(torch.ones(2, 2))
    with pytest.raises(ConfigError, match="requires_grad is False"):
        Pipeline([*linears(1), PipelineStage(Detach())], 2, "gpipe", MSE).step(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(ConfigError, match="got 3 microbatches of inputs"):
        Pipeline(linears(2), 2, "gpipe", MSE).step_microbatches([torch.ones(1, 2)] * 3)


def test_layers_keep_their_names() -> None:
    """A stage holds its layers under the names of the whole model, dotted ones included."""
    stages = split_model(
        [("embed", nn.Linear(2, 2)), ("blocks.0", nn.Linear(2, 2)), ("blocks.1", nn.Linear(2, 2))], [1, 2]
    )
    assert [n for n, _ in stages[1].named_parameters()] == [
        f"module.blocks.{i}.{p}" for i in (0, 1) for p in ("weight", "bias")
    ]


def test_ties_are_found() -> None:
    (tie,) = find_ties(cut(language_model(2, tied=True), [1, 2, 1]))
    assert tie.places == ((0, "module.0.weight"), (2, "module.3.weight"))
    assert tie.stages == (0, 2)
    assert find_ties(cut(language_model(2, tied=False), [1, 2, 1])) == ()


def test_schedule_from_a_file_with_uneven_stages_per_rank() -> None:
    """Three stages on one rank and one on the other, as rows of text."""
    text = "0F0,1F0,2F0,0F1,1F1,2F1,2B0,1B0,0B0,2B1,1B1,0B1\n3F0,3B0,3F1,3B1\n"
    model = blocks(4)
    pipeline = Pipeline(cut(model, [1, 1, 1, 1]), 2, Schedule.from_csv(text), MSE)
    result = pipeline.step(torch.ones(2, 8, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.float64))
    assert result.timeline.num_ranks == 2
    assert all(p.grad is not None for p in model.parameters())

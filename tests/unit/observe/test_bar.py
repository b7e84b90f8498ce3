"""The progress bar: on a terminal it shows rates and the bottleneck, elsewhere it is quiet."""

import io

from rich.console import Console

from headrace import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from headrace.observe.bar import ProgressBar
from headrace.observe.summary import OperatorSummary, PipelineSummary


def snapshot(rows: int, tokens: int) -> PipelineSummary:
    operators = (OperatorSummary("fetch", rows, rows, 1, 0.5), OperatorSummary("tokenize", rows, rows, 1, 2.5))
    return PipelineSummary(operators, (), {}, {}, 1, rows, tokens, 0, 0, 16, 3.0, 0.5)


def test_it_shows_rates_and_the_bottleneck() -> None:
    out = io.StringIO()
    bar = ProgressBar(lambda: snapshot(3000, 9_000_000), console=Console(file=out, force_terminal=True, width=150))
    bar.close()
    text = out.getvalue()
    assert "records/s" in text and "M tokens/s" in text and "busiest operator is tokenize" in text


def test_it_says_when_the_loop_is_the_slow_one() -> None:
    summary = PipelineSummary((OperatorSummary("fetch", 1, 1, 1, 0.5),), (), {}, {}, 1, 1, 0, 0, 0, 16, 0.1, 4.0)
    assert "the training loop is slower" in summary.bottleneck()


def test_it_is_quiet_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    bar = ProgressBar(lambda: snapshot(1, 0), console=Console(file=out))
    bar.close()
    assert out.getvalue() == ""


def test_a_run_with_progress_delivers_the_same(capsys: object) -> None:
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"x": i} for i in range(20)])})
    work = StaticMixtureWorkSource(datasets=[data], mixture={"toy": 1.0})
    assert [len(b) for b in Pipeline(work).batch(5).options(progress=True)] == [5] * 4

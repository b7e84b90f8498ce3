"""The `headrace pp` command, through the door that the shell uses; and the package without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cyclopts", reason="the command line is an extra")

from headrace.cli import main
from headrace.parallel import LayerCost, build_schedule, lower, save_layers


def test_demo_prints_trace_gantt_and_bubble(capsys):
    assert main(["pp", "demo"]) == 0
    out = capsys.readouterr().out
    assert "microbatch  0: F0@0-1 F1@1-2 F2@2-3 F3@3-4" in out
    assert "rank 3   .........F0|" in out
    assert out.count("bubble measured        0.2727") == 2
    assert out.count("bubble (N-1)/(M+N-1)   0.2727") == 2
    assert "activations held       8, 8, 8, 8 microbatches" in out
    assert "activations held       4, 3, 2, 1 microbatches" in out


def test_demo_of_another_schedule_says_what_it_compares_with(capsys):
    assert main(["pp", "demo", "--stages", "3", "--microbatches", "6", "--schedule", "zbv"]) == 0
    assert "to compare" in capsys.readouterr().out


def test_csv_and_prove(capsys, tmp_path):
    assert main(["pp", "csv", "zbv", "--ranks", "2", "--microbatches", "3"]) == 0
    text = capsys.readouterr().out
    assert text == build_schedule("zbv", 2, 3).to_csv()
    file = tmp_path / "mine.csv"
    file.write_text(text)
    assert main(["pp", "prove", str(file)]) == 0
    assert "no deadlock" in capsys.readouterr().out
    assert main(["pp", "prove", str(file), "--cap", "1"]) == 1
    assert "its cap is 1" in capsys.readouterr().err


def test_prove_names_what_is_missing(capsys, tmp_path):
    file = tmp_path / "broken.csv"
    file.write_text(build_schedule("1f1b", 2, 4).to_csv().replace(",1B3", ""))
    assert main(["pp", "prove", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("headrace: schedule 'broken' is incomplete: stage 1 on rank 1")
    assert "add 1B3" in error


def test_prove_shows_a_deadlock(capsys, tmp_path):
    file = tmp_path / "deferred.csv"
    lower(build_schedule("interleaved-1f1b", 2, 2), order="deferred").save(file)
    assert main(["pp", "prove", str(file)]) == 1
    assert "deadlocks on a per-peer transport" in capsys.readouterr().err


def test_gantt_writes_what_is_asked(capsys, tmp_path):
    paths = {kind: tmp_path / f"out.{kind}" for kind in ("html", "svg", "trace")}
    flags = [word for kind, path in paths.items() for word in (f"--{kind}", str(path))]
    assert main(["pp", "gantt", "-s", "zbv", "-s", "1f1b", *flags]) == 0
    assert paths["html"].read_text().startswith("<!doctype html>")
    assert paths["svg"].read_text().startswith("<svg")
    assert json.loads(paths["trace"].read_text())["traceEvents"]
    capsys.readouterr()
    assert main(["pp", "gantt", "-s", "1f1b", "--times", "1", "1", "0.5", "--latency", "0.5"]) == 0
    assert "rank 0" in capsys.readouterr().out


def test_gantt_of_a_file(capsys, tmp_path):
    file = tmp_path / "mine.csv"
    build_schedule("zb-h1", 3, 4).save(file)
    assert main(["pp", "gantt", "--csv", str(file)]) == 0
    assert capsys.readouterr().out.startswith("mine (predicted)")


def test_plan(capsys, tmp_path):
    file = tmp_path / "layers.json"
    save_layers([LayerCost(f"l{i}", 1, 1, 1, 2**20, 2**10, 2**20) for i in range(8)], file)
    page = tmp_path / "plan.html"
    words = ["pp", "plan", str(file), "--ranks", "2", "--microbatches", "4", "--memory", "64MiB", "--html", str(page)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "chosen" in out
    assert "num_layers_per_stage=[" in out
    assert page.exists()
    assert main([*words[:-4], "--memory", "1KiB"]) == 1
    assert "no schedule fits in 1 KiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pp", "gantt", "-s", "zbw"], "did you mean 'zbv'"),
        (["pp", "demo", "--microbatches", "0"], "num_microbatches is 0"),
        (["pp", "prove", "/no/such/file.csv"], "/no/such/file.csv"),
    ],
)
def test_errors_are_one_line_and_a_status(capsys, words, message):
    assert main(words) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_list(capsys):
    assert main(["pp", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 12


@pytest.mark.skipif(os.name != "posix", reason="pipes of the shell")
@pytest.mark.parametrize("arguments", ["pp list", "pp demo --stages 16 --microbatches 256", "pp --help"])
@pytest.mark.parametrize("reader", ["head -n 1", "true"])
def test_a_reader_that_has_seen_enough_is_no_error(arguments, reader):
    """`| head -1`: nothing on standard error, neither from the command nor at the interpreter's end."""
    source = Path(__file__).parents[3] / "src"
    # The command starts when its reader is gone already, or writes more than a pipe holds.
    line = f'set -o pipefail; (sleep 0.2; exec "{sys.executable}" -m headrace {arguments}) | {reader}'
    done = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    if reader == "true" and arguments != "pp --help":  # rich, which writes the help, ends the process itself
        assert done.returncode == 141
    if reader != "true":
        assert len(done.stdout.splitlines()) == 1


def test_everything_but_running_works_without_torch(tmp_path):
    """A process in which torch cannot be imported builds, proves, simulates, plans and draws."""
    program = """
import sys
sys.modules["torch"] = None
from headrace.parallel import *
from headrace.parallel import LayerCost, plan_layers, prove, to_html
run = simulate(build_schedule("zbv", 2, 4), StageCosts.uniform(4))
assert prove(run.schedule) and to_html(run) and plan_layers([LayerCost("a", 1, 1, 1)] * 4, 2, 4).explain()
heavy = [m for m in ("numpy", "pyarrow", "rich", "cyclopts", "tokenizers") if m in sys.modules]
assert not heavy, heavy
try:
    from headrace.parallel import Pipeline
except ModuleNotFoundError as error:
    assert "headrace[torch]" in str(error), error
else:
    raise AssertionError("no error without torch")
"""
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr

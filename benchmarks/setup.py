"""python -m benchmarks.setup: environments of the peers, tokenizer, corpora and their formats, in the scratch folder.

Each part is skipped if it exists, so the command can be run again after an interruption; delete a part's folder to remake it.
Peers never enter the project's own environment. torch is pinned to the project's release; a plain `torch` would bring a CUDA
build of several gigabytes.

    python -m benchmarks.setup              everything: some 8 GB and ten minutes
    python -m benchmarks.setup data         tokenizer, corpora and formats only (needs the environments for the peers' formats)
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv

from . import corpora, make_tokenizer
from .paths import DATA, ENVS, PACKED, REPO, env_python

TORCH = "torch==2.13.0"
ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "peers": (
        "zephon==0.2.0",
        "transformers",
        "tokenizers",
        "tiktoken",
        "gigatoken==0.10.0",
        "pyarrow",
        "orjson",
        "zstandard",
        "psutil",
        "grain",
        "array-record",
        "litdata",
        "datasets",
        "torchdata",
        "webdataset",
        "spdl",
    ),
    "streaming": ("mosaicml-streaming", "tokenizers", "tiktoken", "orjson", "psutil"),
}
"""mosaicml-streaming pins older tokenizers, so it lives alone."""
UNWANTED = {"peers": ("torchvision",)}
"""Brought along, unused here, and not importable beside a CPU build of torch."""

FORMATS = {
    "packed": ("peers", PACKED / "npy"),
    "array_record": ("peers", PACKED / "array_record"),
    "wds": ("peers", PACKED / "wds"),
    "arrow": ("peers", PACKED / "arrow"),
    "litdata": ("peers", DATA / "code" / "litdata"),
    "mds": ("streaming", DATA / "code" / "mds"),
}


def make_environment(name: str) -> None:
    python, done = env_python(name), ENVS / name / ".ready"
    if done.exists():
        return
    venv.create(ENVS / name, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip"]
    subprocess.run([*pip, "install", "-q", "--upgrade", "pip"], check=True)
    subprocess.run([*pip, "install", "-q", TORCH, "numpy"], check=True)
    subprocess.run([*pip, "install", "-q", TORCH, *ENVIRONMENTS[name]], check=True)
    if unwanted := UNWANTED.get(name):
        subprocess.run([*pip, "uninstall", "-q", "-y", *unwanted], check=True)
    done.touch()


def make_format(name: str) -> None:
    env, result = FORMATS[name]
    if not result.exists():
        command = [str(env_python(env)), "-W", "ignore", "-m", "benchmarks.formats", name]
        subprocess.run(command, check=True, cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)})


def is_ready() -> bool:
    """Every environment and every format is there."""
    environments = all((ENVS / name / ".ready").exists() for name in ENVIRONMENTS)
    return environments and all(result.exists() for _, result in FORMATS.values())


def prepare(environments: bool = True) -> None:
    """Make what is missing."""
    if environments:
        for name in ENVIRONMENTS:
            print(f"environment {name}", flush=True)
            make_environment(name)
    make_tokenizer.main()
    corpora.main([])
    for name in FORMATS:
        print(f"format {name}", flush=True)
        make_format(name)


if __name__ == "__main__":
    prepare(environments="data" not in sys.argv[1:])

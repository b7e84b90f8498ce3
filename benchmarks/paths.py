"""Where everything that the benchmark makes or reads lies: one scratch folder outside version control.

The folder is `$HEADRACE_BENCH`, else `.bench/` in the repository. Nothing else in this package knows a path.

    envs/NAME/            one virtual environment per family of peers
    tokenizer/            GPT-2 as tokenizer.json, and the same ranks for tiktoken
    data/{code,web}/FMT/  the two corpora, 16 shards a format
    data/packed/FMT/      40,000 rows of 2048 token ids, 16 shards a format
    results/              one JSON object a line and run
"""

from __future__ import annotations

import os
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
ROOT = Path(os.environ.get("HEADRACE_BENCH") or REPO / ".bench").resolve()
ENVS = ROOT / "envs"
DATA = ROOT / "data"
PACKED = DATA / "packed"
CACHE = ROOT / "cache"
RESULTS = ROOT / "results"
TOKENIZER_DIR = ROOT / "tokenizer"
TOKENIZER_JSON = TOKENIZER_DIR / "tokenizer.json"
TIKTOKEN_RANKS = TOKENIZER_DIR / "gpt2.tiktoken"

NUM_SHARDS = 16
SEQ = 2048
BATCH = 8
TEXT_BATCH = 32
EOS = 50256
MIX = {"web": 0.75, "code": 0.25}
"""Share of the documents, not of the tokens."""

SUFFIX = {
    "jsonl": "jsonl",
    "zst": "jsonl.zst",
    "parquet": "parquet",
    "array_record": "arrayrecord",
    "wds": "tar",
    "npy": "npy",
    "parquet_plain": "parquet",
}


def shards(corpus: str, fmt: str) -> list[str]:
    """The shard files of one corpus ("web", "code" or "packed") in one format, by name."""
    found = sorted(str(path) for path in (DATA / corpus / fmt).glob(f"*.{SUFFIX[fmt]}"))
    if not found:
        raise FileNotFoundError(f"no {fmt} shards under {DATA / corpus / fmt}: run `python -m benchmarks.setup` first")
    return found


def env_python(env: str) -> Path:
    """The interpreter of one of the peers' environments."""
    return ENVS / env / "bin" / "python"

"""python -m benchmarks.digest [--corpus FOLDER] [--tokenizer FILE] [--batches N] [--rounds R]

What `options(digest=True, digest_log=...)` costs on W1 (JSONL text, tokenized, packed to 2048, batches of 8, made tensors):
processor time and wall time a batch with and without it, in turn, and the time of a digest alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from headrace import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.core.digest import digest_block

from .paths import BATCH, DATA, SEQ, TOKENIZER_JSON


def build(corpus: Path, tokenizer: Path, **options: Any) -> Pipeline:
    data = Dataset.from_path("text", str(corpus))
    work = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"text": 1.0}), seed=42, stop_after_passes=None)
    chain = Pipeline(work).tokenize(
        tokenizer_id=str(tokenizer), field="text", special_tokens="eos", add_attention_mask=False
    )
    return chain.pack_flat(SEQ, algorithm="wrap", emit_positions=False).batch(BATCH).options(**options)


def measure(iterator: Any, batches: int) -> tuple[float, float]:
    """Processor and wall microseconds a batch."""
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    for batch in islice(iterator, batches):
        batch.to_training(return_labels=False)
    return (time.process_time_ns() - cpu) / batches / 1e3, (time.perf_counter_ns() - wall) / batches / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=DATA / "web" / "jsonl")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER_JSON)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "digests.jsonl"
        plain = iter(build(args.corpus, args.tokenizer))
        digested = iter(build(args.corpus, args.tokenizer, digest=True, digest_log=str(log)))
        for iterator in (plain, digested):
            measure(iterator, args.batches)
        rounds = [(measure(plain, args.batches), measure(digested, args.batches)) for _ in range(args.rounds)]
        plain.close()
        batch = next(digested)
        digested.close()
        size = log.stat().st_size / ((args.rounds + 1) * args.batches + 1)
    for name, column in (("processor", 0), ("wall", 1)):
        without, with_ = (median(r[i][column] for r in rounds) for i in (0, 1))
        ratio = median(r[1][column] / r[0][column] for r in rounds) - 1
        print(f"{name} time a batch: {without:.0f} us without, {with_:.0f} us with digests ({ratio:+.2%})")
    block = batch.block
    before = time.process_time_ns()
    for _ in range(1000):
        digest_block(block)
    print(f"a digest: {(time.process_time_ns() - before) / 1e6:.1f} us; a line of the log: {size:.0f} bytes")


if __name__ == "__main__":
    main()

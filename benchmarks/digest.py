"""python -m benchmarks.digest [--corpus FOLDER] [--tokenizer FILE] [--batches N] [--rounds R]

What `options(digest=True, digest_log=...)` costs on W1 (JSONL text, tokenized, packed to 2048, batches of 8, made tensors): each
round runs a fresh process with digests and one without, for where arrays come to lie differs from process to process by more than
digests cost. Printed are means a batch, with standard errors, of wall time, of processor time, and of that of the two threads that
digests run in (the loop's and the engine's): the others tokenize, and their noise is as large as what is looked for.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from headrace import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource

from .paths import BATCH, DATA, SEQ, TOKENIZER_JSON

ENGINE = "headrace-engine"
WARM = 300


def build(corpus: Path, tokenizer: Path, **options: Any) -> Pipeline:
    data = Dataset.from_path("text", str(corpus))
    work = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"text": 1.0}), seed=42, stop_after_passes=None)
    chain = Pipeline(work).tokenize(
        tokenizer_id=str(tokenizer), field="text", special_tokens="eos", add_attention_mask=False
    )
    return chain.pack_flat(SEQ, algorithm="wrap", emit_positions=False).batch(BATCH).options(**options)


def processor_times() -> dict[str, int]:
    """Nanoseconds so far, of all threads and of two of them."""
    found = {"all": time.process_time_ns()}
    for thread in threading.enumerate():
        if thread is threading.main_thread() or thread.name == ENGINE:
            found[thread.name] = time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident or 0))
    return found


def run_one(corpus: Path, tokenizer: Path, batches: int, digest: bool) -> dict[str, float]:
    """Microseconds a batch of one run, and the bytes of a batch in the log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "digests.jsonl"
        iterator = iter(build(corpus, tokenizer, **({"digest": True, "digest_log": str(log)} if digest else {})))
        for batch in islice(iterator, WARM):
            batch.to_training(return_labels=False)
        before, began = processor_times(), time.perf_counter_ns()
        for batch in islice(iterator, batches):
            batch.to_training(return_labels=False)
        wall, after = time.perf_counter_ns() - began, processor_times()
        iterator.close()
        size = log.stat().st_size / (WARM + batches) if digest else 0.0
    spent = {name: after[name] - before[name] for name in before}
    everything = spent.pop("all")
    times = {"wall": wall, "processor": everything, "loop and engine": sum(spent.values())}
    return {name: value / batches / 1e3 for name, value in times.items()} | {"log": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=DATA / "web" / "jsonl")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER_JSON)
    parser.add_argument("--batches", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--one", choices=("plain", "digest"), help="one run, in this process")
    args = parser.parse_args()
    if args.one:
        sys.stdout.write(json.dumps(run_one(args.corpus, args.tokenizer, args.batches, args.one == "digest")))
        return
    found: dict[str, list[dict[str, float]]] = {"plain": [], "digest": []}
    for number in range(args.rounds):
        for kind in ("plain", "digest") if number % 2 else ("digest", "plain"):
            command = [sys.executable, "-m", "benchmarks.digest", *sys.argv[1:], "--one", kind]
            found[kind].append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
    for name in ("wall", "processor", "loop and engine"):
        (a, error_a), (b, error_b) = (mean_and_error([run[name] for run in found[kind]]) for kind in found)
        more, error = b - a, (error_a**2 + error_b**2) ** 0.5
        whole = mean([run[name if name == "wall" else "processor"] for run in found["plain"]])
        print(f"{name}: {a:.0f} us a batch without, {b:.0f} with digests: {more:+.1f} +- {error:.1f} us,", end=" ")
        print(f"{more / whole:+.1%} +- {error / whole:.1%} of all its {'time' if name == 'wall' else 'processor time'}")
    print(f"log: {mean([run['log'] for run in found['digest']]):.0f} bytes a batch")


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean of the rounds and its standard error."""
    return mean(values), stdev(values) / len(values) ** 0.5


if __name__ == "__main__":
    main()

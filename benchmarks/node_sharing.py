"""python -m benchmarks.node_sharing: one engine for the ranks of a node against an engine in each of them.

Every rank tokenizes, shuffles, packs and batches Python's own library, and delivers the same number of batches. Two layouts: as
many data-parallel groups as ranks, and groups of four ranks that must see the same batch (tensor, pipeline or context parallel).
A small byte-level BPE is trained on the spot, so nothing is downloaded. All ranks stop at the first batch and at the last;
there the CPU time and the proportional memory (PSS) of every process are read. Prints one JSON object a line.

    --ranks 8 --batches 200 --shared yes|no|both
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash

from .paths import REPO

VOCABULARY = 8192
SEQ, BATCH = 2048, 8


def make_corpus(folder: Path) -> None:
    """Shards of JSONL and a tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_text("utf-8", "ignore") for path in sorted(library.glob("*.py"))]
    for shard in range(4):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[shard::4])
        (folder / f"{shard}.jsonl").write_text(lines)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def run_rank(folder: str, batches: int, options: dict[str, Any]) -> None:
    """One rank: a line after the first batch and after the last, and a wait for a line after each."""
    from headrace import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource

    shards = [str(Path(folder) / f"{shard}.jsonl") for shard in range(4)]
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_files("library", shards)],
        mixture=MixtureSpec({"library": 1.0}),
        seed=1,
        chunk_size=64,
        exhausted_policy="repeat",
    )
    pipeline = Pipeline(source).tokenize(
        tokenizer_id=str(Path(folder) / "tokenizer.json"), field="text", special_tokens="none"
    )
    pipeline.shuffle(64).pack_flat(SEQ + 1, algorithm="wrap").batch(BATCH).options(**options)
    iterator = iter(pipeline)
    digest = xxhash.xxh3_128()
    for count, batch in enumerate(islice(iterator, batches)):
        digest.update(batch.to_training(dtype=np.int64)["input_ids"].tobytes())
        if count in (0, batches - 1):
            print(digest.hexdigest(), flush=True)
            sys.stdin.readline()
    iterator.close()


def measure(folder: str, groups: Sequence[int], batches: int, *, shared: bool) -> dict[str, Any]:
    """Run the ranks; `groups` holds each rank's group."""
    degree, run_id = max(groups) + 1, uuid.uuid4().hex
    ranks: list[subprocess.Popen[str]] = []
    for rank, group in enumerate(groups):
        options: dict[str, Any] = {
            "canonical_replicas": degree,
            "dp_degree": degree,
            "dp_group_id": group,
            "run_id": run_id,
        }
        if shared:
            options |= {"share": "node", "local_rank": rank, "local_world_size": len(groups)}
        command = [sys.executable, "-m", "benchmarks.node_sharing", "--rank", json.dumps([folder, batches, options])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        ranks.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=REPO)
        )
    first = _at_a_stop(ranks)
    last = _at_a_stop(ranks)
    for rank in ranks:
        rank.wait()
    seen = {group: {d for g, d in zip(groups, last["digests"], strict=True) if g == group} for group in groups}
    return {
        "ranks": len(groups),
        "groups": degree,
        "shared": shared,
        "start_cpu_s": round(first["cpu_s"], 2),
        "run_cpu_s": round(last["cpu_s"] - first["cpu_s"], 2),
        "cpu_ms_per_step": round(1000 * (last["cpu_s"] - first["cpu_s"]) / (batches - 1), 2),
        "memory_mb": round(last["memory_mb"]),
        "processes": last["processes"],
        "peers_equal": all(len(digests) == 1 for digests in seen.values()),
        "digest": hashlib.sha256(json.dumps([sorted(s) for s in seen.values()]).encode()).hexdigest()[:12],
    }


def _at_a_stop(ranks: Sequence[subprocess.Popen[str]]) -> dict[str, Any]:
    digests = [rank.stdout.readline().strip() for rank in ranks if rank.stdout is not None]
    if not all(digests):
        raise RuntimeError("a rank ended early; see its output above")
    processes = psutil.Process().children(recursive=True)
    times = [process.cpu_times() for process in processes]
    memory = sum(process.memory_full_info().pss for process in processes)
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    cpu = sum(time.user + time.system for time in times)
    return {"digests": digests, "cpu_s": cpu, "memory_mb": memory / 1e6, "processes": len(processes)}


def main() -> None:
    """Both layouts, with and without sharing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--shared", choices=["yes", "no", "both"], default="both")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        run_rank(*json.loads(arguments.rank))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_corpus(Path(folder))
        layouts = [list(range(arguments.ranks))]
        if arguments.ranks >= 4:
            layouts.append([rank // 4 for rank in range(arguments.ranks)])
        for groups in layouts:
            for shared in {"yes": [True], "no": [False], "both": [False, True]}[arguments.shared]:
                print(json.dumps(measure(folder, groups, arguments.batches, shared=shared)), flush=True)


if __name__ == "__main__":
    main()

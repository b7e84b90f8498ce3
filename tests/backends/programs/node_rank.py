"""One local rank of a node: reads a JSON configuration, delivers batches, and prints a line for each thing that happens.

batch <n> <digest>      a delivered batch
error <type> <json of the message with its notes>
state <hex>             the checkpoint when it stopped
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

import numpy as np

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.core.block import Ragged


def tokens(columns: dict[str, Any]) -> dict[str, Any]:
    """Between 1 and 30 tokens a document."""
    return {"input_ids": Ragged.from_rows([np.arange(n % 30 + 1, dtype=np.int32) + n for n in columns["n"]])}


def build(seed: int = 5, rows: int = 3000, source: dict[str, Any] | None = None, **options: Any) -> Pipeline:
    """Shuffle, pack, batch; endless unless `source` says otherwise."""
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"n": i} for i in range(rows)])})
    settings = {"exhausted_policy": "repeat", **(source or {})}
    work = StaticMixtureWorkSource(
        datasets=[data], mixture=MixtureSpec({"toy": 1.0}), chunk_size=100, seed=seed, **settings
    )
    pipeline = (
        Pipeline(work).map_block(tokens, reads=["n"]).shuffle(150).pack_flat(64, algorithm="wrap", pad_token_id=0)
    )
    return pipeline.batch(4).options(auto_validation="off", **options)


def breaks(columns: dict[str, Any]) -> dict[str, Any]:
    """An operator that fails."""
    raise RuntimeError("broken on purpose")


def shown(batch: Any) -> str:
    """What a batch holds."""
    ids = np.asarray(batch.to_training(dtype=None)["input_ids"], np.int64)
    return hashlib.md5(ids.tobytes(), usedforsecurity=False).hexdigest()


def main(config: dict[str, Any]) -> None:
    """Run as the configuration says."""
    if config.get("torch"):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        run(config)
        dist.barrier()
        dist.destroy_process_group()
    else:
        run(config)


def run(config: dict[str, Any]) -> None:
    """Build, restore, deliver."""
    pipeline = build(config.get("seed", 5), source=config.get("source"), **config["options"])
    if config.get("breaks"):
        pipeline = build(**config["options"])
        del pipeline._nodes[1:]
        pipeline.map_block(breaks, reads=["input_ids"]).batch(2)
    if config.get("restore"):
        pipeline.restore([bytes.fromhex(state) for state in config["restore"]])
    for _ in range(config.get("runs", 1)):
        try:
            iterator = iter(pipeline)
            for n, batch in zip(range(config["take"]), iterator, strict=False):
                say("batch", n, "masked" if batch.is_masked else shown(batch))
                time.sleep(config.get("pace", 0))
                if n == config.get("dies_at"):
                    os.kill(os.getpid(), 9)
            state = pipeline.checkpoint(as_bytes=True)
            iterator.close()
        except Exception as error:  # noqa: BLE001  the test reads which
            say("error", type(error).__name__, json.dumps("\n".join([str(error), *getattr(error, "__notes__", [])])))
            state = pipeline.checkpoint(as_bytes=True)
        say("state", state.hex())


def say(*words: Any) -> None:
    """One line, at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

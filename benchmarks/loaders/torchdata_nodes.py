"""torchdata.nodes: weighted sampler, parallel mapper in threads, a packing node written by hand. Options: fmt, tok, threads."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torchdata.nodes as nodes

from ..paths import BATCH, MIX, SEQ, TEXT_BATCH, shards
from .base import Loader, Packer, list_encoder
from .torch_dl import PackedRows, rows


class Pack(nodes.BaseNode[Any]):
    """Documents' ids to batches; its state is the unfinished row and the batches not yet taken."""

    def __init__(self, source: nodes.BaseNode[Any]) -> None:
        super().__init__()
        self.source = source

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.packer, self.ready = Packer(), []
        if initial_state is None:
            self.source.reset()
            return
        self.source.reset(initial_state["source"])
        tail = initial_state["tail"]
        self.packer.buffer[: len(tail)] = tail
        self.packer.used = len(tail)
        self.ready = [np.frombuffer(blob, np.int64).reshape(BATCH, SEQ) for blob in initial_state["ready"]]

    def next(self) -> Any:
        while not self.ready:
            for ids in next(self.source):
                self.ready.extend(self.packer.add(ids))
        return torch.from_numpy(self.ready.pop(0).copy())

    def get_state(self) -> dict[str, Any]:
        tail = self.packer.buffer[: self.packer.used].copy()
        return {"source": self.source.state_dict(), "tail": tail, "ready": [batch.tobytes() for batch in self.ready]}


class Texts:
    """One corpus, resumable by counting rows."""

    def __init__(self, name: str, fmt: str) -> None:
        self.name = name
        self.fmt = fmt
        self.taken = self.skip = 0

    def __iter__(self) -> Iterator[str]:
        files = shards(self.name, self.fmt)
        random.Random(1).shuffle(files)
        self.taken, skip = 0, self.skip
        for text in rows(files, self.fmt):
            self.taken += 1
            if self.taken > skip:
                yield text

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["taken"]


class TorchdataNodes(Loader):
    saved: Any = None

    def build(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if self.workload == "W3":
            data = PackedRows()
            node = nodes.MapStyleWrapper(map_dataset=data, sampler=torch.utils.data.RandomSampler(data))
            node = nodes.Prefetcher(nodes.Mapper(nodes.Batcher(node, BATCH), torch.stack), 8)
        else:
            fmt = self.options.get("fmt", "parquet")
            sources = {name: nodes.IterableWrapper(Texts(name, fmt)) for name in MIX}
            node = nodes.MultiNodeWeightedSampler(sources, MIX, stop_criteria="FIRST_DATASET_EXHAUSTED", seed=42)
            node = (
                self.tokenized(node) if self.workload == "W1" else nodes.Prefetcher(nodes.Batcher(node, TEXT_BATCH), 8)
            )
        self.batches = nodes.Loader(node)
        if self.saved is not None:
            self.batches.load_state_dict(self.saved)

    def tokenized(self, texts: Any) -> Any:
        encode = list_encoder(self.options.get("tok", "hf"))
        threads = self.options.get("threads", 2)
        node = nodes.Batcher(texts, 64)
        node = nodes.ParallelMapper(node, encode, num_workers=threads, in_order=True, method="thread")
        return nodes.Prefetcher(Pack(node), 4)

    def iterate(self) -> Iterator[Any]:
        return iter(self.batches)

    def state(self) -> Any:
        return self.batches.state_dict()

    def restore(self, state: Any) -> None:
        self.saved = state


LOADER = TorchdataNodes

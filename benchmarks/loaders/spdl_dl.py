"""spdl: its thread pipeline around hand-written sources. No state. Options: fmt, tok, threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from spdl.pipeline import PipelineBuilder

from ..paths import BATCH, TEXT_BATCH
from .base import Loader, Packer, list_encoder
from .torch_dl import PackedRows, mixed


class Spdl(Loader):
    def build(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def iterate(self) -> Iterator[Any]:
        threads = self.options.get("threads", 2)
        if self.workload == "W3":
            builder = self.rows(threads)
        else:
            builder = PipelineBuilder().add_source(mixed(self.options.get("fmt", "parquet")))
            builder = self.tokenized(builder, threads) if self.workload == "W1" else builder.aggregate(TEXT_BATCH)
        self.pipeline = builder.add_sink(8).build(num_threads=threads + 1)
        self.pipeline.start()
        return iter(self.pipeline)

    def rows(self, threads: int) -> Any:
        data = PackedRows()
        order = np.random.default_rng(0).permutation(len(data))
        groups = (order[i : i + BATCH] for i in range(0, len(order) - BATCH + 1, BATCH))

        def gather(indices: np.ndarray) -> Any:
            return torch.stack([data[int(i)] for i in indices])

        return PipelineBuilder().add_source(groups).pipe(gather, concurrency=threads, output_order="input")

    def tokenized(self, builder: Any, threads: int) -> Any:
        encode, packer = list_encoder(self.options.get("tok", "hf")), Packer()

        def pack(documents: list[list[int]]) -> Iterator[Any]:
            for ids in documents:
                yield from map(torch.from_numpy, packer.add(ids))

        builder = builder.aggregate(64).pipe(encode, concurrency=threads, output_order="input")
        return builder.pipe(pack, concurrency=1)

    def close(self) -> None:
        self.pipeline.stop()


LOADER = Spdl

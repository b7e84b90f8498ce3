"""webdataset over tar shards; tokenizing and packing written by hand after it. Options: workers, tok."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import webdataset
from torch.utils.data import DataLoader, IterableDataset

from ..paths import BATCH, MIX, NUM_SHARDS, TEXT_BATCH, shards
from .base import Loader, list_encoder, tokenize_and_pack


def to_row(sample: dict[str, Any]) -> Any:
    return torch.from_numpy(np.load(io.BytesIO(sample["npy"]))).long()


class Mixed(IterableDataset[Any]):
    def __init__(self, workload: str, options: dict[str, Any]) -> None:
        self.workload = workload
        self.options = options
        parts = [webdataset.WebDataset(shards(name, "wds"), shardshuffle=NUM_SHARDS) for name in MIX]
        self.samples = webdataset.RandomMix(parts, list(MIX.values()), longest=False)

    def __iter__(self) -> Iterator[Any]:
        texts = (sample["txt"].decode() for sample in self.samples)
        if self.workload == "W1":
            threads = 1 if self.options.get("workers", 2) else 2
            yield from tokenize_and_pack(texts, list_encoder(self.options.get("tok", "hf"), threads), group=64)
            return
        while batch := [text for text, _ in zip(texts, range(TEXT_BATCH), strict=False)]:
            yield batch


class WebDatasetLoader(Loader):
    def build(self) -> None:
        workers = self.options.get("workers", 2)
        os.environ["TOKENIZERS_PARALLELISM"] = "false" if workers else "true"
        if self.workload == "W3":
            rows = webdataset.WebDataset(shards("packed", "wds"), shardshuffle=NUM_SHARDS).shuffle(1000).map(to_row)
            rows = rows.batched(BATCH, collation_fn=torch.stack, partial=False)
            self.batches = webdataset.WebLoader(rows, batch_size=None, num_workers=workers)
        else:
            self.batches = DataLoader(Mixed(self.workload, self.options), batch_size=None, num_workers=workers)

    def iterate(self) -> Iterator[Any]:
        return iter(self.batches)


LOADER = WebDatasetLoader

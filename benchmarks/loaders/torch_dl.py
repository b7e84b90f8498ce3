"""A DataLoader written by hand: what a person without a library writes in an afternoon. No state, no exact mixture.

Options: fmt (parquet, jsonl), workers, tok.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ..paths import BATCH, MIX, TEXT_BATCH, shards
from .base import Loader, list_encoder, tokenize_and_pack


def rows(files: Iterable[str], fmt: str) -> Iterator[str]:
    for path in files:
        if fmt == "parquet":
            file = pq.ParquetFile(path)
            for group in range(file.num_row_groups):
                yield from file.read_row_group(group, columns=["text"]).column("text").to_pylist()
        else:
            with open(path, "rb", buffering=1 << 20) as lines:
                for line in lines:
                    yield orjson.loads(line)["text"]


def mixed(fmt: str, part: int = 0, parts: int = 1) -> Iterator[str]:
    """Texts drawn by weight until the larger corpus ends; `part` of `parts` takes every n-th file."""

    def open_corpus(name: str) -> Iterator[str]:
        files = shards(name, fmt)
        random.Random(1).shuffle(files)
        return rows(files[part::parts], fmt)

    rng = random.Random(42 + part)
    sources = {name: open_corpus(name) for name in MIX}
    while True:
        for name in rng.choices(list(MIX), list(MIX.values()), k=1024):
            text = next(sources[name], None)
            if text is None and name == "web":
                return
            if text is None:
                sources[name] = open_corpus(name)
                text = next(sources[name])
            yield text


class Mixed(IterableDataset[Any]):
    def __init__(self, workload: str, options: dict[str, Any]) -> None:
        self.workload = workload
        self.options = options

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        texts = mixed(self.options.get("fmt", "parquet"), *((info.id, info.num_workers) if info else ()))
        if self.workload == "W1":
            encode = list_encoder(self.options.get("tok", "hf"), threads=1 if info else 2)
            yield from tokenize_and_pack(texts, encode, group=64)
            return
        while batch := [text for text, _ in zip(texts, range(TEXT_BATCH), strict=False)]:
            yield batch


class PackedRows(Dataset[Any]):
    """Row by row from memory-mapped .npy shards."""

    def __init__(self) -> None:
        self.maps = [np.load(path, mmap_mode="r") for path in shards("packed", "npy")]
        self.per = len(self.maps[0])

    def __len__(self) -> int:
        return sum(map(len, self.maps))

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.maps[index // self.per][index % self.per].astype(np.int64))


class HandWritten(Loader):
    def build(self) -> None:
        workers = self.options.get("workers", 2)
        os.environ["TOKENIZERS_PARALLELISM"] = "false" if workers else "true"
        ahead: dict[str, Any] = {"num_workers": workers, **({"prefetch_factor": 4} if workers else {})}
        if self.workload == "W3":
            self.batches = DataLoader(PackedRows(), batch_size=BATCH, shuffle=True, drop_last=True, **ahead)
        else:
            self.batches = DataLoader(Mixed(self.workload, self.options), batch_size=None, **ahead)

    def iterate(self) -> Iterator[Any]:
        return iter(self.batches)


LOADER = HandWritten

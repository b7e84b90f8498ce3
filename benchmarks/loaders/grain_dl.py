"""grain over ArrayRecord, its random-access format: global shuffle, exact state. Options: workers, tok."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import torch
from grain.experimental import ConcatThenSplitIterDataset

from ..paths import BATCH, EOS, MIX, SEQ, TEXT_BATCH, shards
from .base import Loader, list_encoder


class TokenizeOne:
    """A record of JSON to its ids; grain maps element by element. The encoder is made in the worker that uses it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.encode: Any = None

    def __call__(self, record: bytes) -> dict[str, np.ndarray]:
        self.encode = self.encode or list_encoder(self.name)
        (ids,) = self.encode([text_of(record)])
        return {"input_ids": np.asarray([*ids, EOS], np.int32)}

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "encode": None}


def text_of(record: bytes) -> str:
    return json.loads(record)["text"]


def to_int64(batch: dict[str, np.ndarray]) -> np.ndarray:
    return batch["input_ids"].astype(np.int64)


def to_row(record: bytes) -> np.ndarray:
    return np.frombuffer(record, np.int32)


def stack_int64(rows: list[np.ndarray]) -> np.ndarray:
    return np.stack(rows).astype(np.int64)


class Grain(Loader):
    saved: Any = None

    def build(self) -> None:
        logging.disable(logging.WARNING)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        read = grain.ReadOptions(num_threads=16, prefetch_buffer_size=500)
        if self.workload == "W3":
            source = grain.sources.ArrayRecordDataSource(shards("packed", "array_record"))
            data = grain.MapDataset.source(source).seed(42).shuffle().map(to_row).to_iter_dataset(read)
            data = data.batch(BATCH, drop_remainder=True, batch_fn=stack_int64)
        else:
            data = self.text(read)
        if workers := self.options.get("workers", 0):
            data = data.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=4))
        self.data = data

    def text(self, read: Any) -> Any:
        parts = []
        for seed, name in enumerate(MIX):
            source = grain.sources.ArrayRecordDataSource(shards(name, "array_record"))
            parts.append(grain.MapDataset.source(source).seed(seed).shuffle().repeat())
        data = grain.MapDataset.mix(parts, weights=list(MIX.values()))
        if self.workload == "W2":
            return data.map(text_of).to_iter_dataset(read).batch(TEXT_BATCH, batch_fn=list)
        data = data.map(TokenizeOne(self.options.get("tok", "hf"))).to_iter_dataset(read)
        data = ConcatThenSplitIterDataset(data, length_struct={"input_ids": SEQ})
        return data.batch(BATCH, drop_remainder=True).map(to_int64)

    def iterate(self) -> Iterator[Any]:
        self.source = iter(self.data)
        if self.saved is not None:
            self.source.set_state(self.saved)
            self.saved = None
        return self.source if self.workload == "W2" else map(torch.from_numpy, self.source)

    def state(self) -> Any:
        return self.source.get_state()

    def restore(self, state: Any) -> None:
        self.saved = state


LOADER = Grain

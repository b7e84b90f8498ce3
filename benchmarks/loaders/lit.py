"""litdata: its streaming datasets and loader over optimized chunks. Options: workers, tok."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import litdata
from torch.utils.data import DataLoader, IterableDataset

from ..paths import BATCH, DATA, MIX, PACKED, SEQ, TEXT_BATCH
from .base import Loader, list_encoder, tokenize_and_pack


def only_text(records: list[dict[str, Any]]) -> list[str]:
    return [record["text"] for record in records]


class Tokenized(IterableDataset[Any]):
    def __init__(self, texts: Any, options: dict[str, Any]) -> None:
        self.texts = texts
        self.options = options

    def __iter__(self) -> Iterator[Any]:
        threads = 1 if self.options.get("workers", 2) else 2
        encode = list_encoder(self.options.get("tok", "hf"), threads)
        yield from tokenize_and_pack((record["text"] for record in self.texts), encode, group=64)


class Lit(Loader):
    def build(self) -> None:
        workers = self.options.get("workers", 2)
        os.environ["TOKENIZERS_PARALLELISM"] = "false" if workers else "true"
        if self.workload == "W3":
            rows = litdata.StreamingDataset(
                str(PACKED / "litdata"), shuffle=True, drop_last=True, item_loader=litdata.TokensLoader(block_size=SEQ)
            )
            self.batches = litdata.StreamingDataLoader(rows, batch_size=BATCH, num_workers=workers)
            return
        parts = [litdata.StreamingDataset(str(DATA / name / "litdata"), shuffle=True) for name in MIX]
        text = litdata.CombinedStreamingDataset(parts, seed=42, weights=list(MIX.values()), iterate_over_all=False)
        if self.workload == "W2":
            self.batches = litdata.StreamingDataLoader(
                text, batch_size=TEXT_BATCH, num_workers=workers, collate_fn=only_text
            )
        else:
            ahead: dict[str, Any] = {"prefetch_factor": 4} if workers else {}
            self.batches = DataLoader(Tokenized(text, self.options), batch_size=None, num_workers=workers, **ahead)

    def iterate(self) -> Iterator[Any]:
        if self.workload == "W3":
            return (batch.long() for batch in self.batches)
        return iter(self.batches)


LOADER = Lit

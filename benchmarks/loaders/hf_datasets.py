"""Hugging Face datasets: streaming mixture mapped to tokens (W1), texts (W2), memory-mapped Arrow rows (W3).

Options: fmt (parquet, jsonl), workers, tok, stateful (torchdata's StatefulDataLoader, for W4).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import datasets
from torch.utils.data import DataLoader

from ..paths import BATCH, EOS, MIX, PACKED, SEQ, TEXT_BATCH, shards
from .base import Loader, list_encoder

datasets.disable_progress_bars()


def only_text(records: list[dict[str, Any]]) -> list[str]:
    return [record["text"] for record in records]


class Tokenize:
    def __init__(self, name: str, threads: int) -> None:
        self.arguments = (name, threads)
        self.encode: Any = None

    def __call__(self, rows: dict[str, list[str]]) -> dict[str, Any]:
        self.encode = self.encode or list_encoder(*self.arguments)
        return {"input_ids": [[*ids, EOS] for ids in self.encode(rows["text"])]}


def group(rows: dict[str, list[list[int]]]) -> dict[str, Any]:
    """The documented way to cut rows of one length: join a batch, drop its remainder."""
    ids = list(itertools.chain.from_iterable(rows["input_ids"]))
    return {"input_ids": [ids[i : i + SEQ] for i in range(0, len(ids) // SEQ * SEQ, SEQ)]}


class HuggingFace(Loader):
    saved: Any = None

    def build(self) -> None:
        workers = self.options.get("workers", 0)
        os.environ["TOKENIZERS_PARALLELISM"] = "false" if workers else "true"
        if self.workload == "W3":
            rows = datasets.load_from_disk(str(PACKED / "arrow")).with_format("torch")
            self.batches = DataLoader(rows, batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers)
            return
        fmt = self.options.get("fmt", "parquet")
        builder = {"parquet": "parquet", "jsonl": "json"}[fmt]
        parts = [
            datasets.load_dataset(builder, data_files=shards(name, fmt), split="train", streaming=True)
            .select_columns(["text"])
            .shuffle(seed=1, buffer_size=1)
            for name in MIX
        ]
        text = datasets.interleave_datasets(
            parts, probabilities=list(MIX.values()), seed=42, stopping_strategy="all_exhausted"
        )
        if self.workload == "W2":
            self.batches = DataLoader(text, batch_size=TEXT_BATCH, num_workers=workers, collate_fn=only_text)
            return
        tokenize = Tokenize(self.options.get("tok", "hf"), threads=1 if workers else 2)
        text = text.map(tokenize, batched=True, batch_size=256, remove_columns=["text"])
        text = text.map(group, batched=True, batch_size=256).with_format("torch")
        if self.options.get("stateful"):
            from torchdata.stateful_dataloader import StatefulDataLoader

            self.batches = StatefulDataLoader(text, batch_size=BATCH, num_workers=workers, drop_last=True)
            if self.saved is not None:
                self.batches.load_state_dict(self.saved)
        else:
            self.batches = DataLoader(text, batch_size=BATCH, num_workers=workers, drop_last=True)

    def iterate(self) -> Iterator[Any]:
        if self.workload == "W2":
            return iter(self.batches)
        return (batch["input_ids"] for batch in self.batches)

    def state(self) -> Any:
        return self.batches.state_dict() if self.options.get("stateful") else None

    def restore(self, state: Any) -> None:
        self.saved = state


LOADER = HuggingFace

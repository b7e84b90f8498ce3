"""mosaicml-streaming over MDS shards; tokenizing and packing in the DataLoader's workers, as its users write it.

Options: workers, tok.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ..paths import BATCH, DATA, MIX, PACKED, TEXT_BATCH
from .base import Loader, list_encoder, tokenize_and_pack
from .streaming_env import import_streaming

streaming = import_streaming()


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


class Streaming(Loader):
    def build(self) -> None:
        streaming.base.util.clean_stale_shared_memory()
        workers = self.options.get("workers", 2)
        os.environ["TOKENIZERS_PARALLELISM"] = "false" if workers else "true"
        if self.workload == "W3":
            rows = streaming.StreamingDataset(
                local=str(PACKED / "mds"), shuffle=True, batch_size=BATCH, num_canonical_nodes=1
            )
            self.batches = streaming.StreamingDataLoader(rows, batch_size=BATCH, num_workers=workers, drop_last=True)
            return
        streams = [streaming.Stream(local=str(DATA / name / "mds"), proportion=share) for name, share in MIX.items()]
        text = streaming.StreamingDataset(
            streams=streams, shuffle=True, batch_size=TEXT_BATCH, num_canonical_nodes=1, epoch_size=58_000
        )
        if self.workload == "W2":
            self.batches = streaming.StreamingDataLoader(
                text, batch_size=TEXT_BATCH, num_workers=workers, collate_fn=only_text
            )
        else:
            ahead: dict[str, Any] = {"prefetch_factor": 4} if workers else {}
            tokenized = Tokenized(text, self.options)
            self.batches = DataLoader(tokenized, batch_size=None, num_workers=workers, **ahead)

    def iterate(self) -> Iterator[Any]:
        if self.workload == "W3":
            return (batch["input_ids"].long() for batch in self.batches)
        return iter(self.batches)


LOADER = Streaming

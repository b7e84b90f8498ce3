"""headrace. Options: fmt (W1, W2: jsonl, zst, parquet; W3: npy, parquet_plain), encoder (auto, reference: the `tokenizers`
library), shuffle (rows held by a shuffle after tokenize), shuffle_at ("tokens", or "text" for before it), run (a dict for
`Pipeline.options()`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch  # noqa: F401 - batches become torch tensors; as for every loader, its import is not the first batch's time

from headrace import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource

from ..paths import BATCH, DATA, MIX, PACKED, SEQ, TEXT_BATCH, TOKENIZER_JSON
from .base import Loader


class Headrace(Loader):
    saved: bytes | None = None

    def build(self) -> None:
        pipeline = self.rows() if self.workload == "W3" else self.text()
        self.pipeline = pipeline.options(**self.options["run"]) if "run" in self.options else pipeline
        if self.saved is not None:
            self.pipeline.restore(self.saved)

    def text(self) -> Any:
        fmt, held = self.options.get("fmt", "jsonl"), self.options.get("shuffle")
        datasets = [Dataset.from_path(name, str(DATA / name / fmt)) for name in MIX]
        work = StaticMixtureWorkSource(datasets=datasets, mixture=MixtureSpec(MIX), seed=42, stop_after_passes=None)
        pipeline = Pipeline(work)
        if self.workload == "W2":
            return pipeline.select("text").batch(TEXT_BATCH)
        at = self.options.get("shuffle_at", "tokens")
        if held and at == "text":
            pipeline = pipeline.shuffle(buffer_size=held)
        pipeline = pipeline.tokenize(
            tokenizer_id=str(TOKENIZER_JSON),
            field="text",
            special_tokens="eos",
            add_attention_mask=False,
            encoder=self.options.get("encoder", "auto"),
        )
        if held and at == "tokens":
            pipeline = pipeline.shuffle(buffer_size=held)
        return pipeline.pack_flat(SEQ, algorithm="wrap", emit_positions=False).batch(BATCH)

    def rows(self) -> Any:
        fmt = self.options.get("fmt", "npy")
        packed = Dataset.from_path("packed", str(PACKED / fmt))
        work = StaticMixtureWorkSource(
            datasets=[packed],
            mixture=MixtureSpec({"packed": 1.0}),
            seed=42,
            shuffle_within_shard=True,
            stop_after_passes=None,
        )
        return Pipeline(work).batch(BATCH)

    def iterate(self) -> Iterator[Any]:
        return iter(self.pipeline)

    def tensor(self, batch: Any) -> Any:
        return batch.to_training(return_labels=False)["input_ids"]

    def count(self, batch: Any) -> tuple[int, int]:
        if self.workload == "W2":
            return super().count(batch.column("text"))
        return super().count(self.tensor(batch))

    def digest(self, batch: Any) -> str:
        return super().digest(self.tensor(batch))

    def state(self) -> bytes:
        return self.pipeline.checkpoint(as_bytes=True)

    def restore(self, state: bytes) -> None:
        self.saved = state


LOADER = Headrace

"""zephon 0.2.0 through its public interface.

Options: fmt (W1, W2: jsonl, zst, parquet; W3: parquet_plain, litdata, mds), runner, mtp, tok (hf, tiktoken, gigatoken),
tokenize_parallelism, max_batch (rows a fetch reads together), row_group_cache, lean (no attention mask, positions or
decode_text: the fastest form), shuffle (buffer after tokenize; on W3 "within" or "shard").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import MixtureSpec, StaticMixtureWorkSource

from ..paths import BATCH, CACHE, DATA, EOS, MIX, PACKED, SEQ, TEXT_BATCH, TOKENIZER_DIR
from .base import Loader, flat_encoder, list_encoder


class PluggedTokenizer:
    """Another encoder behind the interface that zephon expects of its `tokenizer=` argument."""

    name_or_path = "plugged"
    eos_token = bos_token = "<|endoftext|>"
    eos_token_id = bos_token_id = EOS
    pad_token = pad_token_id = None

    def __init__(self, name: str) -> None:
        self.name = name
        self._encode: Any = None

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        if self.name != "gigatoken":
            self._encode = self._encode or list_encoder(self.name)
            return {"input_ids": self._encode(texts)}
        self._encode = self._encode or flat_encoder("gigatoken")
        values, offsets = self._encode(texts)
        values, at = values.astype("int64"), offsets.tolist()
        return {"input_ids": [values[a:b] for a, b in zip(at[:-1], at[1:], strict=True)]}

    def __deepcopy__(self, memo: Any) -> PluggedTokenizer:
        return PluggedTokenizer(self.name)

    def __getstate__(self) -> dict[str, str]:
        return {"name": self.name}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__init__(state["name"])


class Zephon(Loader):
    saved: Any = None

    def build(self) -> None:
        pipeline = self.rows() if self.workload == "W3" else self.text()
        options = self.options
        settings: dict[str, Any] = {
            key: options[key] for key in ("runner", "max_workers", "flush_every_k_chunks") if key in options
        }
        if options.get("mtp"):
            settings["mtp_mode"] = True
        if options.get("row_group_cache"):
            settings["io_options"] = {"parquet": {"rg_cache": {"enabled": True, "root": str(CACHE / "zephon")}}}
        self.pipeline = pipeline.options(**settings) if settings else pipeline
        if self.saved is not None:
            self.pipeline.restore(self.saved)

    def source(self, datasets: dict[str, str], weights: dict[str, float], **order: Any) -> Any:
        found = [Dataset.from_path(name, path) for name, path in datasets.items()]
        mixture = MixtureSpec(weights)
        work = StaticMixtureWorkSource(datasets=found, mixture=mixture, seed=42, stop_after_passes=None, **order)
        pipeline = Pipeline(work)
        return pipeline.fetch(None, self.options["max_batch"]) if "max_batch" in self.options else pipeline

    def text(self) -> Any:
        options, lean = self.options, self.options.get("lean", False)
        fmt = options.get("fmt", "parquet")
        pipeline = self.source({name: str(DATA / name / fmt) for name in MIX}, MIX)
        if self.workload == "W2":
            return pipeline.batch(TEXT_BATCH)
        name = options.get("tok", "hf")
        tokenizer: dict[str, Any] = {"tokenizer_id": str(TOKENIZER_DIR)}
        if name != "hf":
            tokenizer = {"tokenizer": PluggedTokenizer(name)}
        if not lean:
            pipeline = pipeline.decode_text()
        pipeline = pipeline.tokenize(
            field="text",
            special_tokens="eos",
            add_attention_mask=not lean,
            parallelism=options.get("tokenize_parallelism"),
            **tokenizer,
        )
        if "shuffle" in options:
            pipeline = pipeline.shuffle(buffer_size=options["shuffle"])
        return pipeline.pack_flat(SEQ, algorithm="wrap", emit_positions=not lean).batch(BATCH)

    def rows(self) -> Any:
        where = str(PACKED / self.options.get("fmt", "parquet_plain"))
        within = self.options.get("shuffle", "within") == "within"
        order = {"shuffle_shards": True, "shuffle_within_shard": within}
        return self.source({"packed": where}, {"packed": 1.0}, **order).batch(BATCH)

    def iterate(self) -> Iterator[Any]:
        return iter(self.pipeline)

    def tensor(self, batch: Any) -> Any:
        if self.workload == "W3" and self.options.get("fmt") == "litdata":  # token chunks arrive as bare arrays
            return torch.stack([torch.as_tensor(record.payload) for record in batch.records]).long()
        return batch.to_training()["input_ids"]

    def count(self, batch: Any) -> tuple[int, int]:
        if self.workload == "W2":
            return len(batch.records), sum(len(record.payload["text"]) for record in batch.records)
        return super().count(self.tensor(batch))

    def digest(self, batch: Any) -> str:
        return super().digest(self.tensor(batch))

    def state(self) -> Any:
        return self.pipeline.checkpoint()

    def restore(self, state: Any) -> None:
        self.saved = state


LOADER = Zephon

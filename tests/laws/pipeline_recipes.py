"""Random recipes for the laws, and what is compared: every token of every row, with the samples it came from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.core.block import Ragged
from headrace.ops.pack.domains import DomainGroups

Seen = tuple[tuple[int, ...], ...]

ALGORITHMS = ["streaming", "streaming", "block", "block_warmup"]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides data."""

    shards: dict[str, tuple[int, ...]]
    weights: dict[str, float]
    source: dict[str, Any] = field(default_factory=dict)
    keep: int | None = None
    shuffle: int | None = None
    pack: dict[str, Any] | None = None
    late_shuffle: int | None = None
    batch: dict[str, Any] | None = None
    lanes: int = 1
    flush: Any = "default"
    shuffle_algorithm: str = "streaming"
    first_shuffle: dict[str, Any] | None = None
    """A shuffle of documents that are not tokens yet."""
    split: int | None = None
    """Documents become text, and the tokenizer cuts them into pieces of this length."""
    keep_rows: int | None = None
    """A filter behind packing."""

    def build(self, **settings: Any) -> Pipeline:
        """A pipeline of this recipe that runs with `settings`."""
        datasets = [Dataset.from_dict(name, _shards(name, counts)) for name, counts in self.shards.items()]
        source = StaticMixtureWorkSource(datasets=datasets, mixture=MixtureSpec(self.weights), **self.source)
        flush = {} if self.flush == "default" else {"flush_every_k_chunks": self.flush}
        pipeline = Pipeline(source).options(canonical_replicas=self.lanes, **flush, **settings)
        if self.keep is not None:
            keep = self.keep
            pipeline.filter(lambda payload: payload["n"] % keep != 0)
        if self.first_shuffle is not None:
            pipeline.shuffle(**self.first_shuffle)
        if self.split is None:
            pipeline.map_block(_tokens, reads=["n"])
        else:
            pipeline.map_block(_text, reads=["n"])
            cut = {"split_long_samples": True, "max_length": self.split, "special_tokens": "none"}
            pipeline.tokenize(letters, field="text", add_attention_mask=False, **cut)
        if self.shuffle is not None:
            pipeline.shuffle(buffer_size=self.shuffle, seed=3, algorithm=self.shuffle_algorithm)
        if self.pack is not None:
            pipeline.pack_flat(**self.pack)
            if self.keep_rows is not None:
                pipeline.map_transform(_KeepRows(self.keep_rows))
        if self.late_shuffle is not None:
            pipeline.shuffle(buffer_size=self.late_shuffle, seed=4, algorithm="block")
        if self.batch is not None:
            pipeline.batch(**self.batch)
        return pipeline


def _shards(name: str, counts: tuple[int, ...]) -> dict[int, InMemoryShard]:
    base = 1000 * (1 + sorted("abc").index(name))
    return {
        i: InMemoryShard([{"n": base + 100 * i + row, "unused": "x" * 50} for row in range(count)])
        for i, count in enumerate(counts)
    }


def _tokens(columns: dict[str, Any]) -> dict[str, Any]:
    """Between 0 and 9 tokens a document, all different."""
    return {"input_ids": Ragged.from_rows([np.arange(n % 10, dtype=np.int32) + 100 * n for n in columns["n"]])}


def _text(columns: dict[str, Any]) -> dict[str, Any]:
    """The same tokens as letters; none for some documents."""
    return {"text": ["".join(chr(100 * n + i) for i in range(n % 10)) for n in columns["n"]]}


def letters(text: str) -> list[int]:
    """A tokenizer: one id a letter."""
    return [ord(letter) for letter in text]


@dataclass(frozen=True)
class _KeepRows:
    """Drops some packed rows, by their first token."""

    keep: int

    def __call__(self, payload: dict[str, Any]) -> dict[str, Any] | None:
        return payload if (int(payload["input_ids"][0]) // 100) % self.keep else None


def seen(item: Any) -> tuple[Any, ...]:
    """All that a batch or record shows."""
    if hasattr(item, "records"):
        return tuple(seen(record) for record in item.records)
    tokens = np.asarray(item.payload["input_ids"]).tolist()
    return (item.meta.sample_id, item.meta.lane_id, item.meta.lineage, tuple(tokens))


@st.composite
def recipes(draw: st.DrawFn, max_lanes: int = 4) -> Recipe:
    """Small corpora, every operator, every policy."""
    names = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
    counts = st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any)
    shards = {name: tuple(draw(counts)) for name in names}
    weights = {name: draw(st.floats(0.05, 1.0)) for name in names}
    source = {
        "chunk_size": draw(st.integers(1, 50)),
        "seed": draw(st.integers(0, 3)),
        "shuffle_within_shard": draw(st.booleans()),
        "shuffle_block_size": draw(st.sampled_from([None, 7, "auto", "global"])),
        "lane_assignment": draw(st.sampled_from(["permute", "modulo"])),
        "exhausted_policy": draw(st.sampled_from([None, "stop", "redistribute"])),
    }
    pack = draw(st.one_of(st.none(), packing(sorted(names))))
    return Recipe(
        shards,
        weights,
        source,
        keep=draw(st.sampled_from([None, 2, 3])),
        shuffle=draw(st.sampled_from([None, 1, 5, 30])),
        pack=pack,
        late_shuffle=draw(st.sampled_from([None, 4])) if pack else None,
        batch=draw(st.sampled_from([None, {"microbatch_size": 3}, {"microbatch_size": 2, "drop_last": False}])),
        lanes=draw(st.integers(1, max_lanes)),
        flush=draw(st.sampled_from(["default", None, 1, 2, 3])),
        shuffle_algorithm=draw(st.sampled_from(ALGORITHMS)),
    )


@st.composite
def deep_recipes(draw: st.DrawFn, max_lanes: int = 3) -> Recipe:
    """The same with more in a row: documents cut by the tokenizer, a shuffle in front of it, rows filtered behind packing."""
    recipe = draw(recipes(max_lanes))
    first = {"buffer_size": draw(st.integers(1, 20)), "seed": 9, "algorithm": draw(st.sampled_from(ALGORITHMS))}
    return replace(
        recipe,
        first_shuffle=draw(st.sampled_from([None, first])),
        split=draw(st.sampled_from([None, 2, 4])),
        keep_rows=draw(st.sampled_from([None, 2, 3])),
        late_shuffle=draw(st.sampled_from([None, 3, 11])) if recipe.pack else None,
    )


@st.composite
def packing(draw: st.DrawFn, names: list[str]) -> dict[str, Any]:
    """Parameters of `pack_flat`, all algorithms and everything that decides who shares a row."""
    pack: dict[str, Any] = {"max_length": draw(st.integers(3, 25))}
    pack["algorithm"] = draw(st.sampled_from(["wrap", "best_fit_wrap", "first_fit", "best_fit"]))
    pack["pad_token_id"] = draw(st.sampled_from([None, 7])) if pack["algorithm"] == "wrap" else 7
    if pack["pad_token_id"] is not None:
        pack["max_sequences_per_bin"] = draw(st.sampled_from([None, None, 1, 3]))
    if "wrap" not in pack["algorithm"]:
        pack["num_bins"] = draw(st.integers(1, 4))
        pack["min_sequence_length"] = draw(st.sampled_from([1, 4]))
        pack["flush_strategy"] = draw(st.sampled_from(["fifo", "fullest"]))
    if pack["algorithm"] == "best_fit_wrap":
        pack["candidate_pool_size"] = draw(st.sampled_from([1, 5, 30]))
        pack["max_candidate_age"] = draw(st.sampled_from([None, 2, 20]))
    pack["homogeneity"] = draw(st.sampled_from(["none", "none", "full", "group"]))
    if pack["homogeneity"] == "group":
        pack["groups"] = DomainGroups({name: [name, *(names[2:] if name == names[0] else [])] for name in names[:2]})
    pack["shuffle_strategy"] = draw(st.sampled_from([None, None, "random", "length"]))
    return pack


@st.composite
def settings_of_a_run(draw: st.DrawFn, runners: tuple[str, ...] = ("inline", "threads")) -> dict[str, Any]:
    """Everything that may not decide data."""
    return {
        "runner": draw(st.sampled_from(runners)),
        "micro_batch": draw(st.sampled_from([1, 3, 16, 256])),
        "prefetch_batches": draw(st.sampled_from([1, 2, 50])),
        "max_workers": draw(st.sampled_from([1, 2, 3])),
        "worker_allocation": draw(st.sampled_from(["fit_to_ops", "per_stage_fixed", "global"])),
        "auto_validation": "off",
    }

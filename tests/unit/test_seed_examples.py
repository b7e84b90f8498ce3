"""The first programs that a newcomer meets, word for word but for the names of files: they must run as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from headrace import Pipeline
from headrace.io import Dataset
from headrace.work import MixtureSpec, StaticMixtureWorkSource


def write_corpus(folder: Path, shards: int, rows: int, kind: str) -> str:
    folder.mkdir()
    for shard in range(shards):
        lines = [json.dumps({"text": f"{kind} document {shard}-{row}, which is text"}) for row in range(rows)]
        (folder / f"part-{shard:03d}.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


@pytest.fixture
def work_source(tmp_path: Path) -> StaticMixtureWorkSource:
    code = Dataset.from_path("code", write_corpus(tmp_path / "code", 2, 100, "code"))
    web = Dataset.from_path("web", write_corpus(tmp_path / "web", 3, 200, "web"))
    return StaticMixtureWorkSource(
        datasets=[code, web],
        mixture=MixtureSpec({"code": 0.25, "web": 0.75}),
        seed=42,
    )


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["web document 1, which is text"], trainer)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_fetch_and_batch(work_source: StaticMixtureWorkSource) -> None:
    pipeline = Pipeline(work_source).batch(microbatch_size=32)
    sizes = []
    by_dataset = [0, 0]
    for sample_batch in pipeline:
        sizes.append(len(sample_batch.records))
        for record in sample_batch.records:
            by_dataset[record.meta.sample_id[0]] += 1
    assert set(sizes) == {32} and len(sizes) == len(work_source) // 32
    assert abs(by_dataset[0] - 0.25 * sum(sizes)) <= 1


def test_explain_shows_parallelism_queues_and_prefetch(
    work_source: StaticMixtureWorkSource, tokenizer_folder: str
) -> None:
    pipeline = (
        Pipeline(work_source)
        .tokenize(tokenizer_id=tokenizer_folder, field="text", parallelism=4)
        .batch(microbatch_size=32)
    )
    text = pipeline.explain()
    assert "tokenize@p4" in text
    assert re.search(r"\[in_q=\d+\]", text) and re.search(r"final_prefetch=\d+", text)
    batch = next(iter(pipeline))
    first = batch.records[0].payload["input_ids"]
    assert len(batch) == 32 and first[0] == 0 and first[-1] == 0


def test_a_loader_that_insists_on_a_dataset(work_source: StaticMixtureWorkSource) -> None:
    data = pytest.importorskip("torch.utils.data")
    pipeline = Pipeline(work_source).batch(microbatch_size=32)
    loader = data.DataLoader(pipeline.to_torch_dataset(), batch_size=None, num_workers=0)
    assert [len(batch.records) for batch in loader] == [32] * (len(work_source) // 32)


@pytest.mark.parametrize(
    "settings",
    [
        {"runner": "threads", "deterministic": True},
        {"runner": "inline", "flush_every_k_chunks": None},
        {"runner": "process", "flush_every_k_chunks": 4},
        {"mtp_mode": True},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_settings_of_a_run_never_change_the_batches(
    work_source: StaticMixtureWorkSource, settings: dict[str, object]
) -> None:
    def texts(**options: object) -> list[str]:
        pipeline = Pipeline(work_source).map_transform(shout).batch(microbatch_size=32).options(**options)
        return [record.payload["text"] for batch in pipeline for record in batch.records]

    assert texts(**settings) == texts()


def test_without_determinism_the_same_records_come(work_source: StaticMixtureWorkSource) -> None:
    pipeline = Pipeline(work_source).map_transform(shout, parallelism=3).batch(microbatch_size=1)
    ordered = [batch.records[0].payload["text"] for batch in pipeline]
    pipeline.options(deterministic=False, micro_batch=5)
    assert sorted(batch.records[0].payload["text"] for batch in pipeline) == sorted(ordered)


def shout(payload: dict[str, str]) -> dict[str, str]:
    return {"text": payload["text"].upper()}

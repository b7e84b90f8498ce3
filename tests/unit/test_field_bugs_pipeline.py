"""Faults that other loaders were reported for, through a whole pipeline: what the loop receives, and what is said instead.

The numbers are those of the collection of reports that the cases come from.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from headrace import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource
from headrace.errors import ConfigError, CurriculumError, DataError, FormatError, RecordError

RUNNERS = ("inline", "threads")
BLOCKS = (1, 3, 256)
ALGORITHMS: dict[str, dict[str, Any]] = {
    "wrap": {"algorithm": "wrap"},
    "wrap, padded": {"algorithm": "wrap", "pad_token_id": 0},
    "best_fit_wrap": {"algorithm": "best_fit_wrap", "pad_token_id": 0},
    "first_fit": {"algorithm": "first_fit", "num_bins": 2, "pad_token_id": 0},
    "best_fit": {"algorithm": "best_fit", "num_bins": 2, "pad_token_id": 0},
}
END = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["a"], trainer)
    return made


def over(dataset: Dataset, **settings: Any) -> StaticMixtureWorkSource:
    settings = {"shuffle_shards": False, **settings}
    return StaticMixtureWorkSource(datasets=[dataset], mixture=MixtureSpec({dataset.name: 1.0}), **settings)


def of_rows(rows: Sequence[Any], **settings: Any) -> Pipeline:
    return Pipeline(over(Dataset.from_dict("docs", {0: InMemoryShard(list(rows))}), **settings))


def of_files(folder: Path, files: dict[str, bytes]) -> Pipeline:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return Pipeline(over(Dataset.from_path("docs", folder)))


def decoded(pipeline: Pipeline, tokenizer: Tokenizer) -> list[str]:
    """Texts of the delivered records, out of their token ids: one byte is one token, so nothing is lost."""
    alphabet = {character: byte for byte, character in bytes_of_alphabet().items()}
    out = []
    for record in pipeline:
        pieces = [tokenizer.id_to_token(i) for i in np.asarray(record.payload["input_ids"]).tolist()]
        out.append(bytes(alphabet[c] for piece in pieces for c in piece).decode())
    return out


def bytes_of_alphabet() -> dict[int, str]:
    """The byte-level alphabet: bytes that print stand for themselves, the others for characters from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def tokens_of(*rows: Sequence[int], **fields: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    extra = [{name: values[i] for name, values in fields.items()} for i in range(len(rows))]
    return [{"input_ids": np.asarray(row, np.int32), **more} for row, more in zip(rows, extra, strict=True)]


# -- (A) files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("micro_batch", BLOCKS)
def test_b001_b002_b003_b015_what_ends_a_record(
    tmp_path: Path, tokenizer: Tokenizer, runner: str, micro_batch: int
) -> None:
    files = {
        "a.jsonl": b'\xef\xbb\xbf{"text":"a\xe2\x80\xa8b\xe2\x80\xa9c\xc2\x85d"}\r\n\n  \n{"text":"e"}\n\n',
        "b.jsonl.gz": gzip.compress(b'{"text":"f"}\n{"te') + gzip.compress(b"") + gzip.compress(b'xt":"g"}'),
        "c.jsonl": b"",
        "d.jsonl": b'{"text":"last, without newline"}',
    }
    pipeline = of_files(tmp_path, files).tokenize(tokenizer, field="text", special_tokens="none")
    got = decoded(pipeline.options(runner=runner, micro_batch=micro_batch), tokenizer)
    assert got == ["a\u2028b\u2029c\u0085d", "e", "f", "g", "last, without newline"]


@pytest.mark.parametrize("micro_batch", BLOCKS)
def test_b007_b012_values_do_not_depend_on_their_neighbours(tmp_path: Path, micro_batch: int) -> None:
    values = [1, 2.5, 2**60 + 1, True, None, "s", [1], [1.5], {"a": 1}, 2**63, 2**64, 10**19 + 7, -1, [], [[1], [2]]]
    values += [["a"], [None], False, 0, 1e300, "", {}, [True], [1, True], [2**70]]
    lines = "\n".join(json.dumps({"v": value}) for value in values)
    pipeline = of_files(tmp_path, {"a.jsonl": lines.encode()}).batch(4, drop_last=False)
    got = [record.payload["v"] for batch in pipeline.options(micro_batch=micro_batch) for record in batch.records]
    assert got == values and [type(v) for v in got] == [type(v) for v in values]


def test_b007_a_number_of_5000_digits_harms_nobody_who_does_not_ask(tmp_path: Path, tokenizer: Tokenizer) -> None:
    line = b'{"text":"a","id":' + b"9" * 5000 + b"}\n"
    pipeline = of_files(tmp_path, {"a.jsonl": line})
    assert decoded(pipeline.tokenize(tokenizer, field="text", special_tokens="none"), tokenizer) == ["a"]
    with pytest.raises(RecordError, match=r"dataset 'docs', shard 'a.jsonl', row 0.*4300 digits"):
        list(Pipeline(pipeline.work_source))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text":"a"}\n{"text":"b', r"shard 'a.jsonl', row 1.*cut off: it ends at byte 23"),
        (b'{"text":"z"}\n{"text":"a"}{"text":"b"}\n', r"row 1: Extra data at character 13.*line 2"),
        (b'{"text":"z"}\n{"text":"caf\xe9"}\n', r"row 1: 'utf-8' codec.*line 2"),
        (b'{"text":"z"}\n"no object"\n', r"row 1: a row must be an object, this line is of type str"),
        (b'{"text":"z"}\n{"text":"\\ud800"}\n', r"row 1: field 'text' holds a lone surrogate"),
    ],
    ids=["cut off", "two objects", "not UTF-8", "no object", "surrogate"],
)
@pytest.mark.parametrize("runner", RUNNERS)
def test_b008_b009_bad_lines_stop_the_run_or_are_left_out(
    tmp_path: Path, tokenizer: Tokenizer, content: bytes, message: str, runner: str
) -> None:
    pipeline = of_files(tmp_path, {"a.jsonl": content, "b.jsonl": b'{"text":"good"}'}).options(runner=runner)
    pipeline.tokenize(tokenizer, field="text", special_tokens="none")
    with pytest.raises(RecordError, match=message):
        list(pipeline)
    good = "a" if b'"a"}\n{' in content and b"}{" not in content else "z"
    assert decoded(pipeline.options(on_error="skip"), tokenizer) == [good, "good"]
    summary = pipeline.metrics_snapshot()
    assert summary is not None and summary.refused == 1
    assert summary.datasets[0].dropped == {"fetch: skip: RowError": 1}


ODD_ROWS = b'{"text":"ok"}\n{"text":null}\n{}\n{"text":""}\n{"text":5}\n"just a string"\n[1,2]\n{"content":"x"}\n{"text":"end"}\n'


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("micro_batch", BLOCKS)
def test_b010_every_kind_of_text_that_is_none(
    tmp_path: Path, tokenizer: Tokenizer, runner: str, micro_batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = of_files(tmp_path, {"a.jsonl": ODD_ROWS}).tokenize(tokenizer, field="text", special_tokens="none")
    pipeline.options(runner=runner, micro_batch=micro_batch)
    with pytest.raises(RecordError, match=r"'tokenize' failed on dataset 'docs', shard 'a.jsonl', row 1.*is null"):
        list(pipeline)
    with caplog.at_level(logging.WARNING, "headrace"):
        assert decoded(pipeline.options(on_error="skip"), tokenizer) == ["ok", "", "end"]
    summary = pipeline.metrics_snapshot()
    assert summary is not None and summary.refused == 6
    assert summary.datasets[0].dropped == {"fetch: skip: RowError": 2, "tokenize: skip: RecordError": 4}
    assert len(caplog.records) == 6
    (about_other_field,) = [m for m in caplog.messages if "row 7" in m]
    assert "no other field was read" in about_other_field  # and not: "the record has: text"


def test_b010_absent_text_may_count_as_empty(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pipeline = of_files(tmp_path, {"a.jsonl": ODD_ROWS}).options(on_error="skip")
    pipeline.tokenize(tokenizer, field="text", special_tokens="none", missing_field="empty")
    assert decoded(pipeline, tokenizer) == ["ok", "", "", "", "", "end"]


def test_b010_quarantine_keeps_refused_records(tmp_path: Path, tokenizer: Tokenizer) -> None:
    corpus, bad = tmp_path / "corpus", tmp_path / "bad.jsonl"
    corpus.mkdir()
    pipeline = of_files(corpus, {"a.jsonl": ODD_ROWS}).tokenize(tokenizer, field="text", special_tokens="none")
    pipeline.options(on_error="quarantine", quarantine_path=str(bad))
    assert decoded(pipeline, tokenizer) == ["ok", "", "end"]
    lines = [json.loads(line) for line in bad.read_text().splitlines()]
    assert [line["row"] for line in lines if line["operator"] == "tokenize"] == [1, 2, 4, 7]
    assert [line["payload"] for line in lines if line["row"] in (1, 4)] == [{"text": None}, {"text": 5}]
    assert {line["where"].rpartition(",")[0] for line in lines} == {"dataset 'docs', shard 'a.jsonl'"}


def test_b010_a_wrong_field_name_fails_at_once_and_says_what_there_is(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pipeline = of_files(tmp_path, {"a.jsonl": b'{"content":"x","id":1}\n' * 5})
    with pytest.raises(ConfigError, match=r"field='text'.*none of 5 sampled records has it.*has: content, id"):
        iter(pipeline.tokenize(tokenizer, field="text", special_tokens="none"))


def test_b011_a_field_of_nulls_and_then_a_string(tmp_path: Path) -> None:
    lines = b'{"text":"t","m":null}\n' * 3000 + b'{"text":"t","m":"s"}\n'
    payloads = [record.payload for record in of_files(tmp_path, {"a.jsonl": lines})]
    assert len(payloads) == 3001 and payloads[-2:] == [{"text": "t", "m": None}, {"text": "t", "m": "s"}]


def test_b018_a_dataset_without_any_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(CurriculumError, match=r"dataset 'docs' has no rows \(1 shards\)"):
        of_files(tmp_path, {"a.jsonl": b"\n\n"})


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)], ids=["odd last", "odd first"])
def test_b021_parquet_shards_of_several_schemas(tmp_path: Path, tokenizer: Tokenizer, order: Sequence[int]) -> None:
    tables = [
        pa.table({"text": pa.array(["plain"]), "more": [1]}),
        pa.table({"text": pa.array(["large"], pa.large_string())}),
        pa.table({"text": pa.array(["dictionary"]).dictionary_encode()}),
        pa.table({"other": pa.array(["x"])}),
    ]
    for place, number in enumerate(order):
        pq.write_table(tables[number], tmp_path / f"{place}.parquet")
    pipeline = Pipeline(over(Dataset.from_path("docs", tmp_path)))
    pipeline.tokenize(tokenizer, field="text", special_tokens="none")
    without = f"{order.index(3)}.parquet"
    with pytest.raises(RecordError, match=rf"shard '{without}', row 0.*'text' is missing"):
        list(pipeline)
    got = decoded(pipeline.options(on_error="skip"), tokenizer)
    assert sorted(got) == ["dictionary", "large", "plain"]


@pytest.mark.parametrize("damage", ["cut", "html"])
def test_b022_an_unreadable_shard_is_refused_before_the_run(tmp_path: Path, damage: str) -> None:
    pq.write_table(pa.table({"text": ["a"] * 100}), tmp_path / "0.parquet")
    whole = (tmp_path / "0.parquet").read_bytes()
    with pytest.raises(FormatError, match=r"1\.parquet \(\d+ bytes\)"):
        of_files(tmp_path, {"1.parquet": whole[:-7] if damage == "cut" else b"<html>404</html>"})


# -- (D) packing -----------------------------------------------------------------------------------

LENGTHS = (1, 7, 8, 9, 80, 0, 3, 0, 16, 5)
"""1, L-1, L, L+1, 10 L, empty ones, and others, for rows of L = 8."""


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("flush", [1, 2, None])
def test_b055_tokens_in_are_tokens_out_and_counted_drops(algorithm: str, flush: int | None) -> None:
    rows = tokens_of(*(np.arange(100 * i + 1, 100 * i + 1 + n) for i, n in enumerate(LENGTHS)))
    pipeline = of_rows(rows, chunk_size=4).pack_flat(8, **ALGORITHMS[algorithm]).batch(1)
    delivered: list[int] = []
    for batch in pipeline.options(flush_every_k_chunks=flush):
        out = batch.to_training(return_padding_mask=True, dtype=np.int64)
        assert out["input_ids"].shape == (1, 8)
        delivered += out["input_ids"][~out["padding_mask"]].tolist()
    summary = pipeline.metrics_snapshot()
    assert summary is not None
    assert len(delivered) == len(set(delivered)) == summary.tokens
    assert len(delivered) + sum(summary.dropped_tokens.values()) == sum(LENGTHS)
    dropped = summary.datasets[0].dropped
    assert dropped["pack_flat: empty document"] == 2
    cuts = "wrap" in algorithm
    assert dropped.get("pack_flat: longer than a row", 0) == (0 if cuts else 3)
    assert cuts or summary.dropped_tokens["pack_flat: longer than a row"] == 9 + 80 + 16


@pytest.mark.parametrize("algorithm", ["first_fit", "best_fit"])
def test_b055_a_long_document_is_an_error_where_asked_for(algorithm: str) -> None:
    pipeline = of_rows(tokens_of(range(3), range(9))).pack_flat(8, drop_oversized=False, **ALGORITHMS[algorithm])
    with pytest.raises(RecordError, match=r"9 tokens does not fit a row of 8 .*row 1"):
        list(pipeline)


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "wrap"])
def test_b051_b053_b061_documents_in_a_row_are_kept_apart_by_place(algorithm: str) -> None:
    """Padding has the id of the end token, and no label crosses from one document to the next."""
    settings = {**ALGORITHMS[algorithm], "pad_token_id": 2}
    settings |= {"num_bins": 1} if "num_bins" in settings else {}
    pipeline = of_rows(tokens_of([1, 5, 2], [3, 2], [7])).pack_flat(9, **settings).batch(1)
    (batch,) = list(pipeline)
    out = batch.to_training(
        return_labels=True,
        mask_document_boundaries=True,
        return_document_ids=True,
        return_num_valid_tokens=True,
        return_cu_seqlens=True,
        dtype=np.int64,
    )
    assert out["input_ids"].tolist() == [[1, 5, 2, 3, 2, 7, 2, 2]]
    assert out["labels"].tolist() == [[5, 2, -100, 2, -100, -100, -100, -100]]
    assert out["document_ids"].tolist() == [[0, 0, 0, 1, 1, 2, -1, -1]]
    assert out["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert out["cu_seqlens"].tolist() == [[0, 3, 5, 6, 8]]
    assert out["num_valid_tokens"] == np.count_nonzero(out["labels"] != -100) == 3


@pytest.mark.parametrize("algorithm", ["wrap, padded", "best_fit_wrap"])
def test_b052_positions_of_a_document_over_several_rows_begin_anew_in_each(algorithm: str) -> None:
    pipeline = of_rows(tokens_of(range(1, 21))).pack_flat(8, **ALGORITHMS[algorithm]).batch(3)
    (batch,) = list(pipeline)
    out = batch.to_training(dtype=np.int64)
    assert out["positions"].tolist() == [[*range(8)], [*range(8)], [0, 1, 2, 3, 0, 1, 2, 3]]
    assert out["input_ids"].reshape(-1).tolist() == [*range(1, 21), 0, 0, 0, 0]


def test_b050_every_row_has_the_length_asked_for() -> None:
    shards = {i: InMemoryShard(tokens_of(*[range(n)] * 7)) for i, n in enumerate((3, 11, 5))}
    for flush in (1, None):
        pipeline = Pipeline(over(Dataset.from_dict("docs", shards), chunk_size=3)).pack_flat(10, algorithm="wrap")
        shapes = {len(record.payload["input_ids"]) for record in pipeline.options(flush_every_k_chunks=flush)}
        assert shapes == {10}


@pytest.mark.parametrize("micro_batch", BLOCKS)
def test_b062_a_loss_mask_that_only_later_records_have_is_not_lost(micro_batch: int) -> None:
    rows = [*tokens_of([1, 2]), *tokens_of([1, 2, 3], loss_mask=[[0, 1, 1]])]
    pipeline = of_rows(rows).pack_flat(8, algorithm="wrap", pad_token_id=0).options(micro_batch=micro_batch)
    with pytest.raises(RecordError, match=r"'loss_mask' appears in some records only .*row 1"):
        list(pipeline)


@pytest.mark.parametrize("micro_batch", BLOCKS)
def test_b062_empty_documents_say_nothing_about_fields(micro_batch: int) -> None:
    rows = [*tokens_of([], []), *tokens_of([1, 2, 3], loss_mask=[[0, 1, 1]]), *tokens_of([], loss_mask=[[]])]
    pipeline = of_rows(rows).pack_flat(4, algorithm="wrap", pad_token_id=0).batch(1).options(micro_batch=micro_batch)
    (batch,) = list(pipeline)
    out = batch.to_training(return_labels=True, return_num_valid_tokens=True, dtype=np.int64)
    assert out["labels"].tolist() == [[2, 3, -100]] and out["num_valid_tokens"] == 2
    summary = pipeline.metrics_snapshot()
    assert summary is not None and summary.datasets[0].dropped == {"pack_flat: empty document": 3}


def test_b062_b066_the_mask_of_the_records_and_the_count_of_labels_agree() -> None:
    rows = tokens_of([1, 2, 3, 4], [5, 6], loss_mask=[[0, 0, 1, 1], [0, 0]])
    (batch,) = list(of_rows(rows).pack_flat(7, algorithm="wrap", pad_token_id=0).batch(1))
    out = batch.to_training(return_labels=True, return_num_valid_tokens=True, return_loss_mask=True, dtype=np.int64)
    assert out["labels"].tolist() == [[-100, 3, 4, -100, -100, -100]]
    assert out["num_valid_tokens"] == 2 and out["loss_mask"].tolist() == [[0, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize("ids", [[1, None], [1, "a"], [2**70]], ids=["null", "text", "huge"])
@pytest.mark.parametrize("before", [0, 1])
def test_ids_that_are_no_numbers_are_named_by_record(ids: list[Any], before: int) -> None:
    rows = [{"input_ids": [1, 2]}] * before + [{"input_ids": ids}]
    with pytest.raises(RecordError, match=rf"'input_ids' .*dataset 0, shard 0, row {before}\)"):
        list(of_rows(rows).pack_flat(4, algorithm="wrap", pad_token_id=0))


def test_ids_with_fractions_are_refused_and_whole_floats_are_not() -> None:
    pipeline = of_rows([{"input_ids": [1.0, 2.0]}, {"input_ids": [1.5, 2.0]}]).batch(1)
    whole, broken = list(pipeline)
    assert whole.to_training(dtype=np.int64)["input_ids"].tolist() == [[1, 2]]
    with pytest.raises(DataError, match=r"row 0 of the batch \(sample \(0, 0, 1\)\) holds 1.5"):
        broken.to_training()
    assert broken.to_training(dtype=np.float32)["input_ids"].tolist() == [[1.5, 2.0]]


# -- (D) tokenizing --------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", ["reference", "auto"])
def test_b060_the_text_of_a_special_token_is_text_unless_asked_for(tokenizer: Tokenizer, encoder: str) -> None:
    texts = ["x<|end|>y", "<|end|>", "a <|en", "d|> b"]

    def ids(**settings: Any) -> list[list[int]]:
        pipeline = of_rows([{"text": text} for text in texts])
        pipeline.tokenize(tokenizer, field="text", encoder=encoder, **settings)
        return [np.asarray(record.payload["input_ids"]).tolist() for record in pipeline]

    plain = ids(special_tokens="none")
    assert [len(row) for row in plain] == [len(text) for text in texts]  # a token is a byte
    assert not any(END in row for row in plain)
    assert [row.count(END) for row in ids(special_tokens="none", allow_special=True)] == [1, 1, 0, 0]
    assert [row.count(END) for row in ids(special_tokens="eos", eos_token_id=END)] == [1, 1, 1, 1]


@pytest.mark.parametrize("padding", ["longest", "max_length"])
def test_b061_true_end_tokens_keep_their_label(tokenizer: Tokenizer, padding: str) -> None:
    pipeline = of_rows([{"text": "abc"}, {"text": "a"}])
    limit = {"max_length": 6} if padding == "max_length" else {}
    pipeline.tokenize(tokenizer, field="text", special_tokens="eos", eos_token_id=END, padding=padding, **limit)
    (batch,) = list(pipeline.batch(2))
    out = batch.to_training(return_labels=True, return_num_valid_tokens=True, dtype=np.int64)
    labels = out["labels"]
    assert (labels == END).sum(axis=1).tolist() == [1, 1]
    assert labels[1, 0] == END and (labels[1, 1:] == -100).all()
    assert out["num_valid_tokens"] == 3 + 1


def test_b055_b058_long_texts_in_pieces_with_one_begin_and_one_end(tokenizer: Tokenizer) -> None:
    pipeline = of_rows([{"text": "abcdefg"}, {"text": ""}])
    pipeline.tokenize(
        tokenizer,
        field="text",
        special_tokens="bos_eos",
        bos_token_id=1,
        eos_token_id=END,
        split_long_samples=True,
        max_length=4,
    )
    records = list(pipeline)
    pieces = [np.asarray(record.payload["input_ids"]).tolist() for record in records]
    assert [len(piece) for piece in pieces] == [4, 4, 1, 2]
    assert [i for piece in pieces for i in piece].count(END) == 2
    assert pieces[0][0] == 1 and pieces[2] == [END] and pieces[3] == [1, END]
    assert [record.meta.sample_id[2] for record in records] == [0, 0, 0, 1]


def test_b065_another_tokenizer_or_other_options_are_another_recipe(tokenizer: Tokenizer) -> None:
    def recipe(made: Tokenizer, **settings: Any) -> Any:
        pipeline = of_rows([{"text": "abc"}]).tokenize(made, field="text", special_tokens="none", **settings)
        return pipeline.recipe()["operators"]

    other = Tokenizer.from_str(tokenizer.to_str())
    assert recipe(other) == recipe(tokenizer)
    other.enable_padding(length=3)  # what transformers does to a tokenizer when it is called
    assert recipe(other) == recipe(tokenizer)
    assert recipe(tokenizer, truncation=True, max_length=3) != recipe(tokenizer)
    other.add_tokens(["abc"])
    assert recipe(other) != recipe(tokenizer)


@pytest.mark.parametrize("in_text", [False, True])
@pytest.mark.parametrize("in_front", [False, True])
def test_b059_one_begin_token_or_a_warning_that_shows_the_first_ids(in_text: bool, in_front: bool) -> None:
    mode = "bos_eos" if in_front else "eos"
    folder = Path(__file__).parents[1] / "golden" / "tokenizers" / "small"
    settings = {"tokenizer_id": folder, "field": "text", "special_tokens": mode, "allow_special": True}
    pipeline = of_rows([{"text": ("<|bos|>" if in_text else "") + "hello"}]).tokenize(**settings)
    if in_text and in_front:
        with pytest.warns(
            UserWarning, match=r"begin token already.*first ids: \[0, 0, .*pass special_tokens='eos' or 'none'"
        ):
            pipeline.plan()
    (record,) = list(pipeline)
    assert record.payload["input_ids"].tolist().count(0) == in_text + in_front

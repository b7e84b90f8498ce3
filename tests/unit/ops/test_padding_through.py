"""Padding asked for in `tokenize` reaches the training view by lengths, never by token values."""

from typing import Any

import numpy as np
import pytest

from headrace import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from headrace.errors import OperatorError


class Letters:
    """A tokenizer in five lines: one id a letter."""

    bos_token_id, eos_token_id, pad_token_id = None, 5, 5

    def __call__(self, text: str) -> list[int]:
        return [ord(c) - 97 for c in text]


def batches(padding: Any, **settings: Any) -> list[Any]:
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"text": t} for t in ("ab", "f", "abcde", "fff")])})
    work = StaticMixtureWorkSource(datasets=[data], mixture={"toy": 1.0}, shuffle_shards=False)
    pipeline = Pipeline(work).tokenize(Letters(), field="text", special_tokens="eos", padding=padding, **settings)
    return list(pipeline.batch(2).options(runner="inline"))


@pytest.mark.parametrize("padding", [True, "longest"])
def test_longest_pads_to_the_longest_of_the_batch(padding: Any) -> None:
    first, second = (
        b.to_training(dtype=np.int64, return_labels=True, return_padding_mask=True) for b in batches(padding)
    )
    assert first["input_ids"].tolist() == [[0, 1], [5, 5]]
    assert first["labels"].tolist() == [[1, 5], [5, -100]], "the end token keeps its label though it equals the padding"
    assert second["input_ids"].tolist() == [[0, 1, 2, 3, 4], [5, 5, 5, 5, 5]]
    assert second["labels"].tolist() == [[1, 2, 3, 4, 5], [5, 5, 5, -100, -100]]


def test_max_length_pads_to_a_fixed_width() -> None:
    first, _ = (b.to_training(dtype=np.int64, return_padding_mask=True) for b in batches("max_length", max_length=6))
    assert first["input_ids"].tolist() == [[0, 1, 5, 5, 5, 5], [5, 5, 5, 5, 5, 5]]
    assert first["padding_mask"].sum(axis=1).tolist() == [3, 4]


def packed(then: Any) -> list[Any]:
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"input_ids": list(range(1, n))} for n in (4, 7)])})
    pipeline = Pipeline(StaticMixtureWorkSource(datasets=[data], mixture={"toy": 1.0}, shuffle_shards=False))
    pipeline.pack_flat(6, algorithm="wrap", pad_token_id=1)
    return list(then(pipeline).batch(2).options(runner="inline"))


def renamed(columns: dict[str, Any]) -> dict[str, Any]:
    assert not [name for name in columns if name.startswith("_")]
    return {**columns, "also": columns["input_ids"]}


@pytest.mark.parametrize(
    "then",
    [
        lambda p: p,
        lambda p: p.map_transform(lambda row: row),
        lambda p: p.map_transform(renamed).map_transform(renamed),
        lambda p: p.map_block(renamed),
        lambda p: p.map_block(lambda columns: (columns, [True] * len(columns["input_ids"]))),
        lambda p: p.filter(bool).map_transform(renamed).filter(bool),
    ],
)
def test_padding_of_packed_rows_passes_through_functions_that_keep_their_length(then: Any) -> None:
    (batch,) = packed(then)
    assert [record.meta.padding_length for record in batch.records] == [0, 3]
    view = batch.to_training(dtype=np.int64, return_labels=True, return_padding_mask=True)
    assert view["input_ids"].tolist() == [[1, 2, 3, 1, 2], [4, 5, 6, 1, 1]]
    assert view["labels"].tolist() == [[2, 3, 1, 2, 3], [5, 6, -100, -100, -100]]


def test_rows_that_a_function_cut_are_not_padded_any_more() -> None:
    def cut(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": row["input_ids"][:3]}

    (batch,) = packed(lambda p: p.map_transform(cut))
    assert [record.meta.padding_length for record in batch.records] == [0, 0]
    assert [list(record.payload["input_ids"]) for record in batch.records] == [[1, 2, 3], [4, 5, 6]]


def longer(row: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": [9, *row["input_ids"]]}


def longer_with_mask(row: dict[str, Any]) -> dict[str, Any]:
    ids = [9, *row["input_ids"]]
    return {"input_ids": ids, "attention_mask": [1] * (len(ids) - ids.count(1) if ids[1] == 4 else len(ids))}


def masked(row: dict[str, Any]) -> dict[str, Any]:
    ids = [9, *row["input_ids"]]
    kept = 4 if ids[1] == 4 else len(ids)
    return {"input_ids": ids, "attention_mask": [1] * kept + [0] * (len(ids) - kept)}


@pytest.mark.parametrize("call", ["map_transform", "map_block"])
def test_of_a_padded_row_that_was_cut_the_rest_of_the_padding_stays(call: str) -> None:
    def cut(row: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": row["input_ids"][:5]}

    def cut_all(columns: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": columns["input_ids"][:, :5]}

    (batch,) = packed(lambda p: getattr(p, call)(cut if call == "map_transform" else cut_all))
    view = batch.to_training(dtype=np.int64, return_labels=True, return_padding_mask=True)
    assert view["labels"].tolist() == [[2, 3, 1, 2], [5, 6, -100, -100]]


def test_a_mask_says_what_is_padding_in_rows_of_another_length() -> None:
    (batch,) = packed(lambda p: p.map_transform(masked))
    view = batch.to_training(dtype=np.int64, return_labels=True, return_padding_mask=True)
    assert view["input_ids"].tolist() == [[9, 1, 2, 3, 1, 2], [9, 4, 5, 6, 1, 1]]
    assert view["labels"].tolist() == [[1, 2, 3, 1, 2, 3], [4, 5, 6, -100, -100, -100]]


@pytest.mark.parametrize("change", [longer, longer_with_mask])
def test_padding_of_which_nothing_is_known_is_an_error(change: Any) -> None:
    with pytest.raises(OperatorError, match=r"7 tokens of the 6 of a padded row .*row 1\) and nothing says how many"):
        packed(lambda p: p.map_transform(change))


def padded(then: Any) -> list[list[int]]:
    """Labels of rows of 3 and 4 letters that are padded to 8, behind what `then` adds."""
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"text": t} for t in ("abc", "bcde")])})
    pipeline = Pipeline(StaticMixtureWorkSource(datasets=[data], mixture={"toy": 1.0}, shuffle_shards=False))
    pipeline.tokenize(Letters(), field="text", special_tokens="none", padding="max_length", max_length=8)
    (batch,) = then(pipeline).batch(2).options(runner="inline")
    return batch.to_training(dtype=np.int64, return_labels=True)["labels"].tolist()


LABELS = [[1, 2, *[-100] * 5], [2, 3, 4, *[-100] * 4]]


class Changed:
    """An operator on records."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def process_many(self, records: Any) -> Any:
        for record in records:
            record.payload = self.change(record.payload)
        return records


def without_mask(payload: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": payload["input_ids"]}


@pytest.mark.parametrize(
    "then",
    [
        lambda p: p,
        lambda p: p.select("input_ids"),
        lambda p: p.select("input_ids").select("input_ids").filter(bool),
        lambda p: p.map_transform(lambda row: {"tokens": row["input_ids"]}),
        lambda p: p.map_block(lambda columns: {"tokens": columns["input_ids"]}),
        lambda p: p.map_transform(without_mask).map_transform(lambda row: {"ids": list(row["input_ids"])}),
    ],
    ids=["plain", "select", "select_twice", "renamed", "renamed_columns", "renamed_later"],
)
def test_padding_of_tokenized_rows_stays_known(then: Any) -> None:
    assert padded(then) == LABELS


def test_a_selection_is_padded_to_the_longest_of_the_batch_as_well() -> None:
    data = Dataset.from_dict("toy", {0: InMemoryShard([{"text": t} for t in ("abc", "bcde")])})
    pipeline = Pipeline(StaticMixtureWorkSource(datasets=[data], mixture={"toy": 1.0}, shuffle_shards=False))
    pipeline.tokenize(Letters(), field="text", special_tokens="none", padding="longest").select("input_ids")
    (batch,) = pipeline.batch(2).options(runner="inline")
    assert batch.to_training(dtype=np.int64, return_labels=True)["labels"].tolist() == [[1, 2, -100], [2, 3, 4]]


def test_tokens_of_padded_rows_alone_are_an_error() -> None:
    with pytest.raises(OperatorError, match=r"made a payload without fields of a padded row .*row 0\)"):
        padded(lambda p: p.map_transform(lambda row: row["input_ids"]))


def cut(payload: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:6] for name, value in payload.items()}


@pytest.mark.parametrize("in_records", [False, True], ids=["operator", "records"])
def test_records_that_were_cut_are_read_off_their_mask_or_refused(in_records: bool) -> None:
    def labels(change: Any) -> list[list[int]]:
        if not in_records:
            return padded(lambda p: p.add_op(Changed(change)))
        data = Dataset.from_dict("toy", {0: InMemoryShard([{"text": t} for t in ("abc", "bcde")])})
        pipeline = Pipeline(StaticMixtureWorkSource(datasets=[data], mixture={"toy": 1.0}, shuffle_shards=False))
        pipeline.tokenize(Letters(), field="text", special_tokens="none", padding="max_length", max_length=8)
        (batch,) = pipeline.batch(2).options(runner="inline")
        for record in batch.records:
            record.payload = change(record.payload)
        return batch.to_training(dtype=np.int64, return_labels=True)["labels"].tolist()

    assert labels(lambda payload: payload) == LABELS
    assert labels(cut) == [[1, 2, -100, -100, -100], [2, 3, 4, -100, -100]]
    with pytest.raises(OperatorError, match=r"made 6 tokens of the 8 of a padded row .*row 0\)"):
        labels(lambda payload: {"input_ids": payload["input_ids"][:6]})


@pytest.mark.parametrize("algorithm", ["wrap", "best_fit", "best_fit_wrap"])
def test_packing_leaves_padding_out(algorithm: str) -> None:
    def rows(padding: Any, **settings: Any) -> list[Any]:
        data = Dataset.from_dict("toy", {0: InMemoryShard([{"text": t} for t in ("abc", "bcde", "", "f")])})
        pipeline = Pipeline(StaticMixtureWorkSource(datasets=[data], mixture={"toy": 1.0}, shuffle_shards=False))
        pipeline.tokenize(Letters(), field="text", special_tokens="eos", padding=padding, **settings)
        bins = {"num_bins": 2} if algorithm == "best_fit" else {}
        pipeline.pack_flat(8, algorithm=algorithm, pad_token_id=9, **bins)
        (batch,) = pipeline.batch(2, drop_last=False).options(runner="inline")
        return [(record.payload["input_ids"].tolist(), record.meta.padding_length) for record in batch.records]

    assert rows("max_length", max_length=8) == rows("longest") == rows(False)
    assert sum(padding for _, padding in rows("max_length", max_length=8)) == 16 - 12

"""Padding asked for in `tokenize` reaches the training view by lengths, never by token values."""

from typing import Any

import numpy as np
import pytest

from headrace import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource


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

"""What every loader offers the harness, and the parts that the hand-written ones share.

A loader is built from a workload ("W1", "W2", "W3") and options, and yields batches:

    W1, W3   int64 torch tensors [8, 2048]
    W2       32 texts
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from ..formats import gpt2_encoding
from ..paths import BATCH, EOS, SEQ, TOKENIZER_JSON

Options = dict[str, Any]
Encode = Callable[[list[str]], list[list[int]]]
FlatEncode = Callable[[list[str]], tuple[np.ndarray, np.ndarray]]


class Loader:
    """Base of all loaders: the harness calls `build`, `restore` if resuming, `iterate`, then `count` on each batch."""

    def __init__(self, workload: str, options: Options) -> None:
        self.workload = workload
        self.options = options

    def build(self) -> None:
        """Construct the pipeline; importing the library happened with the loader's module."""

    def iterate(self) -> Iterator[Any]:
        """A new pass over the data."""
        raise NotImplementedError

    def count(self, batch: Any) -> tuple[int, int]:
        """(records, tokens or characters) of a batch, after reading every value as a training step would."""
        if self.workload == "W2":
            return len(batch), sum(map(len, batch))
        batch.sum().item()
        return batch.shape[0], batch.numel()

    def digest(self, batch: Any) -> str:
        """Hash of a W1 batch: equal before and after a resume if the resume is exact."""
        return hashlib.sha1(batch.numpy().astype(np.int32).tobytes()).hexdigest()

    def state(self) -> Any:
        """What to save now, or None if the loader cannot resume."""
        return None

    def restore(self, state: Any) -> None:
        """Take a state before `iterate`."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop workers; the harness ends what is left."""


def list_encoder(name: str, threads: int = 1) -> Encode:
    """`hf` (the tokenizers library) or `tiktoken`: a batch of texts to lists of ids."""
    if name == "tiktoken":
        encoding = gpt2_encoding()
        return lambda texts: encoding.encode_ordinary_batch(texts, num_threads=threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER_JSON))
    return lambda texts: [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def flat_encoder(name: str) -> FlatEncode:
    """As `list_encoder`, but all ids in one array, with document offsets: how `gigatoken` and `fastokens` give them."""
    if name == "fastokens":
        import fastokens

        quick = fastokens.Tokenizer.from_file(str(TOKENIZER_JSON))

        def encode_flat(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
            ids, offsets = quick.encode_batch_flat(texts)
            return np.frombuffer(ids, np.int32), np.frombuffer(offsets, np.int64)

        return encode_flat
    if name == "gigatoken":
        import gigatoken

        tokenizer = gigatoken.Tokenizer.from_json(TOKENIZER_JSON.read_text(encoding="utf-8"))

        def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
            layout = tokenizer.encode_batch(texts, parallel=False).layout
            return np.asarray(layout.content.data), np.asarray(layout.offsets.data)

        return encode
    one = list_encoder(name)

    def encode_lists(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        lists = one(texts)
        offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in lists])])
        return np.fromiter(chain.from_iterable(lists), np.int32, count=int(offsets[-1])), offsets

    return encode_lists


class Packer:
    """Joins documents with EOS after each and cuts rows of 2048: the loop a person writes for a library without one."""

    def __init__(self) -> None:
        self.need = BATCH * SEQ
        self.buffer = np.empty(self.need * 2 + 4_000_000, np.int64)
        self.used = 0

    def add(self, ids: Any) -> Iterator[np.ndarray]:
        end = self.used + len(ids)
        self.buffer[self.used : end] = ids
        self.buffer[end] = EOS
        self.used = end + 1
        while self.used >= self.need:
            out = self.buffer[: self.need].copy().reshape(BATCH, SEQ)
            rest = self.used - self.need
            self.buffer[:rest] = self.buffer[self.need : self.used].copy()
            self.used = rest
            yield out


def tokenize_and_pack(texts: Iterable[str], encode: Encode, group: int) -> Iterator[Any]:
    """Texts to int64 batches in one process or worker: `group` texts an encoder call."""
    import torch

    packer, waiting = Packer(), []
    for text in texts:
        waiting.append(text)
        if len(waiting) == group:
            for ids in encode(waiting):
                yield from map(torch.from_numpy, packer.add(ids))
            waiting = []

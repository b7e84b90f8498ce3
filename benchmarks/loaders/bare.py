"""Reference points without any pipeline: what the parts alone reach, with nothing exact about order and nothing resumable.

W1  the encoder alone on texts already in memory, one encoder a thread.               tok, threads
W1  whole=true: decode, encode, pack and widen in the plainest way, two threads.      tok, threads, fmt
W2  the decoder alone: shards to lists of str, 24 of web and 8 of code a batch.       fmt
W3  a gather of 8 memory-mapped rows in random order, widened to int64.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import torch

from ..paths import BATCH, EOS, PACKED, SEQ, TEXT_BATCH, shards
from .base import FlatEncode, Loader, flat_encoder

GROUP = 128
"""Texts an encoder call: large enough that a hop between threads does not show."""
IN_MEMORY = 58_000
"""Texts of one pass: three quarters of them are nearly the whole `web` corpus."""


class TextOnly(msgspec.Struct):
    text: str


def decoded(corpus: str, fmt: str) -> Iterator[list[str]]:
    """The texts of one shard (JSONL) or row group (Parquet) after another."""
    decoder = msgspec.json.Decoder(TextOnly)
    for path in shards(corpus, fmt):
        if fmt == "jsonl":
            with open(path, "rb") as file:
                yield [record.text for record in decoder.decode_lines(file.read())]
        else:
            file = pq.ParquetFile(path)
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=["text"], use_threads=False)
                yield table.column(0).to_pylist()


def groups(corpus: str, fmt: str, size: int) -> Iterator[list[str]]:
    held: list[str] = []
    for texts in decoded(corpus, fmt):
        held += texts
        whole = len(held) // size * size
        yield from (held[i : i + size] for i in range(0, whole, size))
        held = held[whole:]


def mixed(fmt: str, size: int) -> Iterator[list[str]]:
    """Lists of `size` texts, three quarters of them web, until one corpus ends."""
    for web, code in zip(groups("web", fmt, size * 3 // 4), groups("code", fmt, size // 4), strict=False):
        yield web + code


def encoded(texts: Iterable[list[str]], tok: str, threads: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Flat ids and offsets of each group, in order, with one encoder a thread."""
    free: SimpleQueue[FlatEncode] = SimpleQueue()
    for _ in range(max(1, threads)):
        free.put(flat_encoder(tok))

    def encode(group: list[str]) -> tuple[np.ndarray, np.ndarray]:
        encoder = free.get()
        try:
            return encoder(group)
        finally:
            free.put(encoder)

    if threads == 0:
        yield from map(encode, texts)
        return
    with ThreadPoolExecutor(threads) as pool:
        source = iter(texts)
        running = deque(pool.submit(encode, group) for group in islice(source, 2 * threads + 2))
        while running:
            yield running.popleft().result()
            running.extend(pool.submit(encode, group) for group in islice(source, 1))


def packed(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[Any]:
    """EOS after each document, rows of 2048, int64 batches of 8."""
    need, held, length = BATCH * SEQ, [], 0
    for values, offsets in parts:
        held.append(np.insert(values, offsets[1:], EOS))
        length += len(held[-1])
        if length >= need:
            joined = np.concatenate(held)
            whole = length // need * need
            for i in range(0, whole, need):
                yield torch.from_numpy(joined[i : i + need].astype(np.int64)).view(BATCH, SEQ)
            held, length = [joined[whole:]], length - whole


class Bare(Loader):
    def build(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        os.environ["RAYON_NUM_THREADS"] = "1"
        if self.workload == "W1" and not self.options.get("whole"):
            self.texts = list(islice(mixed("jsonl", GROUP), IN_MEMORY // GROUP))

    def iterate(self) -> Iterator[Any]:
        options = self.options
        if self.workload == "W3":
            return self.gather()
        if self.workload == "W2":
            return mixed(options.get("fmt", "parquet"), TEXT_BATCH)
        tok, threads = options.get("tok", "gigatoken"), options.get("threads", 2)
        if options.get("whole"):
            return packed(encoded(mixed(options.get("fmt", "jsonl"), GROUP), tok, threads))
        return encoded(self.texts, tok, threads)

    def gather(self) -> Iterator[Any]:
        rows = np.memmap(PACKED / "bin" / "tokens.i32", np.int32, "r").reshape(-1, SEQ)
        order = np.random.default_rng(42).permutation(len(rows))
        for i in range(0, len(order) - BATCH + 1, BATCH):
            yield torch.from_numpy(rows[order[i : i + BATCH]]).long()

    def count(self, batch: Any) -> tuple[int, int]:
        if isinstance(batch, tuple):
            values, offsets = batch
            return len(offsets) - 1, len(values)
        return super().count(batch)


LOADER = Bare

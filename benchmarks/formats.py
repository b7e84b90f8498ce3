"""The same text and the same packed rows in each format that a peer reads best. Runs inside the peers' environments.

    python -m benchmarks.formats packed | array_record | wds | arrow | litdata     (environment `peers`)
    python -m benchmarks.formats mds                                               (environment `streaming`)

`packed` tokenizes both corpora (25 % code, 75 % web, by documents) with tiktoken and cuts them into rows of 2048 ids; every
other format is a copy of those rows, or of the JSONL text.
"""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .paths import DATA, EOS, MIX, NUM_SHARDS, PACKED, SEQ, TIKTOKEN_RANKS, shards

NUM_ROWS = 40_000
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def gpt2_encoding() -> Any:
    """tiktoken's encoder over the GPT-2 ranks; ids equal to those of tokenizer.json on text without special tokens."""
    import tiktoken

    lines = TIKTOKEN_RANKS.read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    special = {"<|endoftext|>": EOS}
    return tiktoken.Encoding("gpt2-local", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def records(path: str) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        yield from map(json.loads, file)


def texts(corpus: str) -> list[str]:
    return [record["text"] for path in shards(corpus, "jsonl") for record in records(path)]


def fresh(where: Path) -> Path:
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir(parents=True)
    return where


def packed_shards() -> Iterator[tuple[str, np.ndarray]]:
    """(shard number, rows int32 [n, 2048]) of the prepacked data."""
    for path in shards("packed", "npy"):
        yield Path(path).stem, np.load(path)


def make_packed() -> None:
    """Tokenize the mixture once; write int32 rows as .npy, one raw file, and Parquet (default and uncompressed)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    web, code = texts("web"), texts("code")
    documents = web + code[: int(len(web) * MIX["code"] / MIX["web"])]
    random.Random(7).shuffle(documents)
    encoding, parts, total = gpt2_encoding(), [], 0
    for i in range(0, len(documents), 1024):
        for ids in encoding.encode_ordinary_batch(documents[i : i + 1024], num_threads=2):
            parts.append(np.array([*ids, EOS], np.int32))
            total += len(ids) + 1
        if total >= NUM_ROWS * SEQ:
            break
    num_rows = min(NUM_ROWS, total // SEQ)
    rows = np.concatenate(parts)[: num_rows * SEQ].reshape(num_rows, SEQ)
    where = {name: fresh(PACKED / name) for name in ("npy", "parquet", "parquet_plain", "bin")}
    for k in range(NUM_SHARDS):
        part = rows[k * num_rows // NUM_SHARDS : (k + 1) * num_rows // NUM_SHARDS]
        np.save(where["npy"] / f"{k:05d}.npy", part)
        table = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(pa.array(part.reshape(-1)), SEQ)})
        plain: dict[str, Any] = {"compression": "none", "use_dictionary": False}
        pq.write_table(table, where["parquet"] / f"{k:05d}.parquet", row_group_size=256)
        pq.write_table(table, where["parquet_plain"] / f"{k:05d}.parquet", row_group_size=256, **plain)
    rows.tofile(where["bin"] / "tokens.i32")
    (PACKED / "stats.json").write_text(json.dumps({"rows": num_rows, "seq": SEQ}))
    print("packed", num_rows, "rows", flush=True)


def make_array_record() -> None:
    """ArrayRecord, the random-access format of grain: one JSON line or one raw row a record."""
    from array_record.python.array_record_module import ArrayRecordWriter

    def save(where: Path, stem: str, blobs: Iterator[bytes]) -> None:
        writer = ArrayRecordWriter(str(where / f"{stem}.arrayrecord"), "group_size:1,uncompressed")
        for blob in blobs:
            writer.write(blob)
        writer.close()

    for corpus in MIX:
        where = fresh(DATA / corpus / "array_record")
        for path in shards(corpus, "jsonl"):
            with open(path, "rb") as file:
                save(where, Path(path).stem, (line.rstrip(b"\n") for line in file))
    where = fresh(PACKED / "array_record")
    for stem, rows in packed_shards():
        save(where, stem, (row.tobytes() for row in rows))


def make_wds() -> None:
    """Tar shards of webdataset: one .txt or one .npy a sample."""

    def save(where: Path, stem: str, suffix: str, blobs: Iterator[bytes]) -> None:
        with tarfile.open(where / f"{stem}.tar", "w") as archive:
            for i, blob in enumerate(blobs):
                info = tarfile.TarInfo(f"{stem}{i:06d}.{suffix}")
                info.size = len(blob)
                archive.addfile(info, io.BytesIO(blob))

    def npy(row: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, row)
        return buffer.getvalue()

    for corpus in MIX:
        where = fresh(DATA / corpus / "wds")
        for path in shards(corpus, "jsonl"):
            save(where, Path(path).stem, "txt", (record["text"].encode() for record in records(path)))
    where = fresh(PACKED / "wds")
    for stem, rows in packed_shards():
        save(where, stem, "npy", (npy(row) for row in rows))


def make_arrow() -> None:
    """The packed rows as a `datasets` folder (memory-mapped Arrow)."""
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    rows = np.concatenate([rows for _, rows in packed_shards()])
    table = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), SEQ)})
    datasets.Dataset(table).save_to_disk(str(fresh(PACKED / "arrow")), num_shards=NUM_SHARDS)


def rows_as_tensors(path: str) -> Iterator[Any]:
    import torch

    for row in np.load(path):
        yield torch.from_numpy(row.copy())


def text_records(path: str) -> Iterator[dict[str, str]]:
    for record in records(path):
        yield {key: record[key] for key in ("text", "id", "url")}


def make_litdata() -> None:
    """litdata's optimized chunks: its token loader for the packed rows, records for the text."""
    import litdata

    common: dict[str, Any] = {"num_workers": 1, "start_method": "fork"}
    loader = litdata.TokensLoader(block_size=SEQ)
    where = str(fresh(PACKED / "litdata"))
    litdata.optimize(
        fn=rows_as_tensors,
        inputs=shards("packed", "npy"),
        output_dir=where,
        chunk_size=SEQ * 2560,
        item_loader=loader,
        **common,
    )
    for corpus in MIX:
        where = str(fresh(DATA / corpus / "litdata"))
        litdata.optimize(
            fn=text_records, inputs=shards(corpus, "jsonl"), output_dir=where, chunk_bytes="12MB", **common
        )


def make_mds() -> None:
    """MosaicML streaming's MDS shards of rows and of text."""
    from .loaders.streaming_env import import_streaming

    writer = import_streaming().MDSWriter
    columns = {"input_ids": f"ndarray:int32:{SEQ}"}
    with writer(out=str(fresh(PACKED / "mds")), columns=columns, size_limit=21 << 20) as out:
        for _, rows in packed_shards():
            for row in rows:
                out.write({"input_ids": row})
    for corpus in MIX:
        columns = {"text": "str", "id": "str", "url": "str"}
        with writer(out=str(fresh(DATA / corpus / "mds")), columns=columns, size_limit=12 << 20) as out:
            for path in shards(corpus, "jsonl"):
                for record in text_records(path):
                    out.write(record)


MAKERS: dict[str, Callable[[], None]] = {
    "packed": make_packed,
    "array_record": make_array_record,
    "wds": make_wds,
    "arrow": make_arrow,
    "litdata": make_litdata,
    "mds": make_mds,
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        MAKERS[name]()

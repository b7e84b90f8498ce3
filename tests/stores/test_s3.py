"""Datasets in S3, from a real server: no options, range reads, workers, retries, and errors that say what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from obstore.store import S3Store

from headrace.core.block import to_list
from headrace.errors import DataChangedError, FormatError
from headrace.io import Dataset

pytestmark = pytest.mark.slow
TEXT = frozenset({"text"})
TEXTS = [f"row {i} " + "x" * (i % 900) for i in range(4000)]
LINES = "".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(TEXTS)).encode()


def _texts(reader: Any, shard: int, rows: list[int]) -> list[str]:
    return to_list(reader.read(shard, np.array(rows), TEXT)["text"])


def _url(bucket: S3Store, rest: str) -> str:
    return f"s3://{bucket.config['bucket']}/{rest}"


def test_every_format_with_no_options(bucket: S3Store, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS, "id": range(4000)}), tmp_path / "a.parquet", row_group_size=500)
    obstore.put(bucket, "j/a.jsonl", LINES)
    obstore.put(bucket, "z/a.jsonl.zst", zstandard.ZstdCompressor().compress(LINES))
    obstore.put(bucket, "p/a.parquet", (tmp_path / "a.parquet").read_bytes())
    order = [3999, 0, 1, 2, 2, 2500, 1200]
    for enabled in (False, True):
        for folder in ("j", "z", "p"):
            options = {"cache": {"enabled": True}} if enabled else None
            data = Dataset.from_path("d", _url(bucket, folder), options=options)
            assert data.total() == 4000
            assert _texts(data.open(), 0, order) == [TEXTS[i] for i in order]


def test_more_keys_than_one_listing_holds(bucket: S3Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: obstore.put(bucket, f"many/{i:05}.jsonl", b'{"text": "%d"}\n' % i), range(1100)))
    data = Dataset.from_path("d", _url(bucket, "many"))
    assert data.counts().tolist() == [1] * 1100
    assert data.shard_names[1099] == "01099.jsonl"
    assert _texts(data.open(), 1099, [0]) == ["1099"]


def test_threads_and_a_worker_process(bucket: S3Store) -> None:
    obstore.put(bucket, "t/a.jsonl", LINES)
    data = Dataset.from_path("d", _url(bucket, "t"), options={"read_block_bytes": "64kb"})
    reader = data.open()
    with ThreadPoolExecutor(8) as pool:
        runs = [list(range(a, a + 100)) for a in range(0, 4000, 100)]
        assert list(pool.map(lambda rows: _texts(reader, 0, rows), runs)) == [[TEXTS[i] for i in rows] for rows in runs]
    code = (
        "import pickle, sys, numpy as np; data = pickle.load(sys.stdin.buffer);"
        "print(data.open().read(0, np.array([17]), frozenset({'id'})))"
    )
    import cloudpickle

    run = subprocess.run(
        [sys.executable, "-c", code], input=cloudpickle.dumps(data), capture_output=True, timeout=120, check=False
    )
    assert run.stdout.decode().strip() == "{'id': [17]}", run.stderr.decode()


def test_an_object_replaced_under_the_run(bucket: S3Store) -> None:
    obstore.put(bucket, "r/a.jsonl", LINES)
    data = Dataset.from_path("d", _url(bucket, "r"), options={"read_block_bytes": 4096})
    reader = data.open()
    _texts(reader, 0, [0])
    obstore.put(bucket, "r/a.jsonl", LINES.replace(b"row 3999", b"row 9993"))
    for stale in (reader, data.open()):
        with pytest.raises(DataChangedError, match=r"a\.jsonl"):
            _texts(stale, 0, [3999])


def test_wrong_secret_and_missing_bucket(bucket: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    obstore.put(bucket, "w/a.jsonl", LINES)
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        Dataset.from_path("d", _url(bucket, "w/none.jsonl"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(FormatError, match=r"credentials in the environment"):
        Dataset.from_path("d", _url(bucket, "w"))


class _BadLine(threading.Thread):
    """A TCP line to the server that breaks every third connection after its first bytes."""

    def __init__(self, server: str) -> None:
        super().__init__(daemon=True)
        host, port = server.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.broken = self.made = 0

    def run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.made += 1
            limit = 2000 if self.made % 3 == 0 else None
            server = socket.create_connection(self._target)
            for a, b, most in ((client, server, None), (server, client, limit)):
                threading.Thread(target=self._pump, args=(a, b, most), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, most: int | None) -> None:
        sent = 0
        try:
            while data := source.recv(4096):
                sink.sendall(data)
                sent += len(data)
                if most is not None and sent > most:
                    self.broken += 1
                    break
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def bad_line(s3_server: str) -> Iterator[_BadLine]:
    line = _BadLine(s3_server)
    line.start()
    yield line
    line.close()


def test_broken_connections_are_tried_again(
    bucket: S3Store, bad_line: _BadLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstore.put(bucket, "b/a.jsonl", LINES)
    monkeypatch.setenv("AWS_ENDPOINT_URL", bad_line.url)
    data = Dataset.from_path("d", _url(bucket, "b"), options={"read_block_bytes": "64kb"})
    with ThreadPoolExecutor(6) as pool:
        reader = data.open()
        runs = [list(range(a, a + 50)) for a in range(0, 4000, 50)]
        assert list(pool.map(lambda rows: _texts(reader, 0, rows), runs)) == [[TEXTS[i] for i in rows] for rows in runs]
    assert bad_line.broken > 0
    assert os.environ["AWS_ENDPOINT_URL"] == bad_line.url

"""Range reads from stores behind URLs: in memory, and over HTTP from a server that serves ranges."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.core.block import to_list
from headrace.errors import ConfigError, DataChangedError, FormatError
from headrace.io import Dataset
from headrace.io.object_store import BlockFile, memory_store

TEXT = frozenset({"text"})
TEXTS = [f"row {i} " + "é" * (i % 40) for i in range(300)]
LINES = "".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode()


def _parquet(path: Path) -> bytes:
    pq.write_table(pa.table({"text": TEXTS, "n": range(300)}), path, row_group_size=64)
    return path.read_bytes()


def _read(data: Dataset, rows: list[int], shard: int = 0) -> list[str]:
    got: Any = data.open().read(shard, np.array(rows), TEXT)
    return to_list(got["text"])


@pytest.mark.parametrize("enabled", [False, True])
def test_every_format_from_a_store(tmp_path: Path, enabled: bool, request: pytest.FixtureRequest) -> None:
    name = f"every{enabled}".lower()
    store = memory_store(name)
    np.save(tmp_path / "a.npy", np.arange(20).reshape(5, 4))
    for key, content in {
        "j/b.jsonl": LINES,
        "j/a/c.jsonl": LINES[: len(LINES) // 2].rpartition(b"\n")[0],
        "j/.hidden.jsonl": LINES,
        "j/_tmp/d.jsonl": LINES,
        "g/a.jsonl.gz": gzip.compress(LINES),
        "p/a.parquet": _parquet(tmp_path / "a.parquet"),
        "n/a.npy": (tmp_path / "a.npy").read_bytes(),
    }.items():
        obstore.put(store, key, content)
    options = {"cache": {"enabled": enabled}}
    order = [299, 0, 1, 2, 2, 150]
    for folder in ("j", "g", "p"):
        data = Dataset.from_path("d", f"memory://{name}/{folder}", options=options)
        assert _read(data, order, data.shard_count() - 1) == [TEXTS[i] for i in order]
    data = Dataset.from_path("d", f"memory://{name}/j", options=options)
    assert data.shard_names == ("a/c.jsonl", "b.jsonl")
    one = Dataset.from_path("d", f"memory://{name}/j/b.jsonl", options=options)
    assert (one.shard_names, one.total()) == (("b.jsonl",), 300)
    both = Dataset.from_files("d", [f"memory://{name}/j/b.jsonl", f"memory://{name}/j/a/c.jsonl"], options=options)
    assert both.shard_names == ("a/c.jsonl", "b.jsonl")
    if enabled:
        rows = Dataset.from_path("d", f"memory://{name}/n", options=options).open().read(0, np.array([4, 0]), None)
        assert rows["input_ids"].tolist() == [[16, 17, 18, 19], [0, 1, 2, 3]]
    else:
        with pytest.raises(ConfigError, match="memory-mapped"):
            Dataset.from_path("d", f"memory://{name}/n")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_an_object_that_is_replaced_is_an_error(tmp_path: Path, name: str) -> None:
    store = memory_store("replaced")
    content = LINES if name.endswith("jsonl") else _parquet(tmp_path / "a.parquet")
    obstore.put(store, name, content)
    data = Dataset.from_path("d", f"memory://replaced/{name}", options={"read_block_bytes": 4096})
    reader = data.open()
    reader.read(0, np.array([0]), TEXT)
    obstore.put(store, name, content)  # the same bytes, another ETag
    for stale in (reader, data.open()):
        with pytest.raises(DataChangedError, match="memory://replaced/" + name):
            stale.read(0, np.array([299]), frozenset({"n"}))
    obstore.delete(store, name)
    with pytest.raises(DataChangedError, match="is gone"):
        data.open().read(0, np.array([0]), TEXT)


def test_wrong_places() -> None:
    with pytest.raises(ConfigError, match="no store for ftp://"):
        Dataset.from_path("d", "ftp://host/x")
    with pytest.raises(ConfigError, match="no files of a known format"):
        Dataset.from_path("d", "memory://empty/x")
    with pytest.raises(FileNotFoundError, match=r"memory://empty/x\.jsonl"):
        Dataset.from_path("d", "memory://empty/x.jsonl")
    for paths in (["/a/b.jsonl", "memory://m/b.jsonl"], ["memory://m/b.jsonl", "s3://m/c.jsonl"]):
        with pytest.raises(ConfigError, match="mix"):
            Dataset.from_files("d", paths)


def test_neighbouring_reads_share_a_request() -> None:
    class Counted:
        path, size, local_path, requests = "x", 100_000, None, 0
        data = bytes(range(250)) * 400

        def read(self, start: int, stop: int) -> bytes:
            self.requests += 1
            return self.data[start:stop]

        def check(self) -> None:
            pass

    file = Counted()
    blocks = BlockFile(file, 4096)
    parts = [blocks.read(a, a + 100) for a in range(0, 100_000, 100)]
    assert b"".join(parts) == file.data
    assert file.requests == 25
    assert blocks.read(4000, 9000) == file.data[4000:9000]


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD with ranges, as file servers do."""

    files: dict[str, bytes]
    faults: list[str]
    """What the next requests meet, one each."""
    tag = '"1"'
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        content = self.files.get(self.path)
        fault = self.faults.pop(0) if self.faults else ""
        if fault.isdigit():
            self.send_response(int(fault))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if content is None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        part = content
        if value := self.headers.get("Range"):
            first, last = value.removeprefix("bytes=").split("-")
            part = content[int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
            if fault == "short":
                part = part[:-9]
        else:
            self.send_response(200)
        self.send_header("ETag", self.tag)
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if body and fault == "broken":
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
        elif body:
            self.wfile.write(part)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def handler() -> type[_Handler]:
    return type("Handler", (_Handler,), {"faults": []})


@pytest.fixture
def web(tmp_path: Path, handler: type[_Handler]) -> Iterator[str]:
    handler.files = {
        "/data/a.jsonl": LINES,
        "/data/b.jsonl.gz": gzip.compress(LINES),
        "/data/c.parquet": _parquet(tmp_path / "c"),
        "/data/get": LINES,
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/data"
    server.shutdown()
    thread.join()
    server.server_close()


def test_http(web: str) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        data = Dataset.from_path("d", f"{web}/{name}")
        assert data.total() == 300
        assert _read(data, [5, 299, 0]) == [TEXTS[5], TEXTS[299], TEXTS[0]]
    assert _read(Dataset.from_path("d", f"{web}/get", fmt="jsonl"), [7]) == [TEXTS[7]]
    files = Dataset.from_files("d", [f"{web}/b.jsonl.gz", f"{web}/a.jsonl"])
    assert files.shard_names == ("a.jsonl", "b.jsonl.gz")
    with pytest.raises(ConfigError, match=r"Dataset\.from_files"):
        Dataset.from_path("d", web)
    with pytest.raises(FileNotFoundError):
        Dataset.from_path("d", f"{web}/none.jsonl")
    with pytest.raises(FormatError, match="cannot be read"):
        Dataset.from_path("d", "http://127.0.0.1:9/none.jsonl", options={"cache": {"download_retry": 0}})


@pytest.mark.parametrize(
    "faults",
    [
        ["500", "503", "429"],  # the first question of all, about size and ETag
        ["", "", "short", "short"],
        ["", "", "broken", "502"],
    ],
)
def test_faults_of_a_moment_are_tried_again(web: str, handler: type[_Handler], faults: list[str]) -> None:
    handler.faults = list(faults)
    data = Dataset.from_path("d", f"{web}/a.jsonl")
    assert _read(data, list(range(300))) == TEXTS
    assert not handler.faults


def test_answers_that_stay_short_are_an_error_with_both_numbers(web: str, handler: type[_Handler]) -> None:
    handler.faults = ["", "", *["short"] * 20]
    with pytest.raises(
        DataChangedError, match=rf"gave {len(LINES) - 9}, .*range 0-{len(LINES)}, which has {len(LINES)}"
    ):
        Dataset.from_path("d", f"{web}/a.jsonl")


@pytest.mark.parametrize("weak", ["", "W/"])
def test_a_server_that_does_not_mind_if_match(web: str, handler: type[_Handler], weak: str) -> None:
    handler.tag = f'{weak}"1"'
    reader = Dataset.from_path("d", f"{web}/a.jsonl", options={"read_block_bytes": 4096}).open()
    reader.read(0, np.array([0]), TEXT)
    handler.files["/data/a.jsonl"] = LINES.replace(b"row 299", b"row 992")
    handler.tag = f'{weak}"2"'
    with pytest.raises(DataChangedError, match=r"a\.jsonl was replaced while it was read"):
        reader.read(0, np.array([299]), TEXT)


def test_the_server_s_own_words_are_told(web: str, monkeypatch: pytest.MonkeyPatch, handler: type[_Handler]) -> None:
    body = (
        b'<?xml version="1.0"?>\n<Error><Code>RequestTimeTooSkewed</Code><Message>Your clock is off.</Message>'
        b"<RequestId>7</RequestId></Error>"
    )

    def refuse(self: Any) -> None:
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    monkeypatch.setattr(handler, "do_GET", refuse)
    for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s"), ("REGION", "r")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", web.removesuffix("/data"))
    with pytest.raises(FormatError, match=r"403 Forbidden: RequestTimeTooSkewed: Your clock is off\. .*clock of this"):
        Dataset.from_path("d", "s3://bucket/data")


def test_a_folder_named_like_a_file() -> None:
    obstore.put(memory_store("named"), "out.jsonl/part-0.jsonl", LINES)
    for url in ("memory://named/out.jsonl", "memory://named/out.jsonl/"):
        assert Dataset.from_path("d", url).shard_names == ("part-0.jsonl",)

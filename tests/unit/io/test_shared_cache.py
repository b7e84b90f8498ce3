"""A cache folder, or indexes beside the data, that several users share: what one has made, others read."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.io import Dataset
from headrace.io.cache import locked, writing

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")

NOBODY = 65534
READ = """
import os, sys, json, logging
import numpy as np
import headrace.io.formats.jsonl, headrace.io.formats.parquet
from headrace.io import Dataset
os.setegid({uid}); os.seteuid({uid})
data = Dataset.from_path("d", sys.argv[1], options=json.loads(sys.argv[2]))
print(data.total(), data.open().read(0, np.arange(2), frozenset(["n"])))
"""


def read_as_another(path: Path, cache: Path, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HEADRACE_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", READ.format(uid=NOBODY), str(path), json.dumps({"cache": options})]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def open_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that everybody may read (pytest's are private), with the usual umask."""
    before = os.umask(0o022)
    folder = Path(tempfile.mkdtemp(prefix="headrace-shared-"))
    folder.chmod(0o755)
    (folder / "cache").mkdir()
    (folder / "data").mkdir()
    monkeypatch.setenv("HEADRACE_CACHE", str(folder / "cache"))
    yield folder
    os.umask(before)
    shutil.rmtree(folder)


def rows(path: Path, count: int = 3) -> Path:
    path.write_text("".join(f'{{"n": {i}}}\n' for i in range(count)))
    return path


SEEN = "3 {'n': [0, 1]}\n"


@pytest.mark.parametrize("mode", [0o755, 0o1777])
@pytest.mark.parametrize("beside", [False, True])
def test_another_user_reads_with_the_index_that_is_there(open_folder: Path, mode: int, beside: bool) -> None:
    path = rows(open_folder / "data" / "a.jsonl")
    for name in ("cache", "data"):
        (open_folder / name).chmod(mode)
    Dataset.from_path("d", path, options={"cache": {"index_beside": beside}})
    done = read_as_another(path, open_folder / "cache", index_beside=beside)
    assert done.stdout == SEEN, done.stderr
    assert not done.stderr


def test_an_index_that_may_not_be_read_is_none(open_folder: Path) -> None:
    path = rows(open_folder / "data" / "a.jsonl")
    (open_folder / "cache").chmod(0o1777)
    Dataset.from_path("d", path)
    for index in (open_folder / "cache" / "index").iterdir():
        index.chmod(0o600)
    done = read_as_another(path, open_folder / "cache")
    assert done.stdout == SEEN, done.stderr
    assert "cannot be kept" in done.stderr


@pytest.mark.parametrize("beside", [False, True])
def test_an_index_that_cannot_be_kept_is_made_for_the_run(open_folder: Path, beside: bool) -> None:
    path = rows(open_folder / "data" / "a.jsonl")
    (open_folder / "cache").chmod(0o1777)
    (open_folder / "cache" / "index").mkdir()
    done = read_as_another(path, open_folder / "cache", index_beside=beside)
    assert done.stdout == SEEN, done.stderr
    assert done.stderr.count("cannot be kept") == 1 + beside and str(open_folder / "cache" / "index") in done.stderr


def test_an_index_that_cannot_be_beside_its_file_is_kept_in_the_cache_folder(open_folder: Path) -> None:
    path = rows(open_folder / "data" / "a.jsonl")
    (open_folder / "cache").chmod(0o1777)
    for _ in range(2):
        done = read_as_another(path, open_folder / "cache", index_beside=True)
        assert done.stdout == SEEN, done.stderr
    assert len(list((open_folder / "cache" / "index").iterdir())) == 1


def test_copies_are_shared(open_folder: Path) -> None:
    path = open_folder / "data" / "a.jsonl.gz"
    path.write_bytes(gzip.compress(rows(open_folder / "a.jsonl").read_bytes()))
    Dataset.from_path("d", path)
    for folder in (open_folder / "cache", open_folder / "cache" / "copies"):
        folder.chmod(0o1777)
    done = read_as_another(path, open_folder / "cache")
    assert done.stdout == SEEN, done.stderr


def test_a_lock_file_of_another_user_locks(open_folder: Path) -> None:
    path = open_folder / "cache" / "a.lock"
    (open_folder / "cache").chmod(0o1777)
    with locked(path):
        pass
    os.seteuid(NOBODY)
    try:
        with locked(path):
            pass
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_mode_that_the_umask_says(open_folder: Path, mask: int, mode: int) -> None:
    os.umask(mask)
    with writing(open_folder / "x") as out:
        out.write(b"x")
    assert (open_folder / "x").stat().st_mode & 0o777 == mode

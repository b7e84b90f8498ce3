"""Build newline indexes ahead of time, so that the first run on every machine that shares the cache starts at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from headrace.io.dataset import Dataset, Options


@dataclass(frozen=True, slots=True)
class IndexReport:
    """What is indexed now."""

    format: str
    shards: int
    rows: int
    bytes: int


def build_index(path: str | os.PathLike[str], fmt: str | None = None, options: Options = None) -> IndexReport:
    """Count every shard below `path`, and keep the indexes of those that need one (JSONL).

    Indexes that are there already and fit their files are kept. Formats with a footer or a header need none; they are only
    checked. Errors are those of `Dataset.from_path`.
    """
    data: Any = Dataset.from_path("index", path, fmt, options)
    return IndexReport(data.format, data.shard_count(), data.total(), int(data.raw_bytes().sum()))

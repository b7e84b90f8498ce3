"""Look at the rows of a dataset without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from headrace.core.block import Block, Origin
from headrace.io.dataset import Dataset, Options

_SCHEMA_ROWS = 100


class DatasetInspector:
    """Rows by number, as plain dicts.

    >>> from headrace.io import InMemoryShard
    >>> data = Dataset.from_dict("toy", {0: InMemoryShard([{"text": "a"}, {"text": "b"}])})
    >>> with DatasetInspector(data) as look:
    ...     look.read(0, 1), look.schema()
    ({'text': 'b'}, {'text': 'str'})
    """

    def __init__(self, dataset: Dataset, options: Options = None) -> None:
        """Open a reader."""
        self._dataset = dataset
        self._reader = dataset.open(options)

    def read(self, shard: int, row: int) -> dict[str, Any]:
        """One row."""
        return self.read_many(shard, [row])[0]

    def read_many(self, shard: int, rows: Sequence[int]) -> list[Any]:
        """Rows of one shard in the order asked for."""
        index = np.asarray(rows, np.int64).reshape(-1)
        found = self._reader.read(shard, index, None)
        if isinstance(found, list):
            return found
        origin = Origin(np.zeros((len(index), 7), np.int64))
        return Block(0, origin, found).payloads()

    def head(self, n: int = 5) -> list[Any]:
        """The first `n` rows of the dataset."""
        rows: list[Any] = []
        for shard, count in zip(self._dataset.ids().tolist(), self._dataset.counts().tolist(), strict=True):
            if len(rows) < n and count:
                rows += self.read_many(shard, range(min(count, n - len(rows))))
        return rows

    def schema(self) -> dict[str, str]:
        """Field names and the types seen in the first rows of every shard (several are joined by `|`)."""
        seen: dict[str, set[str]] = {}
        for shard, count in zip(self._dataset.ids().tolist(), self._dataset.counts().tolist(), strict=True):
            share = max(1, _SCHEMA_ROWS // max(1, self._dataset.shard_count()))
            for row in self.read_many(shard, range(min(count, share))):
                for name, value in row.items():
                    seen.setdefault(name, set()).add(_type_name(value))
        return {name: " | ".join(sorted(types)) for name, types in seen.items()}

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}" if value.ndim > 1 else f"{value.dtype}[]"
    return type(value).__name__

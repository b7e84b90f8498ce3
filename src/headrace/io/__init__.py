"""Reading data: datasets, formats, indexes, stores. The public names."""

from headrace.io.dataset import Dataset
from headrace.io.formats.base import Reader
from headrace.io.formats.memory import InMemoryShard
from headrace.io.options import (
    ArrowOptions,
    CacheOptions,
    JsonlOptions,
    ParquetOptions,
    ParquetRGCacheOptions,
    StoreOptions,
)
from headrace.io.row_error import RowError

__all__ = [
    "ArrowOptions",
    "CacheOptions",
    "Dataset",
    "InMemoryShard",
    "JsonlOptions",
    "ParquetOptions",
    "ParquetRGCacheOptions",
    "Reader",
    "RowError",
    "StoreOptions",
]

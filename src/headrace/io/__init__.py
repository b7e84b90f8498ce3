"""Reading data: datasets, formats, indexes, stores. The public names."""

from headrace.io.dataset import Dataset
from headrace.io.formats.base import Reader
from headrace.io.formats.memory import InMemoryShard
from headrace.io.index_builder import build_index
from headrace.io.inspect import DatasetInspector
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
    "DatasetInspector",
    "InMemoryShard",
    "JsonlOptions",
    "ParquetOptions",
    "ParquetRGCacheOptions",
    "Reader",
    "RowError",
    "StoreOptions",
    "build_index",
]

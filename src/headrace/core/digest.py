"""128-bit digests of batches: equal exactly where the batches are, however they were put together.

A digest covers field names, values, dtypes, shapes and the samples that every row came from, in a form that does not depend on
how columns happen to be held: text as a column or as strings, token rows as one matrix, as ragged rows or as a list of arrays,
numbers as an array or as Python objects have the same digest. Each row has a mark of its own, so that two logs can be compared
down to the row. One hash call per row of tokens (xxh3, some 10 GB/s) is what it costs.

Rolling digests are sums (modulo 2**128) of one number per batch that depends on its global position and its digest. Sums do not
care about order, so those of ranks, lanes and legs of a run add up to that of the whole stream, on any topology.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest, xxh3_128_intdigest

from headrace.core.block import MISSING, Block, Column, Ints, Origin, Ragged, RowDigests, Text, to_list
from headrace.errors import ConfigError

MODULUS: Final = 1 << 128
_ABSENT: Final = b"\xc1"
_WIDE: Final = {"b": np.dtype("<i8"), "i": np.dtype("<i8"), "u": np.dtype("<u8"), "f": np.dtype("<f8")}
_NUMBER: Final = {kind: f"number {kind}" for kind in "biuf"}
_FOLD: Final = np.uint64(0x9E3779B97F4A7C15)


class BatchDigest(NamedTuple):
    """What a batch is known by, with the work put off that does not touch its values.

    A batch of rows has their digests; the value of a user's function has one, `whole`.
    """

    origin: Origin
    rows: RowDigests | None
    whole: bytes = b""

    @property
    def digest(self) -> bytes:
        """Of the batch, 16 bytes."""
        origin, rows = self.origin, self.rows
        parts = [self.whole] if rows is None else [rows.header, rows.words.tobytes()]
        parts.append(origin.ids.tobytes())
        if origin.rows is not None:
            parts.append(origin.rows.tobytes())
        if origin.spans is not None:
            parts.append(origin.spans.tobytes())
        return xxh3_128_digest(b"".join(parts))


def row_marks(batches: Sequence[BatchDigest]) -> NDArray[np.uint64]:
    """A number for every row of every batch; values of user functions have none."""
    words = [batch.rows.words for batch in batches if batch.rows is not None and batch.rows.words.shape[1]]
    if len({each.shape[1] for each in words}) > 1:  # other fields in some batches
        return np.concatenate([row_marks([batch]) for batch in batches])
    if not words:
        return np.zeros(0, np.uint64)
    together = np.concatenate(words)
    marks = together[:, 0].copy()
    for column in together.T[1:]:
        marks = marks * _FOLD + column
    return marks


def digest_block(block: Block) -> BatchDigest:
    """Of a batch that is a block."""
    return BatchDigest(block.origin, block.digests or _row_digests(_fields(block), len(block)))


def digest_value(value: Any, origin: Origin) -> BatchDigest:
    """Of what a user's function made of a batch. ConfigError for objects that have no canonical bytes."""
    return BatchDigest(origin, None, xxh3_128_digest(_encode(value)))


def with_digests(block: Block) -> Block:
    """The block with digests of its rows, for batches that will be cut from it.

    Many rows at a time take less than half of the time that they take batch by batch. Where what kind a column is depends on
    which rows are together, as for Python objects, it is left to the batch.
    """
    columns = block.columns
    if not columns or not len(block) or not all(map(_is_definite, columns.values())):
        return block
    return replace(block, digests=_row_digests(columns, len(block)))


def digested(stream: Iterator[Any]) -> Iterator[Any]:
    """Messages, with digests of the rows of each block."""
    for message in stream:
        yield with_digests(message) if isinstance(message, Block) else message


def _is_definite(column: Column) -> bool:
    match column:
        case Text():
            return True
        case Ragged():
            return column.values.dtype.kind in "biuf" and column.values.ndim == 1
        case np.ndarray():
            return column.dtype.kind in "bif" or (column.dtype.kind == "u" and column.itemsize < 8)
        case _:
            return False


def _fields(block: Block) -> Mapping[str, Column]:
    if block.columns is not None:
        return block.columns
    plain = not all(isinstance(row, Mapping) for row in block.rows or ())
    return {"": block.payloads()} if plain else block.as_columns()


def _row_digests(columns: Mapping[str, Column], count: int) -> RowDigests:
    header, parts = b"", [np.zeros((count, 0), np.uint64)]
    for name in sorted(columns):
        kind, digests = _column(columns[name])
        if kind:
            header += _header(name, kind)
            parts.append(np.frombuffer(digests, "<u8").reshape(count, -1 if count else 0))
    return RowDigests(header, np.concatenate(parts, axis=1))


# ---------------------------------------------------------------------------------------------------
# Columns: a kind that depends on the values alone, and bytes of equal size for each row
# ---------------------------------------------------------------------------------------------------


def _column(column: Column) -> tuple[str, bytes]:
    """Kind and row digests; an empty kind for a field that no row has."""
    match column:
        case np.ndarray() if column.dtype.kind in "biuf":
            if column.ndim == 1:
                return _numbers(column)
            rows = column if column.flags.c_contiguous else np.ascontiguousarray(column)
            return _sequences(column.dtype, column.shape[2:]), b"".join(map(xxh3_128_digest, rows))
        case Ragged() if column.values.dtype.kind in "biuf" and column.values.ndim == 1:
            return _sequences(column.values.dtype, ()), _pieces(column.flat, column.offsets)
        case Text():
            return "text", _pieces(column.data[column.offsets[0] : column.offsets[-1]], column.offsets)
        case _:
            return _objects(to_list(column))


@lru_cache(maxsize=1024)
def _header(name: str, kind: str) -> bytes:
    return f"{len(name)} {name} {kind} ".encode()


def _sequences(dtype: np.dtype[Any], inner: tuple[int, ...]) -> str:
    return f"rows {dtype.str} {inner}"


def _pieces(values: NDArray[Any], offsets: Ints) -> bytes:
    view = memoryview(np.ascontiguousarray(values).view(np.uint8))  # type: ignore[arg-type]
    ends = ((offsets - offsets[0]) * values.itemsize).tolist()
    return b"".join([xxh3_128_digest(view[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)])


def _numbers(values: NDArray[Any]) -> tuple[str, bytes]:
    """Single numbers as 64 bits, as Python would show them."""
    kind = values.dtype.kind
    wide = values.astype(_WIDE[kind])
    if kind == "u" and not (wide >= np.uint64(1 << 63)).any():
        kind, wide = "i", wide.astype("<i8")
    return _NUMBER[kind], wide.tobytes()


def _objects(values: list[Any]) -> tuple[str, bytes]:
    present = [value for value in values if value is not MISSING]
    if not present:
        return "", b""
    whole = len(present) == len(values)
    kinds = set(map(type, present))
    if kinds == {str}:
        return "text", _digests(values, lambda value: value.encode("utf-8", "surrogatepass"))
    if kinds == {np.ndarray}:
        forms = {(value.dtype, value.shape[1:]) for value in present if value.ndim and value.dtype.kind in "biuf"}
        if len(forms) == 1 and all(value.ndim and value.dtype.kind in "biuf" for value in present):
            (dtype, inner) = forms.pop()
            return _sequences(dtype, inner), _digests(values, np.ascontiguousarray)
    if whole and (kinds == {bool} or kinds == {float}):
        return _numbers(np.array(values))
    if whole and kinds == {int}:
        low, high = min(values), max(values)
        if low >= -(1 << 63) and high < 1 << 63:
            return _numbers(np.array(values, np.int64))
        if low >= 0 and high < 1 << 64:
            return _numbers(np.array(values, np.uint64))
    return "object", _digests(values, _encode)


def _digests(values: list[Any], as_bytes: Any) -> bytes:
    return b"".join([xxh3_128_digest(_ABSENT if value is MISSING else as_bytes(value)) for value in values])


def _plain(value: Any) -> Any:
    """What msgpack does not know, in terms that it does."""
    if isinstance(value, Block):
        return digest_block(value).digest
    if isinstance(block := getattr(value, "block", None), Block):  # a SampleBatch
        return digest_block(block).digest
    if hasattr(value, "detach"):  # a torch tensor
        return ["tensor", str(value.dtype), list(value.shape), _tensor_bytes(value.detach().cpu())]
    if isinstance(value, np.generic):
        return value.item() if value.dtype.kind in "biufSU" else [value.dtype.str, value.tobytes()]
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "O":
            return ["objects", list(value.shape), value.ravel().tolist()]
        return ["array", value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    if hasattr(value, "payload") and hasattr(value, "meta"):  # a SampleRecord
        return [value.payload, list(value.meta.sample_id), list(value.meta.lineage)]
    raise ConfigError(
        f"digest=True cannot look into a {type(value).__module__}.{type(value).__qualname__}: deliver arrays, tensors, numbers, "
        "text or containers of these, or leave digest out"
    )


def _tensor_bytes(tensor: Any) -> bytes:
    try:
        return tensor.numpy().tobytes()
    except TypeError:  # a type that numpy lacks, like bfloat16; float32 holds each of its values
        return tensor.float().numpy().tobytes()


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain, order="deterministic")


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except OverflowError:  # a whole number beyond 64 bits
        return _encoder.encode(_numbers_as_text(value))


def _numbers_as_text(value: Any) -> Any:
    match value:
        case int() if not isinstance(value, bool):
            return ["int", str(value)]
        case Mapping():
            return {str(key): _numbers_as_text(item) for key, item in value.items()}
        case list() | tuple():
            return [_numbers_as_text(item) for item in value]
        case _:
            return value


# ---------------------------------------------------------------------------------------------------
# Rolling
# ---------------------------------------------------------------------------------------------------


def term(number: int, digest: bytes) -> int:
    """What global batch `number` adds to rolling digests."""
    return xxh3_128_intdigest(digest, seed=number)


@dataclass(slots=True)
class RollingDigest:
    """Sums over batches: one for each lane, one for all."""

    total: int = 0
    lanes: dict[int, int] = field(default_factory=dict)
    batches: int = 0

    def add(self, number: int, lane: int, digest: bytes) -> None:
        """Count one batch."""
        self.extend((number,), (lane,), (digest,))

    def extend(self, numbers: Sequence[int], lanes: Sequence[int], digests: Sequence[bytes]) -> None:
        """Count batches."""
        terms = list(map(term, numbers, digests))
        for lane in set(lanes):
            mine = [value for value, its in zip(terms, lanes, strict=True) if its == lane]
            self.lanes[lane] = (self.lanes.get(lane, 0) + sum(mine)) % MODULUS
        self.total = (self.total + sum(terms)) % MODULUS
        self.batches += len(terms)

"""What a user's state holds, as values of a checkpoint, and back: plain Python values, arrays, and records.

The same state gives the same bytes: sets are sorted by their encoded members, dicts keep their order.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import numpy as np

from headrace.core.block import Block, Origin
from headrace.errors import CheckpointError
from headrace.types import SampleRecord, block_from_records, records_from_block

_PLAIN = (type(None), bool, float, str, bytes)
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def pack_value(value: Any, where: str) -> bytes:
    """Bytes of a value. CheckpointError names the first thing in it that a checkpoint cannot hold."""
    return msgspec.msgpack.encode(_plain(value, where))


def unpack_value(data: bytes) -> Any:
    """The inverse."""
    return _rebuilt(msgspec.msgpack.decode(data))


def pack_rows(block: Block, where: str) -> dict[str, Any]:
    """Rows with their payloads, the library's own fields included."""
    origin = block.origin
    arrays = {"ids": origin.ids, "rows": origin.rows, "spans": origin.spans}
    return {
        "lane": block.lane,
        "origin": pack_value(arrays, where),
        "payloads": pack_value(block.payloads(), where),
    }


def unpack_rows(data: dict[str, Any]) -> Block:
    """The inverse."""
    return Block(int(data["lane"]), Origin(**unpack_value(data["origin"])), None, unpack_value(data["payloads"]))


def _plain(value: Any, where: str) -> Any:
    kind = type(value)
    if kind in _PLAIN or (kind is int and -(1 << 63) <= value < 1 << 64):
        return value
    if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
        items = [_plain(item, where) for item in value]
        return [kind.__name__, sorted(items, key=msgspec.msgpack.encode) if kind in (set, frozenset) else items]
    if kind is dict:
        return ["dict", [[_plain(key, where), _plain(inner, where)] for key, inner in value.items()]]
    if kind is deque:
        return ["deque", [_plain(item, where) for item in value], value.maxlen]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcSU":
        array = np.asarray(value)
        return ["array" if kind is np.ndarray else "scalar", array.dtype.str, list(array.shape), array.tobytes()]
    if isinstance(value, SampleRecord):
        return ["record", pack_rows(block_from_records([value]), where)]
    raise CheckpointError(
        f"{where} holds a {kind.__module__}.{kind.__qualname__} ({value!r:.60}), which a checkpoint cannot; use None, bool, int, "
        "float, str, bytes, list, tuple, set, dict, deque, numpy arrays and records, or give save= and load="
    )


def _rebuilt(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content, *more = value
    match kind:
        case "dict":
            return {_rebuilt(key): _rebuilt(inner) for key, inner in content}
        case "deque":
            return deque(map(_rebuilt, content), *more)
        case "array" | "scalar":
            shape, data = more
            array = np.frombuffer(data, content).reshape(shape)
            return array.copy() if kind == "array" else array[()]
        case "record":
            return records_from_block(unpack_rows(content))[0]
        case _:
            return _SEQUENCES[kind](map(_rebuilt, content))

"""Sizes of Python objects: near the truth for what is large, and cheap for what has many elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from headrace.core.block import Block, Origin, Text
from headrace.core.message import Item
from headrace.core.size import object_bytes, objects_bytes
from headrace.types import SampleBatch

LARGE = 1 << 20


@dataclass
class Sample:
    name: str
    image: bytes


@dataclass(slots=True)
class Slotted:
    name: str
    image: bytes


class Tensor:
    """Says how large it is."""

    nbytes = LARGE


class Odd:
    @property
    def nbytes(self) -> int:
        raise RuntimeError("not now")


def block(rows: list[Any]) -> Block:
    return Block(0, Origin(np.zeros((len(rows), 7), np.int64)), None, rows)


@pytest.mark.parametrize(
    "value",
    [
        bytes(LARGE),
        "x" * LARGE,
        np.zeros(LARGE, np.uint8),
        memoryview(bytes(LARGE)),
        Tensor(),
        Sample("a", bytes(LARGE)),
        Slotted("a", bytes(LARGE)),
        {"name": "a", "image": bytes(LARGE)},
        {**dict.fromkeys(range(40)), "image": bytes(LARGE)},
        ("a", 3, *range(20), bytes(LARGE)),
        [bytes(LARGE // 100)] * 100,
        {"messages": [{"role": "user", "parts": [{"image": bytes(LARGE)}]}]},
        block([{"image": bytes(LARGE // 8)} for _ in range(8)]),
        SampleBatch.from_block(block([{"image": bytes(LARGE)}])),
        {bytes([i]) + bytes(LARGE // 4) for i in range(4)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_large_is_seen_at_any_place(value: Any) -> None:
    assert LARGE <= object_bytes(value) < 1.1 * LARGE
    assert LARGE <= Item(0, value, Origin.empty()).nbytes() < 1.1 * LARGE


def test_many_values_go_by_a_few() -> None:
    looked_at: list[int] = []

    class Told:
        def __init__(self, number: int) -> None:
            self.number = number

        @property
        def nbytes(self) -> int:
            looked_at.append(self.number)
            return 1000

    assert 1_000_000 <= objects_bytes([Told(i) for i in range(1000)]) < 1_100_000
    assert len(looked_at) <= 8
    assert max(looked_at) - min(looked_at) > 500


def test_of_a_block() -> None:
    rows = [{"text": "x" * 1000, "id": i} for i in range(100)]
    assert 100_000 < block(rows).nbytes() < 130_000
    columns: dict[str, Any] = {
        "text": Text.from_bytes([b"x" * 1000] * 100),
        "list": [b"x" * 1000] * 100,
        "id": np.arange(100),
    }
    assert 200_000 < block(rows).with_columns(columns).nbytes() < 220_000
    assert block([]).nbytes() == 0


def test_what_holds_itself_and_what_does_not_say_its_size() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert 0 < object_bytes(endless) < 1000
    assert 0 < object_bytes(Odd()) < 1000
    assert 0 < object_bytes(None) < 1000

"""Steps that several files of tests run."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

HANG = 60.0

RUNNERS = ["inline", "threads", "process"]

every_runner = pytest.mark.parametrize("runner", RUNNERS)


def add_1(arg: int) -> int:
    return arg + 1


def double(arg: int) -> int:
    return 2 * arg


class PerKey:
    def setup(self) -> None:
        self.seen: Counter[str] = Counter()

    def __call__(self, item: tuple[str, int]) -> tuple[str, int, int]:
        self.seen[item[0]] += 1
        return (*item, self.seen[item[0]])


def sleep_at(bad: int, seconds: float, x: int) -> int:
    if x == bad:
        time.sleep(seconds)
    return x


def draw(x: float) -> float:
    import random

    return x + random.random() + np.random.random()


def lock_at_9(x: int) -> Any:
    return threading.Lock() if x == 9 else x

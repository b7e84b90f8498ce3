"""The order of one dataset over its passes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from work_data import Numbers

from headrace.errors import ConfigError, CurriculumError
from headrace.work.order import DatasetOrder, OrderSettings, sorted_by_name

COUNTS = [5, 0, 7, 1, 12, 3]
ALL_ROWS = sorted((shard, row) for shard, count in enumerate(COUNTS) for row in range(count))
SIZE = len(ALL_ROWS)
SETTINGS = [
    OrderSettings(seed, shards, rows, block)
    for seed, shards, rows, block in itertools.product(
        [0, 7], [False, True], [False, True], [None, 1, 4, "auto", "global", 10**9]
    )
]


def rows(order: DatasetOrder, first: int, number: int) -> list[tuple[int, int]]:
    shard, row = order.rows(first, number)
    return list(zip(shard.tolist(), row.tolist(), strict=True))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_each_pass_holds_each_row_once(settings: OrderSettings) -> None:
    order = DatasetOrder(Numbers("d", COUNTS), settings)
    for number in range(4):
        assert sorted(rows(order, number * SIZE, SIZE)) == ALL_ROWS


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_any_range_is_a_part_of_the_whole(settings: OrderSettings) -> None:
    whole = rows(DatasetOrder(Numbers("d", COUNTS), settings), 0, 5 * SIZE)
    order = DatasetOrder(Numbers("d", COUNTS), settings)
    for first, number in [(0, 1), (3, 9), (SIZE - 1, 2), (SIZE, SIZE), (10, 100), (4 * SIZE, 5), (1, 3)]:
        assert rows(order, first, number) == whole[first : first + number]


def test_without_shuffling_rows_come_as_stored_and_shards_by_id() -> None:
    order = DatasetOrder(Numbers("d", [2, 1, 3], ids=[30, 10, 20]), OrderSettings(shuffle_shards=False))
    assert rows(order, 0, 6) == [(10, 0), (20, 0), (20, 1), (20, 2), (30, 0), (30, 1)]


def test_shard_shuffle_keeps_rows_in_order() -> None:
    order = rows(DatasetOrder(Numbers("d", [4] * 50), OrderSettings()), 0, 200)
    assert [row for _, row in order] == [0, 1, 2, 3] * 50
    shards = [shard for shard, _ in order[::4]]
    assert shards != sorted(shards) and sorted(shards) == list(range(50))


def test_blocks_stay_blocks() -> None:
    order = rows(
        DatasetOrder(Numbers("d", [10] * 10), OrderSettings(shuffle_shards=False, shuffle_block_size=20)), 0, 100
    )
    for block in range(5):
        assert {shard for shard, _ in order[20 * block : 20 * block + 20]} == {2 * block, 2 * block + 1}
        assert order[20 * block : 20 * block + 20] != sorted(order[20 * block : 20 * block + 20])


@pytest.mark.parametrize("kind", [{}, {"shuffle_block_size": 8}, {"shuffle_within_shard": True}])
def test_passes_differ_unless_asked_not_to(kind: dict[str, Any]) -> None:
    counts = [8] * 8
    again = DatasetOrder(Numbers("d", counts), OrderSettings(**kind))
    same = DatasetOrder(Numbers("d", counts), OrderSettings(**kind, reshuffle_on_repeat=False))
    assert rows(again, 0, 64) != rows(again, 64, 64)
    assert rows(same, 0, 64) == rows(same, 64, 64) == rows(again, 0, 64)


@pytest.mark.parametrize("kind", [{}, {"shuffle_block_size": "global"}, {"shuffle_within_shard": True}])
def test_datasets_and_seeds_have_orders_of_their_own(kind: dict[str, Any]) -> None:
    counts = [8] * 8
    orders = [
        rows(DatasetOrder(Numbers(name, counts), OrderSettings(seed, **kind)), 0, 64)
        for name, seed in [("a", 0), ("b", 0), ("a", 1)]
    ]
    assert len({tuple(order) for order in orders}) == 3


def test_neither_listing_nor_empty_shards_matter() -> None:
    plain = DatasetOrder(Numbers("d", [3, 4, 5], ids=[1, 2, 3]), OrderSettings())
    other = DatasetOrder(Numbers("d", [5, 0, 3, 0, 4], ids=[3, 9, 1, 0, 2]), OrderSettings())
    assert rows(plain, 0, 36) == rows(other, 0, 36)


def test_a_trillion_rows_need_no_list_of_them() -> None:
    order = DatasetOrder(Numbers("d", [10**9] * 1000), OrderSettings(shuffle_block_size="global"))
    far = 10**12 - 1000
    shard, row = order.rows(far, 1000)
    assert len(set(zip(shard.tolist(), row.tolist(), strict=True))) == 1000
    assert len(np.unique(shard)) > 500 and row.min() >= 0 and row.max() < 10**9
    assert rows(order, far + 990, 10) == list(zip(shard.tolist(), row.tolist(), strict=True))[990:]


@pytest.mark.parametrize(("block", "size"), [("auto", 28), ("global", 28), (5, 5), (99, 28)])
def test_block_sizes(block: Any, size: int) -> None:
    assert DatasetOrder(Numbers("d", COUNTS), OrderSettings(shuffle_block_size=block)).block == size
    assert DatasetOrder(Numbers("d", [1] * 100), OrderSettings(shuffle_block_size="auto")).block == 8


@pytest.mark.parametrize("block", [0, -1, True, "all", 1.5])
def test_bad_block_sizes(block: Any) -> None:
    with pytest.raises(ConfigError, match=r"shuffle_block_size.* must be"):
        DatasetOrder(Numbers("d", COUNTS), OrderSettings(shuffle_block_size=block))


def test_bad_datasets() -> None:
    with pytest.raises(CurriculumError, match="'d': 1 shard ids"):
        DatasetOrder(Numbers("d", [1, 2], ids=[1]), OrderSettings())
    with pytest.raises(CurriculumError, match="two datasets are named 'd'"):
        sorted_by_name([Numbers("d", [1]), Numbers("e", [1]), Numbers("d", [2])])

"""`pack_flat(homogeneity=...)`: rows of one component, or of one group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.core.block import Block, Origin, Ragged, concat_blocks
from headrace.errors import ConfigError
from headrace.ops.pack.domains import DomainGroups
from headrace.ops.pack.flat import PackFlat


def documents(*pairs: tuple[int, int]) -> Block:
    """Documents of (component, length)."""
    ids = np.zeros((len(pairs), 7), np.int64)
    ids[:, 2], ids[:, 3] = np.arange(len(pairs)), [component for component, _ in pairs]
    return Block(0, Origin(ids), {"input_ids": Ragged.from_rows([np.full(n, c, np.int32) for c, n in pairs])})


def rows(op: PackFlat, *pairs: tuple[int, int]) -> list[list[int]]:
    """Documents of each row."""
    accumulator = op.accumulator(0)
    blocks = accumulator.push(documents(*pairs)) + accumulator.end()
    joined = concat_blocks([b for b in blocks if len(b)])
    return [joined.origin.slice(r, r + 1).ids[:, 2].tolist() for r in range(len(joined))]


def test_full_keeps_components_apart_and_rows_in_order_of_completion() -> None:
    op = PackFlat(4, algorithm="wrap", pad_token_id=9, homogeneity="full")
    assert rows(op, (5, 3), (1, 2), (1, 2), (5, 1), (1, 1)) == [[1, 2], [0, 3], [4]]


def test_group_lets_members_share_a_row() -> None:
    op = PackFlat(4, num_bins=3, pad_token_id=9, homogeneity="group", groups=DomainGroups({"text": ["web", "books"]}))
    with pytest.warns(UserWarning, match="never packed with others: code"):
        told = op.with_components({"web": 0, "code": 1, "books": 2})
    assert rows(told, (0, 2), (1, 2), (2, 2), (1, 1)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("algorithm", ["first_fit", "best_fit", "wrap", "best_fit_wrap"])
def test_no_row_mixes_components(algorithm: str) -> None:
    rng = np.random.default_rng(0)
    pairs = list(zip(rng.integers(0, 3, 300).tolist(), rng.integers(1, 30, 300).tolist(), strict=True))
    bins = {"num_bins": 4} if algorithm in ("first_fit", "best_fit") else {}
    op = PackFlat(32, algorithm=algorithm, pad_token_id=99, homogeneity="full", **bins)
    accumulator = op.accumulator(0)
    blocks = accumulator.push(documents(*pairs)) + accumulator.end()
    tokens = concat_blocks([b for b in blocks if len(b)]).columns["input_ids"]
    kinds = [set(row.tolist()) - {99} for row in tokens]
    assert all(len(kind) == 1 for kind in kinds)
    assert sum(int((tokens == c).sum()) for c in range(3)) == sum(length for _, length in pairs)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({}, "no group is given"),
        ({"g": []}, "group 'g' is empty"),
        ({"g": "web"}, "is one string, 'web'"),
        ({"g": ["web", 3]}, "names are strings, found 3"),
        ({"g": ["web"], "h": ["web"]}, "component 'web' is in 'g' and in 'h'"),
        ({"g": ["web", "web"]}, "component 'web' is in 'g' and in 'g'"),
    ],
)
def test_groups_are_checked(groups: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DomainGroups(groups)


def test_unknown_members_are_an_error() -> None:
    groups = DomainGroups({"g": ["web", "wiki"]})
    with pytest.raises(ConfigError, match="no component is called 'wiki'; known: code, web"):
        groups.validate_against(["web", "code"])
    assert groups.to_member_map() == {"web": "g", "wiki": "g"}


def test_homogeneity_and_groups_go_together() -> None:
    for parameters in ({"homogeneity": "group"}, {"groups": DomainGroups({"g": ["a"]})}, {"homogeneity": "some"}):
        with pytest.raises(ConfigError, match=r"go together|unknown homogeneity"):
            PackFlat(8, algorithm="wrap", **parameters)
    op = PackFlat(8, algorithm="wrap", homogeneity="group", groups=DomainGroups({"g": ["a"]}))
    assert op.describe()["groups"] == {"g": ["a"]}
    assert op.with_components({"a": 0}).describe() == op.describe()

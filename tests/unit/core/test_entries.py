"""Checkpoints as flat entries: there and back, in pieces, and refused where they do not belong together."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.entries import RUN, from_entries, is_entries, to_entries
from headrace.errors import CheckpointError


def state(lanes: list[int], position: int = 4, **recipe: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "canonical_replicas": 12,
        "position": position,
        "recipe": {"seed": 0, **recipe},
        "lanes": {str(lane): {"taken": lane, "held": b"\x00"} for lane in lanes},
    }


def test_there_and_back() -> None:
    assert from_entries(to_entries(state([0, 3, 11]))) == state([0, 3, 11])
    assert sorted(to_entries(state([10]))) == ["headrace.lane.10", RUN]
    assert is_entries(to_entries(state([]))) and not is_entries(state([])) and not is_entries(None)


def test_entries_of_several_ranks_are_one_state_and_equal_lanes_have_equal_bytes() -> None:
    a, b = to_entries(state([0, 1])), to_entries(state([1, 2]))
    assert a["headrace.lane.1"] == b["headrace.lane.1"] and a[RUN] == b[RUN]
    assert from_entries({**b, **a}) == state([0, 1, 2])
    assert list(from_entries({**to_entries(state([10])), **to_entries(state([9]))})["lanes"]) == ["9", "10"]


def test_entries_that_do_not_belong_together_are_refused() -> None:
    base = to_entries(state([0]))
    with pytest.raises(CheckpointError, match=r"headrace.lane.1 was saved after 8 batches and headrace.run after 4"):
        from_entries({**to_entries(state([1], position=8)), **base})
    with pytest.raises(CheckpointError, match="different recipes"):
        from_entries({**to_entries(state([1], seed=1)), **base})
    with pytest.raises(CheckpointError, match=r"no entry 'headrace.run'"):
        from_entries({"model": 1})
    with pytest.raises(CheckpointError, match="should be bytes, found int"):
        from_entries({**base, "headrace.lane.0": 3})
    with pytest.raises(CheckpointError, match="cannot be decoded"):
        from_entries({**base, "headrace.lane.0": b"\xc1"})

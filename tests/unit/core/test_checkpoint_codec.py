"""The checkpoint's codec: what goes in comes out, small, and what is wrong is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.core import checkpoint as ckpt
from headrace.core.block import CHUNK, OFFSET, ORIGIN_WIDTH, PIECE, Origin
from headrace.errors import CheckpointError

COLUMN = hnp.arrays(np.int64, st.shared(st.integers(1, 40), key="n"), elements=st.integers(0, 2**40))


@given(COLUMN, COLUMN, COLUMN, st.booleans(), st.data())
def test_origins_survive(
    chunk: np.ndarray, offset: np.ndarray, piece: np.ndarray, packed: bool, data: st.DataObject
) -> None:
    ids = np.zeros((len(chunk), ORIGIN_WIDTH), np.int64)
    ids[:, CHUNK], ids[:, OFFSET], ids[:, PIECE] = chunk, offset, piece
    rows = spans = None
    if packed:
        inner = data.draw(st.lists(st.integers(0, len(chunk)), max_size=6))
        rows = np.array([0, *sorted(inner), len(chunk)], np.int64)
        spans = np.stack([offset, chunk], axis=1)
    back = ckpt.decode_origin(ckpt.encode_origin(Origin(ids, rows, spans)))
    assert (back.ids == ids).all()
    assert packed == (back.rows is not None)
    if packed:
        assert (back.rows == rows).all() and (back.spans == spans).all()


def test_a_shuffle_buffer_of_8192_takes_a_few_kilobytes() -> None:
    rng = np.random.default_rng(7)
    ages = np.unique(rng.exponential(8192, 12_000).astype(np.int64))[:8192]
    ids = np.zeros((len(ages), ORIGIN_WIDTH), np.int64)
    ids[:, CHUNK], ids[:, OFFSET] = ages // 16384, ages % 16384
    assert len(ckpt.encode_origin(Origin(ids))) < len(ages)


def _state(**changes: object) -> dict:
    lane = ckpt.LaneState(0, 0, 0, 3, {0: {"drawn": 0}})
    state = ckpt.assemble({"curriculum": {"seed": 1}}, 2, ckpt.Snapshot(6, {0: lane}))
    return {**state, **changes}


def test_states_of_several_ranks_become_one() -> None:
    other = ckpt.assemble(
        {"curriculum": {"seed": 1}}, 2, ckpt.Snapshot(6, {1: ckpt.LaneState(0, 0, 0, 3, {0: {"drawn": 0}})})
    )
    merged = ckpt.merge([_state(), other])
    assert sorted(ckpt.require_lanes(merged, (0, 1))) == [0, 1]
    with pytest.raises(CheckpointError, match=r"lanes \[1\] are in none"):
        ckpt.require_lanes(_state(), (0, 1))


def test_contradicting_states_are_refused() -> None:
    with pytest.raises(CheckpointError, match="position is 6 and 8"):
        ckpt.merge([_state(), _state(position=8)])
    with pytest.raises(CheckpointError, match=r"curriculum\.seed: 1 -> 2"):
        ckpt.merge([_state(), _state(recipe={"curriculum": {"seed": 2}})])
    changed = ckpt.assemble(
        {"curriculum": {"seed": 1}}, 2, ckpt.Snapshot(6, {0: ckpt.LaneState(0, 0, 0, 4, {0: {"drawn": 0}})})
    )
    with pytest.raises(CheckpointError, match="about lane 0"):
        ckpt.merge([_state(), changed])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"\xc1junk", "not a headrace checkpoint"),
        ({"format": 1}, "lacks canonical_replicas"),
        (5, "got int"),
        (_state(format=99), "upgrade"),
    ],
)
def test_what_is_no_checkpoint_is_said(value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ckpt.from_any(value)


@pytest.mark.parametrize(
    ("lane", "message"),
    [
        ({"taken": -1}, "its taken is -1"),
        ({"offset": -5}, "its offset is -5"),
        ({"chunk": "x"}, "ValueError"),
        ({"operators": [{"state": {}, "held": b"junk"}]}, "ZstdError"),
        ({"sources": {}}, "work source's state at chunk 0 is missing"),
        ({"operators": None}, "TypeError"),
    ],
)
def test_a_damaged_lane_is_named(lane: dict, message: str) -> None:
    state = _state()
    state["lanes"]["0"] |= lane
    with pytest.raises(CheckpointError, match=f"damaged: lane 0: .*{message}"):
        ckpt.require_lanes(state, (0,))


@pytest.mark.parametrize(
    "change", [{"format": 0}, {"canonical_replicas": 0}, {"position": -1}, {"position": "x"}, {"recipe": 5}]
)
def test_damage_on_top_is_named(change: dict) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        ckpt.from_any(_state(**change))


def test_bytes_round_trip() -> None:
    state = _state()
    assert ckpt.from_any(ckpt.to_bytes(state)) == state
    assert ckpt.to_bytes(state) == ckpt.to_bytes(ckpt.from_any(ckpt.to_bytes(state)))


def test_differences_name_the_key_and_both_values() -> None:
    assert ckpt.differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == [
        "a.c: 2 -> 3",
        "d: 'absent' -> 4",
    ]

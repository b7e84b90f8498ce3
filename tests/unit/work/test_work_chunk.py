"""WorkChunk, and sources that users write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from work_data import Numbers

from headrace.errors import CurriculumError
from headrace.work import ComponentOrder, MixtureReadConfig, MixtureReadMode, WorkChunk, WorkSource

PARTS = {"a": [(0, 0, i) for i in range(6)], "b": [(1, 0, i) for i in range(3)]}


def test_components_are_spread_evenly() -> None:
    names = "".join(name for _, name in WorkChunk(PARTS))
    assert Counter(names) == {"a": 6, "b": 3}
    assert all(names[i : i + 3].count("b") == 1 for i in (0, 3, 6))
    assert [sample.row for sample, name in WorkChunk(PARTS) if name == "a"] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("mode", list(MixtureReadMode))
@pytest.mark.parametrize("within", list(ComponentOrder))
def test_every_way_of_reading_gives_every_sample(mode: MixtureReadMode, within: ComponentOrder) -> None:
    config = MixtureReadConfig(mode=mode, seed=3, within_component=within)
    chunk = WorkChunk(PARTS, seed=1)
    order = chunk.materialize_order(config)
    assert Counter(order) == Counter(chunk)
    assert order == WorkChunk(PARTS, seed=2).materialize_order(config)
    assert [chunk.sample_at(i, config) for i in range(len(chunk))] == order == list(chunk.iter_samples(config))


def test_reading_at_random_follows_the_seed() -> None:
    many = {"a": [(0, 0, i) for i in range(40)], "b": [(1, 0, i) for i in range(40)]}
    orders = [
        tuple(WorkChunk(many, seed=seed).materialize_order(MixtureReadConfig("weighted_random", None)))  # type: ignore[arg-type]
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_mixture_is_the_target_or_the_composition() -> None:
    assert WorkChunk(PARTS).mixture == {"a": 6 / 9, "b": 3 / 9}
    assert WorkChunk(PARTS, target_mixture={"a": 0.5, "b": 0.5}).mixture == {"a": 0.5, "b": 0.5}
    assert WorkChunk({}).mixture == {} and list(WorkChunk({})) == []


def test_a_sequence_must_fit() -> None:
    assert "".join(n for _, n in WorkChunk(PARTS, sequence="aaaaaabbb")) == "aaaaaabbb"
    with pytest.raises(CurriculumError, match="the sequence of a chunk names"):
        WorkChunk(PARTS, sequence="aab")


def test_chunk_state_round_trip() -> None:
    chunk = WorkChunk(PARTS, 5, {"a": 0.5, "b": 0.5}, ("b",), "bbbaaaaaa")
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(chunk.state_dict()))
    again = WorkChunk.from_state(state)
    assert list(again) == list(chunk) and again.source_exhausted == ("b",) and again.state_dict() == chunk.state_dict()


class Countdown(WorkSource):
    """A source as a user would write it: three chunks, then none."""

    def __init__(self) -> None:
        self.left = 3

    def next_chunk(self) -> WorkChunk | None:
        if not self.left:
            return None
        self.left -= 1
        assert self._lane is not None
        return WorkChunk({"x": [(0, self._lane[0], self.left)], "y": [(0, 0, 0), (0, 0, 1)]})

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.left = state["left"]

    @property
    def datasets_by_id(self) -> Mapping[int, Any]:
        return {0: Numbers("d", [9])}

    def component_ids(self) -> Mapping[str, int]:
        return {"x": 4, "y": 2}


def test_a_source_of_ones_own_has_lanes() -> None:
    source = Countdown()
    lane = source.lane(1, 2)
    first = lane.draw()
    assert first is not None
    assert sorted(map(tuple, first.ids.tolist())) == [(0, 0, 0, 2), (0, 0, 1, 2), (0, 1, 2, 4)]
    state = lane.state()
    rest = [samples.ids.tolist() for samples in iter(lane.draw, None)]
    assert len(rest) == 2 and lane.draw() is None
    again = source.lane(1, 2)
    again.load(state)
    assert [samples.ids.tolist() for samples in iter(again.draw, None)] == rest
    assert source.left == 3
    assert source.recipe()["component/x"] == 4 and source.recipe()["dataset/d"]["counts"] == [9]


def test_a_source_may_not_name_unknown_components() -> None:
    class Stray(Countdown):
        def component_ids(self) -> Mapping[str, int]:
            return {"x": 0}

    with pytest.raises(CurriculumError, match=r"Stray handed out samples of \['y'\]"):
        Stray().lane(0, 1).draw()


def test_defaults_of_the_base_class() -> None:
    source = Countdown()
    assert source.chunk_size_hint() is None and source.continues_after_exhaustion() == frozenset()
    assert not source.requires_token_priming and source.prime(io_options=None) is None  # type: ignore[func-returns-value]
    with pytest.raises(TypeError, match="no known length"):
        len(source)

"""Which batch goes where: the global order must not depend on the groups."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.lanes import Topology
from headrace.errors import ConfigError

LANES = st.integers(1, 12)
GROUPS = st.integers(1, 15)


@given(LANES, GROUPS, st.integers(0, 40))
def test_groups_share_out_every_global_batch_once(lanes: int, groups: int, position: int) -> None:
    delivered = {}
    for group in range(groups):
        topology = Topology(lanes, groups, group)
        for turn in islice(topology.turns(position), 60):
            if turn.mine:
                j = turn.number * lanes + turn.lane
                assert j not in delivered
                delivered[j] = group
    reach = position + 60 // max(1, groups)
    assert all(j in delivered and delivered[j] == j % groups for j in range(position, reach))


@given(LANES, GROUPS, st.integers(0, 100))
def test_taken_counts_the_batches_of_a_lane_before_a_position(lanes: int, groups: int, position: int) -> None:
    topology = Topology(lanes, groups, 0)
    for lane in range(lanes):
        assert topology.taken(position, lane) == sum(1 for j in range(position) if j % lanes == lane)


def test_lanes_that_do_not_divide_are_computed_by_several_groups() -> None:
    assert Topology(4, 2, 1).computed == (1, 3)
    assert Topology(4, 2, 1).overhead == 1.0
    assert Topology(4, 3, 1).computed == (0, 1, 2, 3)
    assert Topology(4, 3, 1).overhead == 3.0
    assert Topology(4, 6, 1).computed == (1, 3)
    assert Topology(4, 8, 7).computed == (3,)
    assert Topology(4, 8, 7).overhead == 2.0


def test_contiguous_gives_blocks_of_lanes() -> None:
    topology = Topology(4, 2, 1, "contiguous")
    assert [(t.lane, t.number) for t in islice(topology.turns(0), 4)] == [(2, 0), (3, 0), (2, 1), (3, 1)]
    assert [(t.lane, t.number) for t in islice(topology.turns(6), 2)] == [(3, 1), (2, 2)]
    with pytest.raises(ConfigError, match="canonical_replicas=4 and dp_degree=3"):
        Topology(4, 3, 0, "contiguous")

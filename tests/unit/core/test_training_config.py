"""The check of a training configuration: what it refuses, what it offers instead, and that its offers hold."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace.core.lanes import Topology
from headrace.core.training_config import NEAREST, check_training_config, divisors, nearest
from headrace.errors import ConfigError

SMALL = st.integers(1, 200)


@given(SMALL, st.integers(1, 16), st.integers(1, 16), st.integers(1, 32))
def test_what_fits_is_accepted_and_nothing_else(rows: int, size: int, groups: int, lanes: int) -> None:
    config = check_training_config(rows, size, groups, lanes)
    assert config.ok == (rows % (size * groups) == 0)
    if config.ok:
        assert config.accumulation_steps * groups * size == rows
        assert config.require() is config
        assert groups in config.resumable_on
    assert all(config.batches_per_step % d == 0 for d in config.resumable_on)
    assert config.overhead == Topology(lanes, groups).overhead
    assert bool(config.costs) == (lanes % groups != 0)


@given(SMALL, st.integers(1, 16), st.integers(1, 16))
def test_every_value_offered_fits(rows: int, size: int, groups: int) -> None:
    for problem in check_training_config(rows, size, groups).problems:
        for name, values in re.findall(r"(global_batch_size|microbatch_size|dp_degree) ([\d, or]+)", problem):
            offered = [int(v) for v in re.findall(r"\d+", values)]
            assert 1 <= len(offered) <= NEAREST
            for value in offered:
                given_ = {"global_batch_size": rows, "microbatch_size": size, "dp_degree": groups, name: value}
                assert check_training_config(**given_).ok, (problem, name, value)


def test_the_message_says_what_is_wrong_and_the_nearest_right_values() -> None:
    config = check_training_config(500, 4, dp_degree=8, canonical_replicas=12)
    (problem,) = config.problems
    assert "125 batches a step, which 8 groups cannot share evenly" in problem
    assert "global_batch_size 480 or 512" in problem and "dp_degree 1, 5, 25 or 125" in problem
    with pytest.raises(ConfigError, match="480 or 512"):
        config.require()
    assert "each group computes 2.0 times what it delivers" in config.costs[0]
    assert "canonical_replicas 8 or 16" in config.costs[0] and "at its best on 3, 4, 6 or 12 groups" in config.costs[0]
    assert "does not fit" in str(config)


def test_a_fraction_of_a_batch_is_named() -> None:
    (problem,) = check_training_config(30, 4, dp_degree=2).problems
    assert "7.50 batches a step" in problem and "global_batch_size 24 or 32" in problem
    assert "microbatch_size 1, 3, 5 or 15" in problem


def test_ranks_and_lane_blocks_are_checked_too() -> None:
    assert (
        "world_size=12 ranks cannot form dp_degree=8 groups"
        in check_training_config(32, 1, 8, world_size=12).problems[0]
    )
    assert check_training_config(32, 1, 4, world_size=12).ok
    config = check_training_config(32, 1, 4, 6, mapping_strategy="contiguous")
    assert "needs groups that divide the lanes" in config.problems[0] and "whole rounds" in config.problems[1]
    assert check_training_config(32, 1, 4, 8, mapping_strategy="contiguous").resumable_on == (1, 2, 4, 8)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "8"])
def test_numbers_that_are_none_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match="microbatch_size"):
        check_training_config(8, bad)  # type: ignore[arg-type]


def test_divisors_and_nearest() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(0) == [] and divisors(49) == [1, 7, 49]
    assert nearest(5, [1, 4, 6, 100, 0]) == [1, 4, 6, 100] and nearest(5, divisors(64)) == [1, 2, 4, 8]


def test_it_is_a_public_name() -> None:
    assert headrace.check_training_config is check_training_config

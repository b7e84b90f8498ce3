"""Builders: names, counts, placements, and that small schedules are what the papers draw."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError, UnknownOptionError
from headrace.parallel import (
    bubble_fraction,
    build_schedule,
    effective_batch,
    microbatches_for_bubble,
    microbatches_of_batch,
    schedules,
)
from headrace.parallel.builders.controllable import building_block
from headrace.parallel.builders.registry import stage_to_rank


def rows(name, ranks, microbatches, **more):
    return build_schedule(name, ranks, microbatches, **more).to_csv().splitlines()


def test_gpipe_and_1f1b():
    assert rows("gpipe", 2, 2) == ["0F0,0F1,0B1,0B0", "1F0,1F1,1B1,1B0"]
    assert rows("1f1b", 3, 4)[1] == "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3"
    assert rows("eager-1f1b", 3, 5)[0] == "0F0,0F1,0F2,0F3,0F4,0B0,0B1,0B2,0B3,0B4"


def test_zero_bubble():
    assert rows("zb-h1", 2, 3) == ["0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2", "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2"]
    assert rows("zb-h2", 2, 3)[0] == "0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2"


def test_interleaved_goes_in_groups():
    first = rows("interleaved-1f1b", 2, 4)[0].split(",")
    assert first[:5] == ["0F0", "0F1", "2F0", "2F1", "0F2"]


def test_placements():
    assert stage_to_rank(3, 2) == (0, 1, 2, 0, 1, 2)
    assert stage_to_rank(3, 2, "v") == (0, 1, 2, 2, 1, 0)
    assert build_schedule("zbv", 3, 6).stage_to_rank == (0, 1, 2, 2, 1, 0)
    assert build_schedule("looped-bfs", 2, 3, chunks=3).stage_to_rank == (0, 1, 0, 1, 0, 1)


def test_dualpipe_overlaps_in_pairs():
    text = build_schedule("dualpipe-v", 2, 6).to_csv()
    assert text.count("OVERLAP_F_B") > 6
    assert "OVERLAP" not in build_schedule("zbv", 2, 6).to_csv()


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 12])
def test_building_blocks_meet_their_memory(ranks):
    assert building_block(ranks, (2, 1, 2, 1)).peak == 2 * ((ranks + 2) // 2)
    assert building_block(ranks, (1, 1, 1, 1)).peak == 2 * ((ranks + 4) // 3)


def test_one_door_with_good_errors():
    with pytest.raises(UnknownOptionError, match="did you mean 'zbv'"):
        build_schedule("zbw", 2, 4)
    with pytest.raises(ConfigError, match="num_microbatches is 0"):
        build_schedule("1f1b", 2, 0)
    with pytest.raises(ConfigError, match="num_stages is 0"):
        build_schedule("1f1b", 0, 2)
    with pytest.raises(ConfigError, match="chunks=2 is not possible"):
        build_schedule("1f1b", 2, 2, chunks=2)
    assert build_schedule("ZB_H1", 2, 2).name == "zb-h1"
    assert len(schedules()) == 12


def test_the_questions_of_a_bubble():
    assert bubble_fraction(4, 8) == 3 / 11
    assert bubble_fraction(4, 64) == 3 / 67
    assert bubble_fraction(1, 5) == 0
    for stages in (2, 4, 7, 16):
        for bubble in (0.5, 0.1, 0.05, 1 / 3):
            m = microbatches_for_bubble(stages, bubble)
            assert bubble_fraction(stages, m) <= bubble
            assert m == 1 or bubble_fraction(stages, m - 1) > bubble
    assert effective_batch(8, 4) == 32
    assert effective_batch(8, 4, data_parallel=2) == 64
    assert microbatches_of_batch(64, 4, 2) == 8
    with pytest.raises(ConfigError, match="multiple of 8"):
        microbatches_of_batch(60, 4, 2)
    with pytest.raises(ConfigError, match="above 0 and below 1"):
        microbatches_for_bubble(4, 1.0)
    with pytest.raises(ConfigError, match="at least 1"):
        effective_batch(0, 4)

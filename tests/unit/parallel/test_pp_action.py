"""Actions and schedules as text, and the shape errors that name a place."""

from __future__ import annotations

import pytest

from headrace.errors import ScheduleError
from headrace.parallel import Action, Kind, Schedule, build_schedule, schedules


@pytest.mark.parametrize(
    "text", ["2F0", "1B13", "0I7", "11W3", "3SEND_F1", "4RECV_B0", "1UNSHARD", "0RESHARD", "2REDUCE_GRAD"]
)
def test_round_trip(text):
    assert str(Action.parse(text)) == text


def test_overlapped_pair():
    action = Action.parse(" (0F3;7B1)OVERLAP_F_B ")
    assert action.kind is Kind.OVERLAP_F_B
    assert action.leaves() == (Action(0, Kind.F, 3), Action(7, Kind.B, 1))
    assert str(action) == "(0F3;7B1)OVERLAP_F_B"


@pytest.mark.parametrize(
    "text",
    ["", "F0", "2X0", "2F0x", "3INCOMING", "-1F0", "2F", "1UNSHARD3", "(0F1)OVERLAP_F_B", "(0B1;0F2)OVERLAP_F_B"],
)
def test_what_is_no_action_is_refused_whole(text):
    """A reader that takes the front of a word would turn 3INCOMING into 3I and run it."""
    with pytest.raises(ScheduleError):
        Action.parse(text)


def test_empty_cells_are_idle_slots():
    schedule = Schedule.from_csv("0F0,,0B0,\n,1F0,1B0\n")
    assert schedule.rows == ((Action(0, Kind.F, 0), Action(0, Kind.B, 0)), (Action(1, Kind.F, 0), Action(1, Kind.B, 0)))
    assert schedule.stage_to_rank == (0, 1)
    assert schedule.num_microbatches == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0F0,0Q0\n", ["rank 0", "column 1", "'0Q0'"]),
        ("0F0,1F0\n1B0\n", ["stage 1", "rank 0", "rank 1"]),
        ("0F0,0B0\n2F0,2B0\n", ["stage 1", "stage 2"]),
        ("", ["no ranks"]),
    ],
)
def test_shape_errors_name_the_place(text, named):
    with pytest.raises(ScheduleError) as error:
        Schedule.from_csv(text)
    assert all(word in str(error.value) for word in named)


def test_files(tmp_path):
    schedule = build_schedule("zbv", 2, 4)
    schedule.save(tmp_path / "zbv.csv")
    assert Schedule.load(tmp_path / "zbv.csv") == schedule


def test_a_file_that_is_no_text_is_no_schedule(tmp_path):
    (tmp_path / "bin.csv").write_bytes(b"0F0,\xff\xfe")
    with pytest.raises(
        ScheduleError, match=r"bin.csv is no schedule: not text in UTF-8 \(invalid start byte at byte 4\)"
    ):
        Schedule.load(tmp_path / "bin.csv")


@pytest.mark.parametrize("name", schedules())
def test_a_schedule_of_fewer_microbatches_is_a_part(name):
    whole = build_schedule(name, 3, 9)
    part = whole.take(4)
    assert part.num_microbatches == 4
    seen = {(leaf.stage, leaf.kind, leaf.microbatch) for row in part.rows for a in row for leaf in a.leaves()}
    assert {mb for _, _, mb in seen} == set(range(4))
    assert part.stage_to_rank == whole.stage_to_rank

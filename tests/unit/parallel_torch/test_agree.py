"""What ranks compare, without processes: digests that are the same everywhere, and what is said of differences."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from torch import nn

from headrace.errors import ConfigError, WorkerDied
from headrace.parallel import Schedule, build_schedule
from headrace.parallel.torch_agree import Terms, actions_digest, crossing_ties, differences, known_of, verdict
from headrace.parallel.torch_stage import PipelineStage, find_ties, split_model


def terms(**given: Any) -> Terms:
    return replace(Terms("4", "1f1b", variable_shapes=False, watchdog=True, actions="a" * 32), **given)


def test_a_digest_is_of_the_actions_alone_and_the_same_in_every_process() -> None:
    schedule = build_schedule("gpipe", 2, 4).compute_only()
    digest = actions_digest(schedule)
    assert digest == actions_digest(Schedule.from_csv(schedule.to_csv(), "another name"))
    assert digest != actions_digest(build_schedule("1f1b", 2, 4).compute_only())
    assert actions_digest(Schedule.from_csv("0F0,0B0")) == "61a277dd70bae8365bcaa0c102636bc5"


def test_stages_count_only_where_others_know_them_too() -> None:
    own, other = {"0": {"weight": (4, 4)}}, {"1": {"weight": (4, 4)}}
    assert terms(stages=own).digest() == terms(stages=other).digest()
    assert terms(stages=own, whole=True).digest() != terms(stages=other, whole=True).digest()


def test_what_a_stage_says() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    stages = split_model(model, [1, 2])
    assert known_of(dict(enumerate(stages))) == {
        "cut": "[1, 2]",
        "stages": {
            "0": {"module.0.weight": (2, 3), "module.0.bias": (2,)},
            "1": {
                "module.1.weight": (2,),
                "module.1.bias": (2,),
                "module.2.weight": (1, 2),
                "module.2.bias": (1,),
                "module.1.running_mean": (2,),
                "module.1.running_var": (2,),
                "module.1.num_batches_tracked": (),
            },
        },
    }
    assert known_of({1: stages[1]}, 2)["cut"] == "[1, 2]"
    assert known_of({1: stages[1]}, 4)["cut"] == ""  # a part of a longer pipeline, whose cut is not known
    assert known_of({0: stages[1]}, 2)["cut"] == ""
    assert known_of({0: PipelineStage(model[0]), 1: stages[1]})["cut"] == "2 stages"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([{}, {}, {}], []),
        (
            [{}, {"num_microbatches": "8", "actions": "b"}, {}],
            ["number of microbatches: 4 on ranks 0 and 2, 8 on rank 1"],
        ),
        ([{"cut": "[2]"}, *[{"cut": "[3]"}] * 3], ["layers of each stage: [2] on rank 0, [3] on ranks 1 to 3"]),
        (
            [{"cut": str(value)} for value in range(20)],
            ["layers of each stage: " + ", ".join(f"{v} on rank {v}" for v in range(8)) + ", and 12 more values"],
        ),
        ([{"cut": "[2]"}, {"cut": ""}, {"cut": "[2]"}], []),
        ([{}, {"schedule": "another name"}], []),
        ([{}, {"schedule": "gpipe", "actions": "b"}], ["schedule: '1f1b' on rank 0, 'gpipe' on rank 1"]),
        (
            [{}, {"actions": "b" * 32}],
            [
                "schedule: '1f1b' (digest of its actions: aaaaaaaa) on rank 0, "
                "'1f1b' (digest of its actions: bbbbbbbb) on rank 1"
            ],
        ),
        (
            [{"stages": {"2": {"w": (4, 4), "b": ()}}}, {"stages": {"2": {"w": (4, 4)}}}, {}],
            ["stage 2, tensor 'b': [] on rank 0, none on rank 1"],
        ),
        ([{"ties": [((0, 2), "x")]}, {}, {"ties": [((0, 2), "x")]}], []),  # a rank without the weight need not know
        (
            [{"ties": [((0, 1), "x"), ((0, 1), "y")]}, {"ties": [((0, 1), "y"), ((0, 1), "x")]}],
            ["shared weights (RunOptions.ties): x, y on rank 0, y, x on rank 1"],
        ),
        ([{"ties": [((0, 1), "x")]}, {"failed": "E", "actions": ""}], []),
    ],
)
def test_differences(ranks: list[dict[str, Any]], said: list[str]) -> None:
    assert differences([terms(**given) for given in ranks]) == said


def test_a_tie_that_crosses_ranks() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    model[3].weight = model[0].weight
    model[1].bias = model[0].bias
    model[1].bias.requires_grad_(False)
    stages = dict(enumerate(split_model(model, [1, 1, 1, 1])))
    ties = find_ties(stages)
    schedule = build_schedule("interleaved-1f1b", 2, 2)  # stages 0 and 2 on rank 0, 1 and 3 on rank 1
    assert crossing_ties(ties, schedule, stages) == [
        ((0, 1), "'module.0.weight' of stage 0 = 'module.3.weight' of stage 3"),
        ((0, 1), "'module.0.bias' of stage 0 = 'module.1.bias' of stage 1 (frozen)"),
    ]
    assert "frozen" not in crossing_ties(ties, schedule, {})[1][1]  # a rank that has no copy need not know
    assert crossing_ties(ties, Schedule.from_csv("0F0,1F0,2F0,3F0"), stages) == []


def test_who_raises_what() -> None:
    failure = ConfigError("no")
    broken = terms(failed="ConfigError: no")
    assert verdict([terms()], 0, None) is None
    assert verdict([broken], 1, failure) is failure  # all failed alike: each says its own
    assert verdict([terms(), broken], 1, failure) is failure
    other = verdict([terms(), broken], 0, None)
    assert isinstance(other, WorkerDied)
    assert "rank 1 failed before its first step: ConfigError: no" in str(other)
    apart = verdict([terms(), terms(failed="ConfigError: no.", cut="[2]"), terms(cut="[3]")], 1, failure)
    assert isinstance(apart, ConfigError)
    assert apart.__cause__ is failure
    assert "[2] on rank 1, [3] on rank 2. Rank 1 failed: ConfigError: no. All need" in str(apart)

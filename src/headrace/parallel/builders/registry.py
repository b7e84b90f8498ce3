"""The table of schedules by name, and `build`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import ConfigError, UnknownOptionError
from headrace.parallel.action import Action
from headrace.parallel.builders.controllable import v_half, v_min
from headrace.parallel.builders.dualpipe_v import dualpipe_v
from headrace.parallel.builders.gpipe import gpipe
from headrace.parallel.builders.interleaved import interleaved_one_f_one_b, whole_groups
from headrace.parallel.builders.looped_bfs import looped_bfs
from headrace.parallel.builders.one_f_one_b import eager_one_f_one_b, one_f_one_b
from headrace.parallel.builders.zbv import zbv
from headrace.parallel.builders.zero_bubble import zb_1p, zb_h1, zb_h2
from headrace.parallel.formulas import check_counts
from headrace.parallel.schedule import Schedule

Rows = list[list[Action]]


@dataclass(frozen=True)
class Recipe:
    """How one schedule is built and what it asks for.

    `chunks` is how many stages each rank holds: a fixed number, or the default of a free one (`free_chunks`).
    `pattern` says, of ranks and microbatches, for how many microbatches the pattern is whole; a schedule of fewer
    is built for that many and cut short.
    """

    name: str
    rows: Callable[..., Rows]
    about: str
    chunks: int = 1
    free_chunks: bool = False
    placement: str = "loop"  # "loop": stage s on rank s % N; "v": down the ranks and back up
    splits_backward: bool = False
    pattern: Callable[[int, int], int] = lambda _ranks, microbatches: microbatches


_RECIPES = {
    r.name: r
    for r in (
        Recipe("gpipe", gpipe, "all forwards, then all backwards"),
        Recipe("1f1b", one_f_one_b, "one forward, one backward; activations bounded by depth"),
        Recipe("eager-1f1b", eager_one_f_one_b, "1F1B that runs further ahead, to hide latency"),
        Recipe(
            "interleaved-1f1b",
            interleaved_one_f_one_b,
            "1F1B with v stages a rank: 1/v of the bubble, v times the messages",
            chunks=2,
            free_chunks=True,
            pattern=whole_groups,
        ),
        Recipe("looped-bfs", looped_bfs, "stage by stage, breadth first: fewest unshards", chunks=2, free_chunks=True),
        Recipe("zb-h1", zb_h1, "split backward, memory of 1F1B, a third of its bubble", splits_backward=True),
        Recipe("zb-h2", zb_h2, "split backward, twice the memory, no span bubble", splits_backward=True),
        Recipe(
            "zb-1p",
            zb_1p,
            "ZB-H1 with v stages a rank",
            chunks=2,
            free_chunks=True,
            splits_backward=True,
            pattern=whole_groups,
        ),
        Recipe(
            "zbv",
            zbv,
            "two stages a rank in a V: no span bubble at equal times",
            chunks=2,
            placement="v",
            splits_backward=True,
            pattern=lambda ranks, microbatches: max(microbatches, 2 * ranks - 1),
        ),
        Recipe(
            "v-half",
            v_half,
            "V with half of ZB-V's activations and half of 1F1B's bubble",
            chunks=2,
            placement="v",
            splits_backward=True,
        ),
        Recipe(
            "v-min",
            v_min,
            "V with a third of ZB-V's activations and two thirds of 1F1B's bubble",
            chunks=2,
            placement="v",
            splits_backward=True,
        ),
        Recipe(
            "dualpipe-v",
            dualpipe_v,
            "V with forward and backward overlapped in pairs",
            chunks=2,
            placement="v",
            splits_backward=True,
            pattern=lambda ranks, microbatches: max(microbatches, 2 * ranks),
        ),
    )
}


def schedules() -> tuple[str, ...]:
    """The names that `build` knows."""
    return tuple(_RECIPES)


def recipe(name: str) -> Recipe:
    """The recipe of a schedule; an unknown name is an error that says the nearest known one."""
    try:
        return _RECIPES[name.lower().replace("_", "-")]
    except KeyError:
        raise UnknownOptionError("schedule", name, _RECIPES) from None


def build(name: str, num_ranks: int, num_microbatches: int, *, chunks: int | None = None) -> Schedule:
    """Build a schedule by name.

    `chunks` is the number of stages on each rank, for the schedules that leave it open (interleaved-1f1b, looped-bfs,
    zb-1p). The number of stages is `num_ranks x chunks`.

    >>> print(build("1f1b", 2, 2).to_csv())
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    <BLANKLINE>
    """
    spec = recipe(name)
    check_counts(num_ranks, num_microbatches)
    if chunks is None:
        chunks = spec.chunks
    if chunks < 1 or (chunks != spec.chunks and not spec.free_chunks):
        raise ConfigError(
            f"schedule {spec.name!r} holds {spec.chunks} stage(s) on each rank; chunks={chunks} is not possible. "
            f"Leave chunks out, or take one of {', '.join(n for n, r in _RECIPES.items() if r.free_chunks) or 'none'}"
        )
    whole = spec.pattern(num_ranks, num_microbatches)
    rows = spec.rows(num_ranks, whole, chunks) if spec.free_chunks else spec.rows(num_ranks, whole)
    fixed = tuple(tuple(row) for row in rows)
    placement = stage_to_rank(num_ranks, chunks, spec.placement)
    schedule = Schedule(spec.name, whole, fixed, placement, {"chunks": chunks})
    return schedule if whole == num_microbatches else schedule.take(num_microbatches)


def stage_to_rank(num_ranks: int, chunks: int, placement: str = "loop") -> tuple[int, ...]:
    """Where each stage lives: round and round ("loop"), or down the ranks and back up ("v")."""
    ranks = range(num_ranks)
    laps = (ranks if placement == "loop" or lap % 2 == 0 else reversed(ranks) for lap in range(chunks))
    return tuple(rank for lap in laps for rank in lap)

"""Closed forms of the bubble and of the activations held, each with the condition under which it is exact.

All are for equal stages and free communication. Times are those of a whole rank for one microbatch: forward tF, input gradient tI,
weight gradient tW (a rank with v stages spends tF / v on the forward of each). Two bubbles are in use: of the "makespan" (T minus
the work of a rank) and of the "span" (first to last action of the longest rank, minus its work), which is what remains when steps
follow each other without a barrier. Activations are in units of one microbatch on a whole rank, released at the weight gradient.

The conditions are what the simulator confirms over grids of N, M, v and times; where one does not hold, simulate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.parallel.builders.registry import recipe
from headrace.parallel.formulas import check_counts

Times = tuple[float, float, float]


@dataclass(frozen=True)
class Case:
    """What a closed form is asked about."""

    ranks: int
    microbatches: int
    chunks: int
    times: Times

    @property
    def equal(self) -> bool:
        """Whether the three times are the same."""
        return self.times[0] == self.times[1] == self.times[2]

    @property
    def short_weights(self) -> bool:
        """Whether a weight gradient takes no longer than a forward or an input gradient, so that it fits in their gaps."""
        return self.times[2] <= min(self.times[:2])


@dataclass(frozen=True)
class ClosedForm:
    """A bubble in seconds a rank, of the makespan or of the span, and the activations that each rank holds.

    `holds` says whether the case at hand satisfies `condition`; if not, the bubble is an estimate. On some ranks V-Min holds less
    than it says here; the largest rank is exact.
    """

    bubble: float
    of: str
    activations: tuple[float, ...]
    formula: str
    condition: str
    holds: bool


@dataclass(frozen=True)
class _Form:
    bubble: Callable[[Case], float]
    activations: Callable[[Case, int], float]
    formula: str
    condition: str
    holds: Callable[[Case], bool]
    of: str = "makespan"


def closed_form(
    name: str, num_ranks: int, num_microbatches: int, times: Times = (1, 1, 1), chunks: int | None = None
) -> ClosedForm:
    """The closed form of a schedule, with an honest label.

    >>> form = closed_form("zb-h1", 4, 12)
    >>> form.bubble, form.activations, form.holds
    (3, (4, 4, 4, 4), True)
    """
    check_counts(num_ranks, num_microbatches)
    spec = recipe(name)
    case = Case(num_ranks, num_microbatches, chunks or spec.chunks, times)
    form = _FORMS[spec.name]
    held = tuple(form.activations(case, rank) for rank in range(num_ranks))
    return ClosedForm(form.bubble(case), form.of, held, form.formula, form.condition, form.holds(case))


def _fill(case: Case) -> float:
    """(N-1)(tF+tI+tW): what GPipe and 1F1B lose."""
    return (case.ranks - 1) * sum(case.times)


def _split(case: Case, weights: int) -> float:
    """(N-1)(tF+tI - weights x tW)."""
    f, i, w = case.times
    return (case.ranks - 1) * (f + i - weights * w)


def _half(case: Case) -> float:
    """V-Half at equal times, in passes of half a rank's forward: 3N-3, for odd N one less."""
    return (3 * case.ranks - 3 - case.ranks % 2) * case.times[0] / 2 if case.ranks > 1 else 0


def _third(case: Case) -> float:
    """V-Min at equal times, in passes of half a rank's forward: 4N-5, where 3 divides N two more."""
    return (4 * case.ranks - 5 + 2 * (case.ranks % 3 == 0)) * case.times[0] / 2 if case.ranks > 1 else 0


def _dual(case: Case) -> float:
    """(N-1)(F&B + B - 3W) of one stage's times, run in turn."""
    f, i, w = case.times
    return (case.ranks - 1) * (f + 2 * (i + w) - 3 * w) / 2


def _least(case: Case, units: float) -> float:
    """No rank holds more than there are microbatches."""
    return min(case.microbatches, units)


_FORMS: dict[str, _Form] = {
    "gpipe": _Form(_fill, lambda c, _s: c.microbatches, "(N-1)(tF+tB)", "always", lambda _c: True),
    "1f1b": _Form(_fill, lambda c, s: _least(c, c.ranks - s), "(N-1)(tF+tB)", "always", lambda _c: True),
    "eager-1f1b": _Form(
        _fill, lambda c, s: _least(c, 2 * (c.ranks - s) - 1), "(N-1)(tF+tB)", "always", lambda _c: True
    ),
    "interleaved-1f1b": _Form(
        lambda c: _fill(c) / c.chunks,
        lambda c, s: _least(c, (c.chunks * c.ranks + c.ranks - 1 - 2 * s) / c.chunks),
        "(N-1)(tF+tB)/v",
        "M a multiple of N",
        lambda c: c.chunks > 1 and c.microbatches % c.ranks == 0,
    ),
    "looped-bfs": _Form(
        lambda c: _fill(c) / c.chunks,
        lambda c, _s: c.microbatches,
        "(N-1)(tF+tB)/v",
        "M >= N",
        lambda c: c.microbatches >= c.ranks,
    ),
    "zb-h1": _Form(
        lambda c: _split(c, 1),
        lambda c, _s: _least(c, c.ranks),
        "(N-1)(tF+tI-tW)",
        "M >= N and tW <= tF and tW <= tI",
        lambda c: c.microbatches >= c.ranks and c.short_weights,
    ),
    "zb-h2": _Form(
        lambda c: _split(c, 2),
        lambda c, _s: _least(c, 2 * c.ranks - 1),
        "(N-1)(tF+tI-2tW)",
        "M >= 2N-1 and tW <= tF and tW <= tI",
        lambda c: c.microbatches >= 2 * c.ranks - 1 and c.short_weights,
        of="span",
    ),
    "zb-1p": _Form(
        lambda c: _split(c, 1) / c.chunks,
        lambda c, _s: _least(c, c.ranks),
        "(N-1)(tF+tI-tW)/v",
        "M a multiple of N and tW <= tF and tW <= tI",
        lambda c: c.microbatches % c.ranks == 0 and c.short_weights,
    ),
    "zbv": _Form(
        lambda _c: 0,
        lambda c, _s: _least(c, c.ranks),
        "0",
        "M >= 2N-1 and tF = tI = tW",
        lambda c: c.microbatches >= 2 * c.ranks - 1 and c.equal,
        of="span",
    ),
    "v-half": _Form(
        _half,
        lambda c, _s: _least(c, (c.ranks + 2) // 2),
        "(3N-3)tF/2, odd N (3N-4)tF/2",
        "M >= 2N and tF = tI = tW",
        lambda c: c.microbatches >= 2 * c.ranks and c.equal,
    ),
    "v-min": _Form(
        _third,
        lambda c, _s: _least(c, (c.ranks + 4) // 3),
        "(4N-5)tF/2, where 3 divides N (4N-3)tF/2",
        "M >= 2N and tF = tI = tW",
        lambda c: c.microbatches >= 2 * c.ranks and c.equal,
    ),
    "dualpipe-v": _Form(
        _dual,
        lambda c, _s: _least(c, c.ranks + 0.5),
        "(N-1)(F&B+B-3W) of one stage",
        "M >= 2N and tF = tI = tW",
        lambda c: c.microbatches >= 2 * c.ranks and c.equal,
    ),
}

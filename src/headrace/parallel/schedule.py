"""A whole schedule: one row of actions for each rank, as plain data.

The order within a row is the order in which the rank runs its actions; there are no time slots. Where a stage lives
follows from the rows: the rank whose row computes it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from headrace.errors import ScheduleError
from headrace.parallel.action import PER_STAGE, Action, Kind, leaves


@dataclass(frozen=True)
class Schedule:
    """Rows of actions, with the placement of the stages that they imply.

    `rows[r]` is what rank `r` runs. `stage_to_rank[s]` is the rank of stage `s`. A schedule is data: building one
    checks its shape only; `headrace.parallel.check.prove` says whether it can run.
    """

    name: str
    num_microbatches: int
    rows: tuple[tuple[Action, ...], ...]
    stage_to_rank: tuple[int, ...]
    params: Mapping[str, object] = field(default_factory=dict[str, object], compare=False)

    @property
    def num_ranks(self) -> int:
        """How many ranks (processes, devices) the schedule occupies."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into; a multiple of the ranks in interleaved and V schedules."""
        return len(self.stage_to_rank)

    @cached_property
    def is_lowered(self) -> bool:
        """Whether the rows hold communication (torch: `compute_comms`) or computation only (`compute_only`)."""
        return any(not action.is_compute for row in self.rows for action in row)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some weight gradient runs apart from its input gradient."""
        return any(action.kind is Kind.W for row in self.rows for action in leaves(row))

    @cached_property
    def is_forward_only(self) -> bool:
        """Whether nothing is differentiated: an evaluation."""
        return all(action.kind is Kind.F for row in self.rows for action in row if action.is_compute)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that live on `rank`, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.stage_to_rank) if owner == rank)

    def compute_only(self) -> Schedule:
        """The same schedule without its communication and sharding actions."""
        rows = tuple(tuple(a for a in row if a.is_compute) for row in self.rows)
        return Schedule(self.name, self.num_microbatches, rows, self.stage_to_rank, self.params)

    def forward_only(self) -> Schedule:
        """The forwards alone, in their order: what `eval()` runs. Overlapped pairs leave their forward."""
        rows = tuple(tuple(a for a in leaves(row) if a.kind is Kind.F) for row in self.rows)
        return Schedule(f"{self.name} (forward only)", self.num_microbatches, rows, self.stage_to_rank, self.params)

    def take(self, num_microbatches: int) -> Schedule:
        """The schedule of the first `num_microbatches` only.

        No dependency joins two microbatches, so a part of a schedule that can run, can run. This is how a
        schedule whose pattern needs many microbatches serves few.
        """
        rows = tuple(tuple(_keep(row, num_microbatches)) for row in self.rows)
        return Schedule(self.name, num_microbatches, rows, self.stage_to_rank, self.params)

    def to_csv(self) -> str:
        """One line per rank, in the syntax that torch's runtime loads."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(self.rows)
        return out.getvalue()

    @staticmethod
    def from_rows(name: str, rows: Sequence[Iterable[Action]], num_microbatches: int | None = None) -> Schedule:
        """Make a schedule of rows and read the placement, and if not given the microbatches, off them."""
        fixed = tuple(tuple(row) for row in rows)
        if not fixed:
            raise ScheduleError(f"schedule {name!r} has no ranks; give one row of actions for each rank")
        placement = _placement(name, fixed)
        if num_microbatches is None:
            num_microbatches = 1 + max((a.microbatch or 0 for row in fixed for a in leaves(row)), default=-1)
        return Schedule(name, num_microbatches, fixed, placement)

    @staticmethod
    def from_csv(text: str, name: str = "csv", num_microbatches: int | None = None) -> Schedule:
        """Read what `to_csv` (or torch) wrote: one line per rank; an empty cell is an idle slot and is dropped."""
        rows: list[list[Action]] = []
        for rank, cells in enumerate(csv.reader(io.StringIO(text))):
            row: list[Action] = []
            for column, cell in enumerate(cells):
                try:
                    if cell.strip():
                        row.append(Action.parse(cell))
                except ScheduleError as error:
                    raise ScheduleError(f"schedule {name!r}, rank {rank}, column {column}: {error}") from None
            rows.append(row)
        return Schedule.from_rows(name, rows, num_microbatches)

    @staticmethod
    def load(path: str | Path, num_microbatches: int | None = None) -> Schedule:
        """Read a schedule from a CSV file; it takes the file's name. ScheduleError for a file that is no text."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ScheduleError(
                f"{path} is no schedule: not text in UTF-8 ({error.reason} at byte {error.start})"
            ) from error
        return Schedule.from_csv(text, path.stem, num_microbatches)

    def save(self, path: str | Path) -> None:
        """Write the schedule as a CSV file."""
        Path(path).write_text(self.to_csv(), encoding="utf-8")


def _keep(row: Iterable[Action], num_microbatches: int) -> Iterable[Action]:
    """The actions of a row that touch the first microbatches; half of an overlapped pair stands alone."""
    for action in row:
        if action.parts:
            parts = tuple(p for p in action.parts if p.microbatch is not None and p.microbatch < num_microbatches)
            if len(parts) == len(action.parts):
                yield action
            else:
                yield from parts
        elif action.kind in PER_STAGE or (action.microbatch is not None and action.microbatch < num_microbatches):
            yield action


def _placement(name: str, rows: tuple[tuple[Action, ...], ...]) -> tuple[int, ...]:
    """Stage to rank, read off the rows; a stage on two ranks, or on none, is an error that names it."""
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in leaves(row):
            first = owner.setdefault(action.stage, rank)
            if first != rank:
                raise ScheduleError(
                    f"schedule {name!r}: stage {action.stage} runs on rank {first} and on rank {rank} (action {action}); "
                    "a stage lives on one rank: move its actions to one row"
                )
    missing = sorted(set(range(max(owner, default=-1) + 1)) - set(owner))
    if missing:
        raise ScheduleError(
            f"schedule {name!r}: stage {missing[0]} has no action on any rank, but stage {max(owner)} has; "
            "add its actions, or number the stages without a gap"
        )
    return tuple(owner[stage] for stage in sorted(owner))

"""A step pipeline as a source of `headrace.Pipeline`: row `k` of the dataset is what the steps make of item `k`.

A data pipeline draws rows by number: it shuffles, mixes, deals them to ranks, and reads again what a checkpoint says was
held. So the items must be a sequence, and a row must depend on its item (and number, with `seed=`) alone. Then nothing is
stored or read in advance, every rank runs the steps for its own rows only, and a restored run is the same run.

What surprises:

* A step that gives `DROP`, or yields nothing, leaves its row out; the data pipeline counts it. More than one output is an
  error of that row: how many rows there are must be known before the first.
* Blocks of rows come from several threads at once (`fetch_parallelism`), so that the workers see more than one block. One of
  those threads waits for the workers, for all.
* The workers start with the first read, and end when the data pipeline's iteration does.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.block import MISSING, Column, Ints, lookup
from headrace.core.op import BadRows
from headrace.core.reorder import Batch
from headrace.errors import Cancelled, ConfigError
from headrace.io import Dataset, Reader, RowError, StoreOptions
from headrace.run.executor import Paced, Part, open_executor, route
from headrace.run.failure import Failure
from headrace.steps import build
from headrace.steps.batching import BatchSize
from headrace.steps.settings import Settings

_MEANINGLESS = {  # settings that a row drawn by number cannot have, and what to do instead
    "mode": "only the fused mode runs rows by number",
    "ordered": "the data pipeline decides the order (options(deterministic=False))",
    "max_pending": "the data pipeline decides how many rows wait",
    "assign": "rows are drawn by number, so a step can keep no state for a key",
    "shuffle_buffer": "shuffle in the data pipeline, whose checkpoints know of it",
    "on_error": "give on_error to the data pipeline (options(on_error='skip')), which counts what it leaves out",
    "progress": "the data pipeline shows its own progress (options(progress=True))",
}


def make_dataset(settings: Settings, name: str, items: Sequence[Any], field: str | None) -> Dataset:
    """See `steps.Pipeline.dataset`."""
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__") or isinstance(items, (str, bytes, Mapping)):
        raise ConfigError(
            f"dataset {name!r}: the items of a step pipeline must be a sequence (a list, a range, an array), because a data "
            f"pipeline draws rows by number; found {type(items).__name__}. Make a list of it, or run the pipeline once, write "
            "its outputs to files, and use Dataset.from_path"
        )
    defaults = Settings(settings.steps)
    for option, reason in _MEANINGLESS.items():
        if (value := getattr(settings, option)) != getattr(defaults, option):
            raise ConfigError(
                f"dataset {name!r}: {option}={value!r} of the step pipeline cannot be used here; {reason}"
            )
    counts = np.array([len(items)], np.int64)
    counts.flags.writeable = False
    steps = " > ".join(step.name for step in settings.steps)
    seed = "" if settings.seed is None else f", seed={settings.seed}"
    table: Any = StepTable((steps,), counts, np.zeros(1, np.int64), items, settings, field)
    return StepDataset(name, f"steps({steps}{seed})", table, StoreOptions())


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    """The one shard of a `StepDataset`, and what its rows are made of."""

    names: tuple[str, ...]
    counts: Ints
    sizes: Ints
    items: Sequence[Any]
    settings: Settings
    field: str | None


class StepDataset(Dataset):
    """A dataset whose rows are the outputs of a step pipeline. Its steps' names and seed are part of a checkpoint's recipe."""

    __slots__ = ()

    @property
    def every_row(self) -> bool:
        """A step may leave rows out."""
        return False

    def open(self, options: Any = None) -> Reader:
        """A reader; the workers start with its first read."""
        del options
        table: Any = self.table
        return StepReader(self.name, table)


class StepReader:
    """Runs the steps for the rows asked for. Any thread may read."""

    def __init__(self, dataset: str, table: StepTable) -> None:
        """Nothing starts yet."""
        self._dataset = dataset
        self._table = table
        self._crew: Crew | None = None
        self._lock = threading.Lock()

    def read(self, shard: int, rows: Ints, fields: frozenset[str] | None, bad: BadRows | None = None) -> Any:
        """Columns, or the payloads themselves for `fields=None`."""
        index = rows.tolist()
        if shard != 0 or (index and not 0 <= min(index) <= max(index) < len(self._table.items)):
            raise ConfigError(
                f"dataset {self._dataset!r} has shard 0 with {len(self._table.items)} rows; asked for shard {shard}, rows "
                f"{index[:8]}"
            )
        with self._lock:
            if self._crew is None:
                self._crew = Crew(self._table.settings)
            crew = self._crew
        items = [self._table.items[row] for row in index]
        if (
            self._table.settings.runner != "process"
        ):  # a step may write into what it gets; the items must stay as they are
            items = copy.deepcopy(items)
        outcomes = crew.run(list(zip(index, items, strict=True)))
        refused = BadRows() if bad is None else bad
        payloads = self._payloads(index, outcomes, refused)
        if bad is None and refused.errors:
            raise refused.errors[0]
        if bad is None and refused.left_out:
            raise self._error(
                index[refused.left_out[0]], "gave no output", "read it through a pipeline, which leaves it out"
            )
        return payloads if fields is None else _columns(payloads, fields)

    def rest(self) -> None:
        """End the workers; the next read starts them again."""
        with self._lock:
            crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()

    def close(self) -> None:
        """End the workers."""
        self.rest()

    def _payloads(self, index: list[int], outcomes: list[Any], refused: BadRows) -> list[Any]:
        payloads: list[Any] = []
        for position, (row, outcome) in enumerate(zip(index, outcomes, strict=True)):
            if isinstance(outcome, Failure):
                error = outcome.raised(row)
                if not isinstance(error, Exception):
                    raise error
                refused.add(position, error)
            elif not outcome:
                refused.leave_out(position)
            elif len(outcome) > 1:
                remedy = (
                    "a row is one record, because their number must be known before the first is read. Run the pipeline once, "
                    "write its outputs to files, and use Dataset.from_path"
                )
                refused.add(position, self._error(row, f"gave {len(outcome)} outputs", remedy))
            elif isinstance(outcome[0], Mapping):
                payloads.append(outcome[0])
            elif self._table.field is not None:
                payloads.append({self._table.field: outcome[0]})
            else:
                remedy = "let the last step give a dict, or say which field it is with dataset(..., field='input_ids')"
                refused.add(position, self._error(row, f"gave a {type(outcome[0]).__name__}, not a mapping", remedy))
        return payloads

    def _error(self, row: int, what: str, remedy: str) -> RowError:
        steps = self._table.names[0]
        return RowError(
            f"dataset {self._dataset!r}, row {row}: the steps {steps} {what}; {remedy}", row=row, path=steps
        )


def _columns(payloads: list[Any], fields: frozenset[str]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for name in sorted(fields):
        column = [lookup(payload, name) for payload in payloads]
        if any(value is not MISSING for value in column):
            columns[name] = column
    return columns


class Crew:
    """One executor for many threads: each hands in its rows, and one of them waits for the workers until its own are done."""

    def __init__(self, settings: Settings) -> None:
        """Start the workers."""
        self._executor: Paced = open_executor(settings.runner, build.by_number(settings))
        self._size = BatchSize()
        self._submitted: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._driven = self._closed = False

    def run(self, numbered: list[tuple[int, Any]]) -> list[Any]:
        """For each (number, item) the list of its outputs, or its `Failure`."""
        request = Request(len(numbered), self._size)
        if not numbered:
            return request.outcomes
        with self._changed:
            self._submitted.append(Batch((request, 0), numbered, len(numbered)))
            self._executor.wake()  # whoever waits for the workers hands it in
            while request.left:
                if self._closed:
                    raise Cancelled("the dataset was closed while its rows were read")
                if self._driven:
                    self._changed.wait()
                else:
                    self._drive()
        return request.outcomes

    def _drive(self) -> None:
        """Hand in what there is and wait for something to be done, while others may come and ask."""
        self._driven = True
        self._changed.release()
        try:
            while self._submitted:
                self._executor.submit(self._submitted.popleft())
            self._executor.set_limit(0, self._size.items)
            route(self._executor.completed())
        finally:
            self._changed.acquire()
            self._driven = False
            self._changed.notify_all()

    def close(self) -> None:
        """End the workers; whoever reads gets `Cancelled`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._driven:
                self._executor.wake()
                self._changed.wait(0.1)
        self._executor.close()


class Request:
    """The rows that one thread waits for; parts of them are done in any order."""

    def __init__(self, count: int, size: BatchSize) -> None:
        """`size` learns from what is done."""
        self.left = count
        self.outcomes: list[Any] = [None] * count
        self._size = size

    def deliver(self, first: int, part: Part) -> None:
        """Some of the rows are done."""
        self._size.observe(part.count, part.seconds, part.nbytes)
        at = first + part.start
        good = part.count - (part.failure is not None)
        self.outcomes[at : at + good] = part.values
        if part.failure is not None:
            self.outcomes[at + good] = part.failure
        self.left -= part.count

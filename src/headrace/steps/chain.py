"""What a worker runs: all steps of a pipeline (or one, in staged mode) as a single call an item.

Fused steps are 1.4 to 2 times faster than a queue between every two (measured at every batch size), so the chain is
where the time goes and is written for it: no object an item, no clock an item. Counts are exact; times are taken on
some batches (the first, second, fourth, eighth, ..., and every 32nd), and on every batch whose items are slow.
"""

from __future__ import annotations

from operator import length_hint
from time import perf_counter
from typing import TYPE_CHECKING

from headrace.run.failure import from_exception
from headrace.run.task import SLICE, STARTED
from headrace.steps.failed import Failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from headrace.run.task import Through
    from headrace.steps.settings import OnError

    Into = Callable[..., None]

_TIMED_EVERY = 32
_SLOW = 50e-6  # seconds an item; from here on the clock costs nothing worth mentioning
_KEPT_ERRORS = 5
_CAUGHT = (Exception, SystemExit, GeneratorExit)  # not KeyboardInterrupt: inline, that is the user at the keyboard


class _Drop:
    """The value by which a step says "no output for this item"."""

    __slots__ = ()

    def __reduce__(self) -> str:
        """There is one."""
        return "DROP"

    def __repr__(self) -> str:
        return "headrace.steps.DROP"


DROP = _Drop()


class Step:
    """One step, as the user gave it: a function, a generator function, or an object with set-up and tear-down."""

    __slots__ = ("call", "many", "name")

    def __init__(self, name: str, call: Callable[[Any], Any], many: bool) -> None:
        """`many`: yields any number of outputs."""
        self.name = name
        self.call = call
        self.many = many


class StepReport:
    """What a worker did since its last report, one number a step.

    `timed` is the number of items of which the time was taken. `plain` says that those who came through every step were not
    counted: they are the outputs that are not failures.
    """

    __slots__ = ("errors", "failed", "plain", "produced", "received", "seconds", "skipped", "timed")

    def __init__(self, steps: int, plain: bool) -> None:
        """All zero."""
        self.received, self.produced = [0] * steps, [0] * steps
        self.timed, self.seconds = [0] * steps, [0.0] * steps
        self.plain = plain
        self.failed = 0
        self.skipped = 0
        self.errors: list[str] | None = None

    def emptied(self) -> StepReport:
        """A report of the same kind that counts nothing."""
        return StepReport(len(self.received), self.plain)

    def kept(self, outputs: int) -> None:
        """So many outputs came through every step and could not be sent."""
        for n in range(len(self.received) if self.plain else 0):
            self.received[n] += outputs
            self.produced[n] += outputs

    def __reduce__(self) -> tuple[Any, ...]:
        """Plain lists: a report goes with every acknowledgement."""
        counts = (self.received, self.produced, self.timed, self.seconds)
        return _report, (counts, self.plain, self.failed, self.skipped, self.errors)


def _report(counts: Any, plain: bool, failed: int, skipped: int, errors: list[str] | None) -> StepReport:
    report = StepReport(0, plain)
    report.received, report.produced, report.timed, report.seconds = counts
    report.failed, report.skipped, report.errors = failed, skipped, errors
    return report


class Chain:
    """The steps, set up. One instance in each worker."""

    indexed = False

    def __init__(self, steps: tuple[Step, ...], on_error: OnError = "raise", *, passes_failed: bool = False) -> None:
        """Run every `setup`; `passes_failed`: inputs may be `Failed` from an earlier stage."""
        self._steps = steps
        self._calls = [step.call for step in steps]
        self._plain = not self.indexed and not passes_failed and not any(step.many for step in steps)
        self._on_error = on_error
        self._passes_failed = passes_failed
        self._at = 0
        self._ready = 0
        self._batches = 0
        self._choose(timed=True)
        for step in steps:
            self._at = self._ready
            if (setup := getattr(step.call, "setup", None)) is not None:
                setup()
            self._ready += 1

    @property
    def where(self) -> str:
        """The step that runs or ran."""
        return f"step {self._steps[self._at].name}"

    def close(self) -> None:
        """Run every `teardown`, last step first, all of them even if one raises."""
        error: BaseException | None = None
        for step in reversed(self._steps[: self._ready]):
            try:
                if (teardown := getattr(step.call, "teardown", None)) is not None:
                    teardown()
            except Exception as raised:  # noqa: BLE001 (the other steps' tear-down must still run)
                error = error or raised
        self._ready = 0
        if error is not None:
            raise error

    def __call__(self, item: Any) -> list[Any]:
        """The outputs of one item, as a list."""
        outputs: list[Any] = []
        self.into(item, outputs)
        return outputs

    def at(self, index: int) -> None:
        """Told the item's index in the whole input, if `indexed`."""

    def one_by_one(self) -> None:
        """Told before the first item if items are given singly, not in slices: then each is counted."""
        self._plain = False
        self._choose(timed=True)

    def report(self) -> StepReport:
        """What was done since the last report; also chooses whether the next slice takes times."""
        report = self._report
        slow = any(s > _SLOW * n for s, n in zip(report.seconds, report.timed, strict=True) if n)
        n = self._batches = self._batches + 1
        self._choose(timed=slow or n % _TIMED_EVERY == 0 or n & (n - 1) == 0)
        return report

    def _choose(self, *, timed: bool) -> None:
        """Begin a report, with the fastest way to run an item that fills it."""
        plain = self._plain and not timed
        self._report = report = StepReport(len(self._steps), plain)
        self._received, self._produced = report.received, report.produced
        self._timed, self._seconds = report.timed, report.seconds
        self.through: Through | None = self._plain_through if plain else None
        if self._on_error != "raise" or self._passes_failed:
            self.into: Into = self._guarded_into
        else:
            self.into = self._timed_into if timed else self._many_into

    # -- the ways to run an item; all give the same outputs ------------------------------------------------------

    def _plain_through(self, items: Any, values: list[Any], ends: list[int], words: Any, clock: Any) -> None:
        """Functions only (one output an item, or DROP), a whole slice in one loop; counts nobody who comes through."""
        calls, append, done, count = self._calls, values.append, ends.append, words[STARTED]
        deadline = clock.started + SLICE
        for item in items:
            count += 1
            words[STARTED] = count
            rest = iter(calls)
            try:
                for call in rest:
                    item = call(item)
                    if item is DROP:
                        self._dropped(len(calls) - length_hint(rest) - 1)
                        break
                else:
                    append(item)
            except BaseException as error:  # told where it happened, and raised on
                self._at = len(calls) - length_hint(rest) - 1
                self._dropped(self._at)
                if self._on_error == "raise" or not isinstance(error, _CAUGHT):
                    raise
                self._give_up(error, item, values)
            done(len(values))
            if perf_counter() >= deadline and (deadline := clock.extended()) == 0.0:
                return

    def _dropped(self, n: int) -> None:
        """Step `n` kept an item, which the count of outputs will miss."""
        for k in range(n + 1):
            self._received[k] += 1
            self._produced[k] += k < n

    def _many_into(self, item: Any, outputs: list[Any], n: int = 0) -> None:
        """Functions and generators, depth first."""
        last = len(self._steps)
        while n < last:
            self._at = n
            step = self._steps[n]
            self._received[n] += 1
            if step.many:
                for output in step.call(item):
                    if output is not DROP:
                        self._produced[n] += 1
                        self._many_into(output, outputs, n + 1)
                        self._at = n
                return
            item = step.call(item)
            if item is DROP:
                return
            self._produced[n] += 1
            n += 1
        outputs.append(item)

    def _timed_into(self, item: Any, outputs: list[Any], n: int = 0) -> None:
        """The same with a clock around each step (a generator's time excludes the steps after it)."""
        last = len(self._steps)
        while n < last:
            self._at = n
            step = self._steps[n]
            self._received[n] += 1
            self._timed[n] += 1
            started = perf_counter()
            if step.many:
                for output in step.call(item):
                    self._seconds[n] += perf_counter() - started
                    if output is not DROP:
                        self._produced[n] += 1
                        self._timed_into(output, outputs, n + 1)
                        self._at = n
                    started = perf_counter()
                self._seconds[n] += perf_counter() - started
                return
            item = step.call(item)
            self._seconds[n] += perf_counter() - started
            if item is DROP:
                return
            self._produced[n] += 1
            n += 1
        outputs.append(item)

    def _guarded_into(self, item: Any, outputs: list[Any]) -> None:
        """With a policy for errors. The unit is one call of one step: if it raises, it has given nothing.

        So what a generator yielded before it raised does not count, and what its neighbours gave does; fused and staged
        pipelines agree on it.
        """
        if not self._passed(item, outputs):
            self._guarded_from(0, item, outputs)

    def _passed(self, item: Any, outputs: list[Any]) -> bool:
        """Whether it is a failure of an earlier stage, which goes past the steps of this one."""
        if not self._passes_failed or type(item) is not Failed:
            return False
        outputs.append(item)
        self._report.failed += 1
        return True

    def _guarded_from(self, n: int, item: Any, outputs: list[Any]) -> None:
        for output in self._attempt(n, item, outputs):
            if n + 1 < len(self._steps):
                self._guarded_from(n + 1, output, outputs)
            else:
                outputs.append(output)

    def _attempt(self, n: int, item: Any, outputs: list[Any]) -> list[Any]:
        """All outputs of one call of step `n`; none if it raises and the policy is not to."""
        self._at = n
        step = self._steps[n]
        self._received[n] += 1
        self._timed[n] += 1
        started = perf_counter()
        try:
            found = list(step.call(item)) if step.many else [step.call(item)]
        except _CAUGHT as error:
            if self._on_error == "raise":
                raise
            self._give_up(error, item, outputs)
            return []
        self._seconds[n] += perf_counter() - started
        found = [output for output in found if output is not DROP]
        self._produced[n] += len(found)
        return found

    def _give_up(self, error: BaseException, item: Any, outputs: list[Any]) -> None:
        failure = from_exception(error, self.where, item)
        report = self._report
        if self._on_error == "return":
            outputs.append(Failed(failure))
            report.failed += 1
            return
        report.skipped += 1
        report.errors = report.errors or []
        if len(report.errors) < _KEPT_ERRORS:
            report.errors.append(f"{failure.where}: {failure.error!r}, item {failure.item}")


def iterate(transform: Callable[..., Iterator[Any]], **settings: Any) -> Callable[[Any], Iterator[Any]]:
    """A step out of a transformation of iterators, such as a GluonTS `Chain`: `transform([item], **settings)`.

    The transformation sees one item at a time, so whatever it yields belongs to that item. State that it keeps on
    itself lives as long as the worker; state across items inside one call (batching, shuffling) does not exist:
    put that behind the pipeline.
    """
    return _Iterate(transform, settings)


class _Iterate:
    """See `iterate`."""

    __slots__ = ("settings", "transform")

    def __init__(self, transform: Callable[..., Iterator[Any]], settings: dict[str, Any]) -> None:
        self.transform = transform
        self.settings = settings

    def __call__(self, item: Any) -> Iterator[Any]:
        """Everything the transformation yields for this item."""
        yield from self.transform([item], **self.settings)

    @property
    def __name__(self) -> str:
        return type(self.transform).__name__

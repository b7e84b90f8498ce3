"""What a rank keeps about its own run: where it stands, what it computed when, and which stage raised."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.parallel.action import Action, Kind
from headrace.parallel.timeline import Span
from headrace.parallel.torch_stage import stage_error


@dataclass
class Position:
    """Where this rank stands: written by the runtime before each action, read by the watchdog."""

    rows: Sequence[Action] = ()
    index: int = -1
    step: int = 0
    interrupted: Callable[[], None] = lambda: None

    def __str__(self) -> str:
        """Step, action and place in the list, for a person."""
        if not 0 <= self.index < len(self.rows):
            return f"between steps (after step {self.step - 1})" if self.step else "before its first step"
        return f"step {self.step}, {self.rows[self.index]} (action {self.index + 1} of {len(self.rows)})"


class WatchedRow(list[Any]):
    """A list of torch's actions that tells the position as it is walked."""

    def __init__(self, actions: Sequence[Any], position: Position, rows: Sequence[Action]) -> None:
        super().__init__(actions)
        self.position = position
        self.rows = rows

    def __deepcopy__(self, _: Any) -> list[Any]:
        return self[:]  # torch copies the lists to print them when an action fails

    def __iter__(self) -> Iterator[Any]:
        self.position.rows = self.rows
        for index in range(len(self)):
            self.position.index = index
            self.position.interrupted()
            yield self[index]
        self.position.index = -1


@dataclass
class Recorder:
    """Start and end of every computation of this rank, on the wall clock or, on a GPU, by its events."""

    rank: int
    device: torch.device
    spans: list[Span] = field(default_factory=list)
    events: list[tuple[Action, Any, Any]] = field(default_factory=list)
    origin: tuple[float, Any] = (0.0, None)

    def begin_step(self) -> None:
        """Forget the last step; on a GPU, tie the device's clock to the host's."""
        self.spans.clear()
        self.events.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.origin = (time.monotonic(), event)

    def timed(self, action: Action, run: Callable[[], Any]) -> Any:
        """Run a computation and note when."""
        if self.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            value = run()
            end.record()
            self.events.append((action, start, end))
            return value
        began = time.monotonic()
        value = run()
        self.spans.append(Span(self.rank, action, began, time.monotonic()))
        return value

    def finish(self) -> list[Span]:
        """The spans of the step, in seconds of this host's monotonic clock."""
        if self.events:
            torch.cuda.synchronize(self.device)
            base, event = self.origin
            for action, start, end in self.events:
                at = [base + event.elapsed_time(e) / 1000 for e in (start, end)]
                self.spans.append(Span(self.rank, action, *at))
            self.events.clear()
        return list(self.spans)


@contextlib.contextmanager
def named(action: Action, inputs: Iterable[Tensor]) -> Generator[None]:
    """Errors of a stage say which stage it was; those of the transport, and our own, pass as they are."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:  # whatever the module raises, mostly wrapped by torch
        cause = error.__cause__ or error
        if isinstance(cause, HeadraceError):
            raise cause from None
        if looks_like_transport(cause):
            raise
        what = "forward" if action.kind is Kind.F else "backward"
        raise stage_error(action.stage, int(action.microbatch or 0), what, inputs, cause) from cause


def looks_like_transport(error: BaseException) -> bool:
    """Whether an error looks like a transport's: another rank's failure, seen from here."""
    if isinstance(error, HeadraceError) or not isinstance(error, RuntimeError):
        return False
    words = ("gloo", "NCCL", "onnection", "pair closure", "Timed out")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)

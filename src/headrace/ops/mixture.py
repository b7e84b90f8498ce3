"""`ensure_mixture`: records in such an order that what is delivered follows the mixture by weight, in tokens for instance.

The curriculum mixes samples exactly, but filters and documents of different lengths move the shares of what reaches the model. Here
each record waits in its component's queue. The component that is furthest behind its share is next: if it has a record, that
one leaves; if not, the others wait for it. A full buffer gives out records of those that are furthest behind among those that
have any, so a component that has ended, or is filtered away, holds nobody up for ever.

All sums begin anew at every flush, so the order depends on nothing before it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np

from headrace.arguments import whole_number
from headrace.core.block import COMPONENT, MISSING, Block, Drop, Ints, Origin, field_roots, to_list
from headrace.core.op import Fields
from headrace.core.refusal import Refusal
from headrace.core.tokens import PADDING, TOKEN_FIELDS, column_lengths, find_tokens_field
from headrace.errors import CheckpointError, ConfigError, OperatorError, RecordError
from headrace.ops.map import function_name
from headrace.ops.pool import RowPool
from headrace.options import OnError

_NAME: Final = "ensure_mixture"
_OFF: Final = -1
"""The queue of components that the mixture gives no share."""
_WARM_UP: Final = 1000
_RATE_STEPS: Final = 10_000
"""`obsolete_drain_rate` is taken as the nearest fraction with a denominator up to this: sums of whole numbers are exact."""
_ADVICE: Final = "Such records are left out with on_error='skip' or 'quarantine'"
_log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class EnsureMixture:
    """Hold records back so that components leave in proportion to `targets`.

    `weight_by`: "auto" counts tokens, padding aside, and "samples" records; a field's name takes its number, a function is asked
    for one.
    `max_buffer_size`: records held at most; a full buffer is emptied to `drain_target_ratio` of it. None never forces a record out:
    what has no room in the mixture at a flush is dropped and counted.
    `obsolete_drain_rate`: records of components without a share that leave for each other record; 0 keeps them to the flush.
    `warn_tolerance`: log a warning at a flush if a component's share was off by more than this.
    `on_error`: what becomes of a record without a weight: its function raises, or gives no number of at least 0, or there are no
    tokens to count. None is "raise", or in a pipeline what its options say. A record that is left out counts for no share.
    """

    targets: tuple[tuple[str, float], ...]
    max_buffer_size: int | None = 1000
    drain_target_ratio: float = 0.8
    obsolete_drain_rate: float = 0.1
    weight_by: str | Callable[[Any], float] = "auto"
    warn_tolerance: float | None = None
    on_error: OnError | None = None
    components: tuple[tuple[str, int], ...] = ()
    """Names and ids of the components; `with_components` fills it in."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.max_buffer_size is not None:
            size = whole_number(f"{_NAME}: max_buffer_size (None never forces records out)", self.max_buffer_size, 1)
            object.__setattr__(self, "max_buffer_size", size)
        _check_number(
            "drain_target_ratio", self.drain_target_ratio, lambda x: 0 < x < 1, "between 0 and 1, and neither"
        )
        _check_number("obsolete_drain_rate", self.obsolete_drain_rate, lambda x: 0 <= x <= 1, "from 0 to 1")
        if self.warn_tolerance is not None:
            _check_number("warn_tolerance", self.warn_tolerance, lambda x: 0 < x < 1, "between 0 and 1, or None")
        given: Any = self.weight_by
        if not callable(given) and not (isinstance(given, str) and given):
            raise ConfigError(f"{_NAME}: weight_by is 'auto', 'samples', a field's name or a function; found {given!r}")

    @property
    def name(self) -> str:
        """Shown by explain()."""
        return _NAME

    @property
    def reorders(self) -> bool:
        """It does nothing else."""
        return True

    def describe(self) -> dict[str, Any]:
        """Parameters that decide data."""
        return {
            "targets": dict(self.targets),
            "max_buffer_size": self.max_buffer_size,
            "drain_target_ratio": self.drain_target_ratio,
            "obsolete_drain_rate": self.obsolete_drain_rate,
            "weight_by": self.weight_by if isinstance(self.weight_by, str) else function_name(self.weight_by),
        }

    def needs(self, downstream: Fields) -> Fields:
        """Whatever is wanted of its output, and what the weights are made of."""
        if downstream is None or callable(self.weight_by):
            return None
        if self.weight_by == "samples":
            return downstream
        return downstream | (set(TOKEN_FIELDS) if self.weight_by == "auto" else field_roots([self.weight_by]))

    def with_components(self, components: Mapping[str, int]) -> EnsureMixture:
        """The same operator, told which component id has which name. ConfigError for a share of none of them."""
        unknown = sorted({name for name, _ in self.targets} - components.keys())
        if unknown:
            raise ConfigError(f"{_NAME}: no component is called {unknown[0]!r}; known: {', '.join(sorted(components))}")
        return replace(self, components=tuple(sorted(components.items())))

    def accumulator(self, lane: int) -> MixtureBuffer:
        """The queues of one lane."""
        return MixtureBuffer(self, lane)


class MixtureBuffer:
    """Records of one lane by component, and what has left since the last flush."""

    def __init__(self, spec: EnsureMixture, lane: int) -> None:
        """Hold nothing."""
        self._spec, self._lane = spec, lane
        numbers, total = dict(spec.components), math.fsum(weight for _, weight in spec.targets)
        self._names = {numbers[name]: name for name, weight in spec.targets if weight > 0}
        self._shares = {numbers[name]: weight / total for name, weight in sorted(spec.targets) if weight > 0}
        rate = Fraction(spec.obsolete_drain_rate).limit_denominator(_RATE_STEPS)
        self._earned, self._price = rate.numerator, rate.denominator
        self._pool = RowPool(lane)
        self._clear()

    def _clear(self) -> None:
        self._pool.clear()
        self._queues: dict[int, deque[tuple[int, float]]] = {number: deque() for number in (*self._shares, _OFF)}
        self._given = dict.fromkeys(self._shares, 0.0)
        self._total = 0.0
        self._held = self._left = 0
        self._credit = 0  # what records with a share have earned for those without; at `_price` one of them leaves
        self._next = self._neediest(self._shares)

    def push(self, block: Block) -> list[Block]:
        """Records that are next now."""
        out: list[int] = []
        block, weights = self._weighed(block, self._spec.on_error or "raise")
        if len(block):
            first, size = self._pool.add(block), self._spec.max_buffer_size or math.inf
            components = block.origin.ids[:, COMPONENT].tolist()
            for handle, (component, weight) in enumerate(zip(components, weights, strict=True), first):
                self._enqueue(component, handle, weight)
                if component == self._next or self._held >= size or self._off_is_due():
                    self._release(out)
        leaving = self._take(out)
        if self._pool.wasteful(self._held):
            self._pool.keep(self._handles())
        if not block.drops:
            return leaving
        first, *rest = leaving or [Block(self._lane, Origin.empty(), {})]
        return [first.dropping(*block.drops), *rest]

    def flush(self) -> list[Block]:
        """Everything, those furthest behind first; or, if nothing is forced, word that it is dropped."""
        self._speak_up()
        if self._spec.max_buffer_size is None and self._held:
            _log.warning("%s: %d records have no room in the mixture at a flush and are dropped", _NAME, self._held)
            dropped = Drop(_NAME, "no room in the mixture", self._pool.origins(self._handles()).ids)
            out = [Block(self._lane, Origin.empty(), {}).dropping(dropped)]
        else:
            order: list[int] = []
            self._force(order, 0)
            out = self._take(order)
        self._clear()
        return out

    end = flush

    def held(self) -> Origin:
        """Held records by arrival."""
        return self._pool.origins(self._handles())

    def state(self) -> dict[str, Any]:
        """What has left: weights by component, and what that has earned for records without a share."""
        given = {self._names[number]: weight for number, weight in self._given.items() if weight}
        return {"given": given, "total": self._total, "credit": self._credit, "left": self._left}

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """Queue the held records again."""
        self._clear()
        numbers = {name: number for number, name in self._names.items()}
        unknown = sorted(set(state["given"]) - set(numbers))
        if unknown:
            raise CheckpointError(
                f"{_NAME}: the checkpoint counts {unknown[0]!r}, which has no share in the mixture now"
            )
        self._given |= {numbers[name]: float(weight) for name, weight in state["given"].items()}
        self._total, self._credit, self._left = float(state["total"]), int(state["credit"]), int(state["left"])
        self._next = self._neediest(self._shares)
        if held is not None and len(held):
            self._pool.restore(np.arange(len(held)), held, len(held))
            components = held.origin.ids[:, COMPONENT].tolist()
            held, weights = self._weighed(held, "raise")
            for handle, (component, weight) in enumerate(zip(components, weights, strict=True)):
                self._enqueue(component, handle, weight)

    # -- who is next --------------------------------------------------------------------------------

    def _enqueue(self, component: int, handle: int, weight: float) -> None:
        self._queues[component if component in self._shares else _OFF].append((handle, weight))
        self._held += 1

    def _release(self, out: list[int]) -> None:
        """Give out records as long as the component that is furthest behind has one, or the buffer is full."""
        size = self._spec.max_buffer_size
        while self._held:
            if self._off_is_due():
                self._give(_OFF, out)
            elif self._queues[self._next]:
                self._give(self._next, out)
            elif size is not None and self._held >= size:
                self._force(out, math.floor(size * self._spec.drain_target_ratio))
            else:
                return

    def _force(self, out: list[int], down_to: int) -> None:
        """Give out records of those furthest behind among those that have any."""
        while self._held > down_to:
            having = [number for number in self._shares if self._queues[number]]
            self._give(_OFF if self._off_is_due() or not having else self._neediest(having), out)

    def _off_is_due(self) -> bool:
        return self._earned > 0 and self._credit >= self._price and bool(self._queues[_OFF])

    def _neediest(self, numbers: Any) -> int:
        """The component furthest behind its share; of equal ones the first by name."""
        total, given, shares = max(1.0, self._total), self._given, self._shares
        first, most = _OFF, -math.inf
        for number in numbers:
            behind = shares[number] * total - given[number]
            if behind > most:
                first, most = number, behind
        return first

    def _give(self, number: int, out: list[int]) -> None:
        handle, weight = self._queues[number].popleft()
        out.append(handle)
        self._held -= 1
        self._left += 1
        if number == _OFF:
            self._credit = max(0, self._credit - self._price)
            return
        self._given[number] += weight
        self._total += weight
        self._next = self._neediest(self._shares)
        if self._credit < self._price:  # at most one is owed: those that come late do not come at once
            self._credit += self._earned

    def _take(self, handles: list[int]) -> list[Block]:
        return [self._pool.take(np.asarray(handles, np.int64))] if handles else []

    def _handles(self) -> Ints:
        return np.sort(np.array([handle for queue in self._queues.values() for handle, _ in queue], np.int64))

    # -- weights ------------------------------------------------------------------------------------

    def _weighed(self, block: Block, policy: OnError) -> tuple[Block, list[float]]:
        """The rows that have a weight, and their weights; with word of the others, unless the policy is to raise."""
        found = self._weights(block)
        bad = {row: value for row, value in enumerate(found) if isinstance(value, Exception)}
        if not bad:
            return block, found  # type: ignore[return-value]
        if policy == "raise":
            raise next(iter(bad.values()))
        payloads = block.payloads() if policy == "quarantine" else None
        rows = np.array([row for row in range(len(block)) if row not in bad], np.int64)
        kept = block.take(rows) if len(rows) else block.slice(0, 0).dropping(*block.drops)
        drops = [
            _refused(block, row, error, policy, None if payloads is None else payloads[row])
            for row, error in bad.items()
        ]
        return kept.dropping(*drops), [value for value in found if not isinstance(value, Exception)]

    def _weights(self, block: Block) -> Sequence[float | Exception]:
        """The weight of each row, or why it has none."""
        by = self._spec.weight_by
        if by == "samples":
            return [1.0] * len(block)
        if by == "auto":
            lengths = _tokens(block)
            if lengths is None:
                return [_tokens_of_row(block, row) for row in range(len(block))]
            return lengths.astype(float).tolist()
        if isinstance(by, str):
            return [_number(block, row, by, value) for row, value in enumerate(to_list(block.column(by)))]
        return [_asked(block, row, by, payload) for row, payload in enumerate(block.payloads())]

    def _speak_up(self) -> None:
        tolerance = self._spec.warn_tolerance
        if tolerance is None or self._left < _WARM_UP or not self._total:
            return
        off = {n: self._given[n] / self._total - share for n, share in self._shares.items()}
        far = [f"{self._names[n]} {self._shares[n] + d:.4g} (asked for {self._shares[n]:.4g})" for n, d in off.items()]
        if max(map(abs, off.values())) > tolerance:
            _log.warning("%s: lane %d was off by more than %g: %s", _NAME, self._lane, tolerance, ", ".join(far))


def _tokens(block: Block) -> Ints | None:
    columns = block.as_columns()
    name = find_tokens_field(columns)
    lengths = None if name is None else column_lengths(columns[name], len(block))
    padding = columns.get(PADDING)
    return lengths - padding if lengths is not None and isinstance(padding, np.ndarray) else lengths


def _tokens_of_row(block: Block, row: int) -> float | Exception:
    one = block.slice(row, row + 1)
    if (lengths := _tokens(one)) is not None:
        return float(lengths[0])
    names = sorted(name for name, column in one.as_columns().items() if to_list(column) != [MISSING])
    return _error(block, row, f"no token ids to count; the record has {', '.join(names) or 'no fields'}")


def _asked(block: Block, row: int, fn: Callable[[Any], float], payload: Any) -> float | Exception:
    try:
        value = fn(payload)
    except Exception as cause:  # noqa: BLE001  a user's function raises anything; it gets a name and a place
        error = OperatorError(
            f"{_NAME}(weight_by={function_name(fn)}) raised {type(cause).__name__}: {cause} ({_place(block, row)}). {_ADVICE}"
        )
        error.__cause__ = cause
        return error
    return _number(block, row, fn, value)


def _number(block: Block, row: int, by: Any, value: Any) -> float | Exception:
    if isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and 0 <= float(value) < math.inf:
        return float(value)
    return _error(block, row, f"weight_by={_shown(by)} gave {value!r:.60}; a weight is a number of at least 0")


def _refused(block: Block, row: int, error: Exception, policy: OnError, payload: Any) -> Drop:
    """Word of a row that is left out, for what its function raised, if that is why."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    refusal = Refusal.of(cause, payload, keep=policy == "quarantine")
    return Drop(_NAME, f"{policy}: {type(cause).__name__}", block.origin.ids[row : row + 1], refusal=refusal)


def _shown(by: Any) -> str:
    return repr(by) if isinstance(by, str) else function_name(by)


def _check_number(name: str, value: Any, fits: Callable[[float], bool], allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits(value):
        raise ConfigError(f"{_NAME}: {name} is a number {allowed}; found {value!r}")


def _error(block: Block, row: int, what: str) -> RecordError:
    error = RecordError(
        f"{_NAME}: {what} ({_place(block, row)}); tokenize first, or choose another weight_by=. {_ADVICE}"
    )
    error.origin = tuple(block.origin.ids[row].tolist())
    return error


def _place(block: Block, row: int) -> str:
    dataset, shard, number = block.origin.ids[row, :3].tolist()
    return f"dataset {dataset}, shard {shard}, row {number}"

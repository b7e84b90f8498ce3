"""User functions: on one payload (`MapTransform`, `Filter`), on columns (`MapBlock`), on a finished batch (`MapBatch`).

A user function must be a function of its argument alone, or resuming and parallel workers would change the data. That is
checked on the first records that each worker sees: the function runs twice on copies and must agree with itself; a block
function must give the same rows for a block and for its halves.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from headrace.core.block import (
    DATASET,
    ROW,
    Block,
    Column,
    Drop,
    Ints,
    Ragged,
    Text,
    concat_blocks,
    field_roots,
    lookup,
    slice_column,
    to_list,
)
from headrace.core.equality import same
from headrace.core.op import BadRows, Fields, Worker, in_parts
from headrace.core.padding import hidden_columns, padding_of, unknown_padding
from headrace.core.stack import is_there
from headrace.core.tokens import HIDDEN
from headrace.errors import ConfigError, OperatorError, PayloadTypeError
from headrace.ops.named_fields import look_for
from headrace.options import Validation

CHECKED: Final = 4
"""Records on which a worker checks a user function."""


def require_callable(fn: Any, method: str) -> None:
    """TypeError-like ConfigError if `fn` cannot be called."""
    if not callable(fn):
        raise TypeError(f"{method}() takes a function, got {type(fn).__name__}: {fn!r:.80}")


def function_name(fn: Any) -> str:
    """How explain() and errors call a user function."""
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


@dataclass(frozen=True, slots=True)
class MapTransform:
    """`fn(payload) -> payload or None`, one record at a time. None drops the record (with `drop_none`)."""

    fn: Callable[[Any], Any]
    drop_none: bool = True
    validation: Validation = "strict"
    name: str = "map_transform"

    def describe(self) -> dict[str, Any]:
        """The function's name: its code is the user's to keep unchanged."""
        return {"fn": function_name(self.fn), "drop_none": self.drop_none}

    def needs(self, downstream: Fields) -> Fields:
        """Everything: a function may look anywhere."""
        return None

    def worker(self) -> Worker:
        """A function over blocks that calls `fn` per record."""
        unchecked = [CHECKED if self.validation != "off" else 0]

        def transform(block: Block, bad: BadRows) -> Block:
            kept, rows, dropped = [], [], []
            for i, payload in enumerate(_writable(_shown(block)).payloads()):
                try:
                    if unchecked[0]:
                        unchecked[0] -= 1
                        _check_twice(f"{self.name}({function_name(self.fn)})", self.fn, payload, self.validation)
                    result = self.fn(dict(payload) if type(payload) is dict else payload)
                except OperatorError:
                    raise
                except Exception as error:  # noqa: BLE001  the user's code may raise anything; the policy decides
                    if bad.stop_at(i, error):
                        break
                    continue
                if result is None:
                    if self.drop_none:
                        dropped.append(i)
                        continue
                    result = payload
                kept.append(i)
                rows.append(result)
            return _with_rows(keep_rows(block, kept, dropped, self.name, "returned None"), rows)

        return transform


@dataclass(frozen=True, slots=True)
class Filter:
    """Keep the records for which `predicate(payload)` is true."""

    predicate: Callable[[Any], Any]
    validation: Validation = "strict"
    name: str = "filter"

    def describe(self) -> dict[str, Any]:
        """The predicate's name."""
        return {"fn": function_name(self.predicate)}

    def needs(self, downstream: Fields) -> Fields:
        """Everything: a predicate may look anywhere."""
        return None

    def worker(self) -> Worker:
        """A function over blocks that asks per record."""
        unchecked = [CHECKED if self.validation != "off" else 0]

        def keep(block: Block, bad: BadRows) -> Block:
            kept, dropped = [], []
            for i, payload in enumerate(_shown(block).payloads()):
                try:
                    if unchecked[0]:
                        unchecked[0] -= 1
                        where = f"{self.name}({function_name(self.predicate)})"
                        _check_twice(where, lambda p: bool(self.predicate(p)), payload, self.validation)
                    (kept if self.predicate(dict(payload) if type(payload) is dict else payload) else dropped).append(i)
                except OperatorError:
                    raise
                except Exception as error:  # noqa: BLE001  the user's code may raise anything; the policy decides
                    if bad.stop_at(i, error):
                        break
            return keep_rows(block, kept, dropped, self.name, "filtered")

        return keep


@dataclass(frozen=True, slots=True)
class MapBlock:
    """`fn(columns) -> columns`: dict of columns in, dict of columns out, same number of rows.

    Text arrives as a list of str, ragged numbers as a list of arrays, fixed-width fields as numpy arrays. `fn` may also
    return `(columns, keep)` with a bool mask over its input rows; the columns then hold the kept rows. `reads` names the
    fields that `fn` looks at, so that only these are decoded; None means all.
    """

    fn: Callable[[dict[str, Any]], Any]
    reads: frozenset[str] | None = None
    validation: Validation = "strict"
    name: str = "map_block"

    def describe(self) -> dict[str, Any]:
        """The function's name and the fields it reads."""
        return {"fn": function_name(self.fn), "reads": None if self.reads is None else sorted(self.reads)}

    def needs(self, downstream: Fields) -> Fields:
        """What `reads` says."""
        return None if self.reads is None else field_roots(self.reads)

    def worker(self) -> Worker:
        """A function over blocks that calls `fn` once per block."""
        unchecked = [self.validation != "off"]

        def part(block: Block) -> Block:
            shown, n = self._columns(_shown(block)), len(block)
            result, keep = self._call(_handed_over(shown), n)
            if unchecked[0] and n > 1:
                unchecked[0] = False
                self._check(shown, result, keep, n)
            if keep is None:
                return _with_columns(block, result)
            kept, dropped = np.flatnonzero(keep), np.flatnonzero(~keep)
            return _with_columns(keep_rows(block, kept.tolist(), dropped.tolist(), self.name, "filtered"), result)

        def transform(block: Block, bad: BadRows) -> Block:
            named, rows = self._named(block, bad)
            try:
                return part(named)
            except OperatorError:
                raise
            except Exception as error:  # noqa: BLE001  a user's function raises anything; the rows that it fails on are looked for
                return self._in_parts(named, rows, bad, part, error)

        return transform

    def _in_parts(
        self, block: Block, rows: Ints, bad: BadRows, part: Callable[[Block], Block], error: Exception
    ) -> Block:
        """What comes of the rows that the function does not fail on; under "raise", of those before the first that it fails on."""
        refused = BadRows(stops=bad.stops)
        parts = in_parts(len(block), lambda start, stop: part(block.slice(start, stop)), refused)
        for row, alone in zip(refused.rows, refused.errors, strict=True):
            bad.add(int(rows[row]), alone)
        if not refused.rows:
            dataset, shard, row = block.origin.firsts()[0, DATASET : ROW + 1].tolist()
            raise OperatorError(
                f"map_block({function_name(self.fn)}) raised {type(error).__name__}: {error} on {len(block)} rows that begin with "
                f"dataset {dataset}, shard {shard}, row {row}, and on none of them alone"
            ) from error
        made = concat_blocks(parts or [block.slice(0, 0)])
        return replace(made, drops=(*block.drops, *made.drops))

    def _named(self, block: Block, bad: BadRows) -> tuple[Block, Ints]:
        """The records that have columns, and which they are."""
        kept = [row for row, payload in enumerate(block.rows or ()) if isinstance(payload, Mapping)]
        if block.rows is None or len(kept) == len(block):
            return block, np.arange(len(block))
        for row in sorted(set(range(len(block))) - set(kept)):
            kind = type(block.rows[row]).__name__
            bad.add(
                row, PayloadTypeError(f"map_block takes records with named fields, found a {kind}: use map_transform")
            )
        return block.take(np.asarray(kept, np.int64)), np.asarray(kept, np.int64)

    def _columns(self, block: Block) -> dict[str, Column]:
        """What the function is shown."""
        columns = dict(block.as_columns())
        if self.reads is not None:
            inside = {path: block.column(path) for path in sorted(self.reads - columns.keys()) if "." in path}
            columns = {k: c for k, c in columns.items() if k in self.reads} | {
                k: c for k, c in inside.items() if is_there(c)
            }
        return columns

    def _call(self, columns: dict[str, Any], n: int) -> tuple[dict[str, Column], Any]:
        result = self.fn(dict(columns))
        keep = None
        if isinstance(result, tuple) and len(result) == 2:
            result, keep = result[0], np.asarray(result[1])
            if keep.dtype != bool and keep.size:
                raise OperatorError(
                    f"map_block({function_name(self.fn)}): keep must hold one True or False for each row, found {keep.dtype}"
                )
            keep = keep.astype(bool)
        if not isinstance(result, Mapping):
            raise OperatorError(
                f"map_block({function_name(self.fn)}) returned {type(result).__name__}; return a dict of columns"
            )
        if keep is not None and keep.shape != (n,):
            raise OperatorError(f"map_block({function_name(self.fn)}): keep has shape {keep.shape}, the block {n} rows")
        rows = n if keep is None else int(keep.sum())
        out: dict[str, Column] = {}
        for name, column in result.items():
            if _is_one_value(column):
                raise OperatorError(
                    f"map_block({function_name(self.fn)}): column {name!r} is one {type(column).__name__}, expected {rows} values"
                )
            if not isinstance(column, (np.ndarray, Ragged, Text)):
                column = list(column)
            if len(column) != rows:
                raise OperatorError(
                    f"map_block({function_name(self.fn)}): column {name!r} has {len(column)} rows, expected {rows}"
                )
            out[str(name)] = column
        return out, keep

    def _check(self, columns: dict[str, Column], result: dict[str, Column], keep: Any, n: int) -> None:
        half = n // 2
        for a, b in ((0, half), (half, n)):
            part, part_keep = self._call(_handed_over({k: slice_column(c, a, b) for k, c in columns.items()}), b - a)
            mask = np.ones(n, bool) if keep is None else keep
            first = int(mask[:a].sum())
            want = {k: to_list(c)[first : first + int(mask[a:b].sum())] for k, c in result.items()}
            got = {k: to_list(c) for k, c in part.items()}
            if not (same(want, got) and same(keep is None, part_keep is None)):
                _complain(
                    self.validation,
                    f"map_block({function_name(self.fn)}) gives other rows for a block than for its halves, so the data would "
                    "depend on how the stream is cut into blocks. Compute each row from that row alone, or switch this check "
                    "off with options(auto_validation='off').",
                )
                return


@dataclass(frozen=True, slots=True)
class MapBatch:
    """`fn(SampleBatch) -> anything`, after `batch`. None drops the batch (with `drop_none`)."""

    fn: Callable[[Any], Any]
    drop_none: bool = True
    name: str = "map_batch"

    def describe(self) -> dict[str, Any]:
        """The function's name."""
        return {"fn": function_name(self.fn), "drop_none": self.drop_none}

    def needs(self, downstream: Fields) -> Fields:
        """Everything."""
        return None


@dataclass(frozen=True, slots=True)
class Select:
    """Keep only these fields (whole, by their top-level names); the others are not even decoded."""

    fields: tuple[str, ...]
    name: str = "select"

    def __post_init__(self) -> None:
        """At least one name."""
        given: tuple[Any, ...] = self.fields
        if not given or not all(isinstance(field, str) and field for field in given):
            raise ConfigError(
                f"select() takes at least one field name, each an argument, found {', '.join(map(repr, given)) or 'none'}"
            )

    def describe(self) -> dict[str, Any]:
        """The fields."""
        return {"fields": list(self.fields)}

    def prepare(self, sample: Block | None, notes: Any = None) -> Select:
        """Look for the fields in the first records."""
        look_for("select", self.fields, sample)
        inside = [] if sample is None else sorted(set(self.fields) - sample.as_columns().keys())
        for path in inside:
            if sample is not None and is_there(sample.column(path)):
                root = path.partition(".")[0]
                raise ConfigError(
                    f"select({path!r}): this lies inside the field {root!r}, and select keeps whole fields; take select({root!r})"
                )
        return self

    def needs(self, downstream: Fields) -> Fields:
        """Of these, what is wanted downstream."""
        return frozenset(self.fields) if downstream is None else frozenset(self.fields) & downstream

    def worker(self) -> Worker:
        """A function that leaves out the other columns."""
        wanted = frozenset(self.fields)

        def select(block: Block, bad: BadRows) -> Block:
            if block.columns is not None:
                return _with_columns(block, {k: c for k, c in block.columns.items() if k in wanted})
            return block.with_rows(
                [
                    {k: v for k, v in row.items() if k in wanted} if isinstance(row, Mapping) else row
                    for row in block.payloads()
                ]
            )

        return select


@dataclass(frozen=True, slots=True)
class Materialize:
    """Pass records on unchanged: a place for a stage boundary."""

    name: str = "materialize"

    def describe(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def needs(self, downstream: Fields) -> Fields:
        """Whatever is asked for."""
        return downstream

    def worker(self) -> Worker:
        """The identity."""
        return lambda block, bad: block


def keep_rows(block: Block, kept: list[int], dropped: list[int], operator: str, reason: str) -> Block:
    """`kept` rows of the block, with `dropped` on its account."""
    out = block if len(kept) == len(block) else block.take(np.asarray(kept, np.int64))
    if dropped:
        out = out.dropping(Drop(operator, reason, block.origin.take(np.asarray(dropped, np.int64)).begun()))
    return out


def _shown(block: Block) -> Block:
    """The block without the library's own columns."""
    if block.columns is None or HIDDEN.isdisjoint(block.columns):
        return block
    return block.with_columns({name: column for name, column in block.columns.items() if name not in HIDDEN})


def _writable(block: Block) -> Block:
    """The same rows, where a function may change arrays: what it finds is always its own, however the block came to be."""
    if block.columns is None:
        return block
    columns: dict[str, Column] = {}
    for name, column in block.columns.items():
        match column:
            case np.ndarray() if column.ndim > 1 and not column.flags.writeable:
                columns[name] = column.copy()
            case Ragged() if not column.values.flags.writeable:
                columns[name] = Ragged(column.flat.copy(), column.offsets - column.offsets[0])
            case _:
                columns[name] = column
    return replace(block, columns=columns)


def _with_rows(block: Block, rows: list[Any]) -> Block:
    """What a function made of each row."""
    if block.columns is None or HIDDEN.isdisjoint(block.columns):
        return block.with_rows(rows)
    if all(isinstance(row, Mapping) for row in rows):
        names = dict.fromkeys(name for row in rows for name in row)
        return _with_columns(block, {name: [lookup(row, name) for row in rows] for name in names})
    for row in np.flatnonzero(padding_of(block)).tolist():
        if not isinstance(rows[row], Mapping):
            raise unknown_padding(block, row, None)
    return block.with_rows(rows)


def _with_columns(block: Block, columns: dict[str, Column]) -> Block:
    """What a function made of these rows, and the library's own columns."""
    return block.with_columns({**columns, **hidden_columns(block, columns)})


def _is_one_value(column: Any) -> bool:
    if isinstance(column, (Ragged, Text)):
        return False
    if isinstance(column, np.ndarray):
        return column.ndim == 0
    return isinstance(column, (str, bytes)) or not hasattr(column, "__iter__")


def _handed_over(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Columns as a function takes them, copied: what it changes in place is its own, and no other call's."""
    out: dict[str, Any] = {}
    for name, column in columns.items():
        match column:
            case np.ndarray():
                out[name] = column.copy()
            case Ragged():
                out[name] = to_list(Ragged(column.flat.copy(), column.offsets - column.offsets[0]))
            case Text():
                out[name] = column.to_str()
            case _:
                out[name] = [v.copy() if isinstance(v, (np.ndarray, list, dict)) else v for v in to_list(column)]
    return out


def _check_twice(where: str, fn: Callable[[Any], Any], payload: Any, validation: Validation) -> None:
    """Complain if `fn` gives two results for copies of one record."""
    first, second = fn(copy.deepcopy(payload)), fn(copy.deepcopy(payload))
    if not same(first, second):
        _complain(
            validation,
            f"{where} gave two results for one record, so a resumed run would differ: {_short(first)} and then {_short(second)}. "
            "Make it a function of its argument alone (seed any randomness from the record), or switch this check off with "
            "options(auto_validation='off').",
        )


def _complain(validation: Validation, message: str) -> None:
    if validation == "strict":
        raise OperatorError(message)
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

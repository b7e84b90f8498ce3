"""`pack_flat`: documents into rows of exactly `max_length` tokens.

    algorithm      cuts documents        padding             left at a flush
    wrap           at every row end      none (flush: tail)  one row, padded; dropped and counted without pad_token_id
    best_fit_wrap  at most once a row    none (flush: tail)  the pool, in tight rows, the last one padded
    first_fit      never                 yes                 every open bin
    best_fit       never                 yes, less           every open bin

Whatever the algorithm: tokens in = tokens out + counted drops; an empty document is dropped and counted; a document
longer than a row is cut by the two that wrap and otherwise dropped and counted, or an error with `drop_oversized=False`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from headrace.arguments import whole_number
from headrace.core.block import Block, Origin
from headrace.core.op import Fields
from headrace.core.tokens import PADDING, POSITIONS, TOKEN_FIELDS
from headrace.errors import ConfigError
from headrace.ops.pack.assemble import assemble_rows
from headrace.ops.pack.best_fit import BestFit
from headrace.ops.pack.best_fit_wrap import BestFitWrapPacker, PoolRules
from headrace.ops.pack.bins import BinPacker, BinRules
from headrace.ops.pack.domains import DomainGroups, DomainPacker, Packer, RowPacker, renumbered
from headrace.ops.pack.fields import AlignedFields
from headrace.ops.pack.first_fit import FirstFit
from headrace.ops.pack.gate import Gate
from headrace.ops.pack.ordered import OrderedPacker
from headrace.ops.pack.shape import RowShape
from headrace.ops.pack.wrap import WrapPacker
from headrace.options import OnError

PackingAlgorithm = Literal["first_fit", "best_fit", "wrap", "best_fit_wrap"]
ShuffleStrategy = Literal["random", "length"]
FlushStrategy = Literal["fifo", "fullest"]
Homogeneity = Literal["none", "full", "group"]

_NAME: Final = "pack_flat"
_CUTTING: Final = ("wrap", "best_fit_wrap")
_FITTINGS: Final = {"first_fit": FirstFit, "best_fit": BestFit}
_BINNING: Final = tuple(_FITTINGS)
_NOT_DATA: Final = ("components", "on_error")
_WHOLE: Final = (
    "max_length",
    "num_bins",
    "max_sequences_per_bin",
    "pad_token_id",
    "min_sequence_length",
    "shuffle_seed",
    "candidate_pool_size",
    "max_candidate_age",
)
_POOL_SIZE: Final = 1024
_AGE_PER_CANDIDATE: Final = 8


@dataclass(frozen=True, slots=True)
class PackFlat:
    """Pack documents into rows of `max_length` tokens (usually the context length plus one, for the label shift)."""

    max_length: int
    num_bins: int | None = None
    max_sequences_per_bin: int | None = None
    algorithm: PackingAlgorithm = "first_fit"
    tokens_field: str = "auto"
    pad_token_id: int | None = None
    emit_positions: bool = True
    drop_oversized: bool | None = None
    min_sequence_length: int = 1
    shuffle_strategy: ShuffleStrategy | None = None
    shuffle_seed: int | None = None
    flush_strategy: FlushStrategy = "fifo"
    candidate_pool_size: int | None = None
    max_candidate_age: int | None = None
    homogeneity: Homogeneity = "none"
    groups: DomainGroups | None = None
    on_error: OnError | None = None
    """What becomes of documents that cannot be packed; None is "raise", or in a pipeline what its options say."""
    components: tuple[tuple[str, int], ...] = ()
    """Names and ids of the components; `with_components` fills it in, for `homogeneity="group"` now or before a change."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None or name in ("max_length", "min_sequence_length"):
                object.__setattr__(self, name, whole_number(f"{_NAME}: {name}", value))
        for wrong, message in (*_size_problems(self), *_mode_problems(self)):
            if wrong:
                raise ConfigError(f"{_NAME}: {message}")

    @property
    def name(self) -> str:
        """Shown by explain()."""
        return _NAME

    @property
    def reorders(self) -> bool:
        """Records are regrouped."""
        return True

    def describe(self) -> dict[str, Any]:
        """Parameters that decide data."""
        parameters = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _NOT_DATA}
        return parameters | {"groups": None if self.groups is None else self.groups.describe()}

    def with_components(self, components: Mapping[str, int]) -> PackFlat:
        """The same operator, told which component id has which name. An unknown name in `groups` is a ConfigError."""
        if self.groups is None:
            return replace(self, components=tuple(sorted(components.items())))
        self.groups.validate_against(components)
        alone = sorted(components.keys() - self.groups.to_member_map().keys())
        if alone:
            warnings.warn(f"{_NAME}: in no group, so never packed with others: {', '.join(alone)}", stacklevel=2)
        return replace(self, components=tuple(sorted(components.items())))

    def needs(self, downstream: Fields) -> Fields:
        """The token field, and whatever else is wanted of its output."""
        if downstream is None:
            return None
        made = {POSITIONS, PADDING} if self.emit_positions else {PADDING}
        return (downstream - made) | (set(TOKEN_FIELDS) if self.tokens_field == "auto" else {self.tokens_field})

    def renumbered(
        self, state: dict[str, Any], components: Mapping[int, int], parameters: Mapping[str, Any]
    ) -> dict[str, Any]:
        """An accumulator's state for components that have other ids now: `components` maps old ones to new ones.

        `parameters`: those of the operator that the state is of, as `describe()` gave them.
        """
        if parameters["homogeneity"] == "none":
            return state
        grouped = parameters["homogeneity"] == "group"
        if parameters["shuffle_strategy"] is None:
            return renumbered(state, components, grouped)
        return {**state, "packer": renumbered(state["packer"], components, grouped)}

    def accumulator(self, lane: int) -> Packer:
        """The open rows of one lane."""
        packer: Packer
        if self.homogeneity == "none":
            packer = self._packer(self._fields(), lane)
        else:
            domains = None if self.groups is None else self.groups.domains(dict(self.components))
            packer = DomainPacker(lambda fields: self._packer(fields, lane), self._fields, domains, lane)
        if self.on_error not in (None, "raise"):
            whole = self.algorithm in _FITTINGS and self.drop_oversized is False
            packer = Gate(packer, self._fields(), self.max_length if whole else None, self.on_error)
        if self.shuffle_strategy is None:
            return packer
        return OrderedPacker(packer, self.shuffle_strategy, self.shuffle_seed or 0, self.tokens_field, lane)

    def _packer(self, fields: AlignedFields, lane: int) -> RowPacker:
        if self.algorithm == "wrap":
            return WrapPacker(fields, self._shape(), self.max_sequences_per_bin, lane)
        if self.algorithm == "best_fit_wrap":
            return BestFitWrapPacker(self._pool_rules(), fields, self._shape(), lane)
        return BinPacker(_FITTINGS[self.algorithm], self._rules(), fields, self._shape(), lane)

    def assemble(self, records: Block, origin: Origin) -> Block:
        """Rebuild the packed rows named by `origin` from the documents they were made of."""
        return assemble_rows(records, origin, self._fields, self._shape())

    def _fields(self) -> AlignedFields:
        return AlignedFields(self.tokens_field, self.pad_token_id, self.emit_positions)

    def _rules(self) -> BinRules:
        return BinRules(
            num_bins=self.num_bins or 1,
            max_sequences=self.max_sequences_per_bin,
            min_room=max(1, self.min_sequence_length),
            fullest_first=self.flush_strategy == "fullest",
            drop_oversized=self.drop_oversized is not False,
        )

    def _pool_rules(self) -> PoolRules:
        size = self.candidate_pool_size or _POOL_SIZE
        return PoolRules(size, self.max_candidate_age or _AGE_PER_CANDIDATE * size, self.max_sequences_per_bin)

    def _shape(self) -> RowShape:
        return RowShape(self.max_length, self.pad_token_id, self.emit_positions)


def _size_problems(op: PackFlat) -> list[tuple[bool, str]]:
    cutting, pooled = op.algorithm in _CUTTING, op.algorithm == "best_fit_wrap"
    only_pooled = {"candidate_pool_size": op.candidate_pool_size, "max_candidate_age": op.max_candidate_age}
    return [
        (op.max_length <= 0, f"max_length must be at least 1, found {op.max_length}"),
        (
            op.max_sequences_per_bin is not None and op.max_sequences_per_bin <= 0,
            f"max_sequences_per_bin must be at least 1, found {op.max_sequences_per_bin}",
        ),
        (op.min_sequence_length < 0, f"min_sequence_length must not be negative, found {op.min_sequence_length}"),
        (cutting and op.num_bins is not None, f"num_bins has no meaning for {op.algorithm!r}; leave it out"),
        (
            op.algorithm in _FITTINGS and op.num_bins is None,
            f"{op.algorithm!r} needs num_bins, the rows kept open at a time",
        ),
        (op.num_bins is not None and op.num_bins <= 0, f"num_bins must be at least 1, found {op.num_bins}"),
        *(
            (
                value is not None and (not pooled or value <= 0),
                f"{name} must be at least 1, and is for 'best_fit_wrap' only; found {value} with {op.algorithm!r}",
            )
            for name, value in only_pooled.items()
        ),
    ]


def _mode_problems(op: PackFlat) -> list[tuple[bool, str]]:
    unpadded, wrap = op.pad_token_id is None, op.algorithm == "wrap"
    return [
        *(
            (value not in known, f"unknown {name} {value!r}; known: {', '.join(map(repr, known))}")
            for name, value, known in (
                ("algorithm", op.algorithm, _CUTTING + _BINNING),
                ("shuffle_strategy", op.shuffle_strategy, (None, "random", "length")),
                ("flush_strategy", op.flush_strategy, ("fifo", "fullest")),
                ("homogeneity", op.homogeneity, ("none", "full", "group")),
                ("on_error", op.on_error, (None, *get_args(OnError))),
            )
        ),
        (
            op.algorithm in _CUTTING and op.drop_oversized is True,
            f"{op.algorithm!r} cuts long documents, so drop_oversized=True has no meaning",
        ),
        (unpadded and not wrap, f"{op.algorithm!r} pads rows, so it needs pad_token_id"),
        (
            unpadded and op.max_sequences_per_bin is not None,
            "max_sequences_per_bin closes rows early, so it needs pad_token_id",
        ),
        ((op.groups is None) == (op.homogeneity == "group"), "homogeneity='group' and groups= go together"),
    ]

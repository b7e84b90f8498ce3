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

from dataclasses import dataclass
from typing import Any, Final, Literal

from headrace.core.block import Block, Origin
from headrace.core.op import Accumulator, Fields
from headrace.core.tokens import PADDING, POSITIONS, TOKEN_FIELDS
from headrace.errors import ConfigError
from headrace.ops.pack.assemble import assemble_rows
from headrace.ops.pack.best_fit import BestFit
from headrace.ops.pack.best_fit_wrap import BestFitWrapPacker, PoolRules
from headrace.ops.pack.bins import BinPacker, BinRules
from headrace.ops.pack.fields import AlignedFields
from headrace.ops.pack.first_fit import FirstFit
from headrace.ops.pack.ordered import OrderedPacker
from headrace.ops.pack.shape import RowShape
from headrace.ops.pack.wrap import WrapPacker

PackingAlgorithm = Literal["first_fit", "best_fit", "wrap", "best_fit_wrap"]
ShuffleStrategy = Literal["random", "length"]
FlushStrategy = Literal["fifo", "fullest"]

_NAME: Final = "pack_flat"
_CUTTING: Final = ("wrap", "best_fit_wrap")
_FITTINGS: Final = {"first_fit": FirstFit, "best_fit": BestFit}
_BINNING: Final = tuple(_FITTINGS)
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

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        cutting = self.algorithm in _CUTTING
        wrap = self.algorithm == "wrap"
        pooled = self.algorithm == "best_fit_wrap"
        problems = [
            (self.max_length <= 0, f"max_length must be at least 1, found {self.max_length}"),
            (
                self.algorithm not in _CUTTING + _BINNING,
                f"unknown algorithm {self.algorithm!r}; known: {', '.join(_CUTTING + _BINNING)}",
            ),
            (
                self.max_sequences_per_bin is not None and self.max_sequences_per_bin <= 0,
                f"max_sequences_per_bin must be at least 1, found {self.max_sequences_per_bin}",
            ),
            (
                self.min_sequence_length < 0,
                f"min_sequence_length must not be negative, found {self.min_sequence_length}",
            ),
            (cutting and self.num_bins is not None, f"num_bins has no meaning for {self.algorithm!r}; leave it out"),
            (not cutting and self.num_bins is None, f"{self.algorithm!r} needs num_bins, the rows kept open at a time"),
            (self.num_bins is not None and self.num_bins <= 0, f"num_bins must be at least 1, found {self.num_bins}"),
            (
                cutting and self.drop_oversized is True,
                f"{self.algorithm!r} cuts long documents, so drop_oversized=True has no meaning",
            ),
            (
                self.pad_token_id is None and not wrap,
                f"{self.algorithm!r} pads rows, so it needs pad_token_id",
            ),
            (
                self.pad_token_id is None and wrap and self.max_sequences_per_bin is not None,
                "max_sequences_per_bin closes rows early, so it needs pad_token_id",
            ),
            *(
                (
                    value is not None and (not pooled or value <= 0),
                    f"{name} must be at least 1, and is for 'best_fit_wrap' only; found {value} with {self.algorithm!r}",
                )
                for name, value in (
                    ("candidate_pool_size", self.candidate_pool_size),
                    ("max_candidate_age", self.max_candidate_age),
                )
            ),
            (
                self.shuffle_strategy not in (None, "random", "length"),
                f"unknown shuffle_strategy {self.shuffle_strategy!r}; known: 'random', 'length'",
            ),
            (
                self.flush_strategy not in ("fifo", "fullest"),
                f"unknown flush_strategy {self.flush_strategy!r}; known: 'fifo', 'fullest'",
            ),
        ]
        for wrong, message in problems:
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
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def needs(self, downstream: Fields) -> Fields:
        """The token field, and whatever else is wanted of its output."""
        if downstream is None:
            return None
        made = {POSITIONS, PADDING} if self.emit_positions else {PADDING}
        return (downstream - made) | (set(TOKEN_FIELDS) if self.tokens_field == "auto" else {self.tokens_field})

    def accumulator(self, lane: int) -> Accumulator:
        """The open rows of one lane."""
        packer: Accumulator
        if self.algorithm == "wrap":
            packer = WrapPacker(self._fields(), self._shape(), self.max_sequences_per_bin, lane)
        elif self.algorithm == "best_fit_wrap":
            packer = BestFitWrapPacker(self._pool_rules(), self._fields(), self._shape(), lane)
        else:
            packer = BinPacker(_FITTINGS[self.algorithm], self._rules(), self._fields(), self._shape(), lane)
        if self.shuffle_strategy is None:
            return packer
        return OrderedPacker(packer, self.shuffle_strategy, self.shuffle_seed or 0, self.tokens_field, lane)

    def assemble(self, records: Block, origin: Origin) -> Block:
        """Rebuild the packed rows named by `origin` from the documents they were made of."""
        return assemble_rows(records, origin, self._fields(), self._shape())

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

"""From a batch to what a training step takes: label shift, masks, document boundaries, tensors.

The order of the steps is part of the meaning:

 1. find the token field, stack it to `[B, S]`, shift for labels (the standard next-token shift, done here and only here)
 2. ignore the labels of padding, known from lengths
 3. ignore labels that the supervision mask (`loss_mask`) rules out
 4. ignore labels whose input is the end token (`eos_mask_loss`), or that would predict the first token of the next
    document (`mask_document_boundaries`, by position)
 5. masks and counts from the labels; cumulative lengths and document ids from the segments
 6. replace positions, flatten, rename, exclude

The common batch (int32 rows from the packer, int64 tensors out) costs one converting copy per key, about 10 microseconds
for 8 x 2048. torch is imported on the first call that gives tensors, never before.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headrace.core.block import MISSING, Block, Text
from headrace.core.exact import Exactly, exactly, first_changed, up_to
from headrace.core.stack import Stacked, is_there, padding_lengths, segment_starts, stack_rows
from headrace.core.tokens import HIDDEN, LOSS_MASK, POSITIONS, TOKEN_FIELDS
from headrace.errors import ConfigError, DataError, PayloadTypeError, UnknownOptionError

_LABELS: Final = "labels"
_INT32_MAX: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Every option of `to_training`, checked."""

    tokens_field: str = "auto"
    """Field with the token ids; "auto" takes the first of input_ids, tokens, token_ids, ids."""
    return_labels: bool = False
    """Add `labels`, the tokens one further on; `input_ids` then ends one earlier."""
    dtype: Any = "auto"
    """"auto": token ids and labels as int64, other fields as they are; torch tensors if torch is installed, else numpy
    arrays. None: Python lists. A torch or numpy dtype: every stacked field has this one."""
    extra_fields: Sequence[str] = ()
    """More fields with one number per token, sliced like the inputs."""
    ignore_index: int = -100
    rename_fields: Mapping[str, str] | None = None
    flatten: bool = False
    """All rows of the batch as one, `[B*S]`."""
    exclude_fields: Sequence[str] = ()
    return_num_valid_tokens: bool = False
    """Add `num_valid_tokens`, the number of labels that count."""
    return_loss_mask: bool = False
    """Add `loss_mask`, float32, 1 where the label counts."""
    return_cu_seqlens: bool = False
    """Add `cu_seqlens` int32 and `max_seqlen`, as variable-length attention kernels take them."""
    return_padding_mask: bool = False
    """Add `padding_mask`, True on padding."""
    eos_mask_loss: bool = False
    """Ignore labels whose input token is `eos_token_id`."""
    eos_token_id: int | None = None
    position_mode: str = "preserve"
    """"sequence": positions are 0..S-1 in every row."""
    mask_document_boundaries: bool = False
    """Ignore the label that would predict the first token of the next document."""
    return_document_ids: bool = False
    """Add `document_ids` int32: number of the document in its row (in the batch, when flattened); -1 on padding."""

    def __post_init__(self) -> None:
        """Refuse combinations that cannot be meant."""
        if isinstance(self.exclude_fields, str) or isinstance(self.extra_fields, str):
            raise TypeError("to_training: exclude_fields and extra_fields take a sequence of names, found one string")
        if self.position_mode not in ("preserve", "sequence"):
            raise ConfigError(
                f"to_training: unknown position_mode {self.position_mode!r}; known: 'preserve', 'sequence'"
            )
        for name in (
            "return_num_valid_tokens",
            "return_loss_mask",
            "eos_mask_loss",
            "mask_document_boundaries",
        ):
            if getattr(self, name) and not self.return_labels:
                raise ConfigError(f"to_training: {name}=True speaks of labels; pass return_labels=True as well")
        if self.eos_mask_loss and self.eos_token_id is None:
            raise ConfigError("to_training: eos_mask_loss=True needs eos_token_id")
        if self.return_labels and LOSS_MASK in self.extra_fields:
            raise ConfigError(
                "to_training: with return_labels=True the loss_mask field rules out labels; take it out of extra_fields "
                "(return_loss_mask=True returns the result)"
            )


_DEFAULTS: Final = TrainingOptions()
_PLAIN: Final = frozenset({TOKEN_FIELDS[0], *HIDDEN})
_KNOWN: Final = frozenset(option.name for option in fields(TrainingOptions))
_KEYS: Final = frozenset(
    (
        *("ids", "texts", "input_ids", _LABELS, POSITIONS, LOSS_MASK, "padding_mask", "document_ids"),
        *("num_valid_tokens", "cu_seqlens", "max_seqlen"),
    )
)
"""What a result may hold beside extra fields, whether these records and options give it or not."""


@functools.lru_cache(maxsize=64)
def _cached_options(items: frozenset[tuple[str, Any]]) -> TrainingOptions:
    options = TrainingOptions(**dict(items))
    return _DEFAULTS if options == _DEFAULTS else options


def parse_options(options: Mapping[str, Any]) -> TrainingOptions:
    """Options by name; an unknown name is an UnknownOptionError that says the nearest."""
    if not options:
        return _DEFAULTS
    for name in options:
        if name not in _KNOWN:
            raise UnknownOptionError("option of to_training", name, _KNOWN)
    if options.get("eos_token_id") is not None and not options.get("eos_mask_loss"):
        warnings.warn("to_training: eos_token_id has no effect without eos_mask_loss=True", UserWarning, stacklevel=4)
    try:
        return _cached_options(frozenset(options.items()))
    except TypeError:  # an option that cannot be hashed, such as a dict of names
        return TrainingOptions(**options)


def to_training(block: Block, **options: Any) -> dict[str, Any]:
    """What a training step takes, as a plain dict. `TrainingOptions` lists the options.

    Always `ids` (a list of sample id triples), `texts` and `input_ids`; `positions` and (without labels) `loss_mask`
    where the payload has them; the rest as asked for.

        batch.to_training(return_labels=True, mask_document_boundaries=True, return_cu_seqlens=True, flatten=True)
    """
    chosen = parse_options(options)
    if chosen is _DEFAULTS and (plain := _plain(block)) is not None:
        return plain
    out = _Assembly(block, chosen).build() if len(block) else _nothing(chosen)
    if chosen.rename_fields:
        out = _rename(out, chosen, empty=not len(block))
    return _exclude(out, chosen) if chosen.exclude_fields else out


def _plain(block: Block) -> dict[str, Any] | None:
    """The usual batch with no option set: rows of one width, and no other field that shows. None for any other batch."""
    columns = block.columns
    if columns is None or not columns.keys() <= _PLAIN:
        return None
    tokens = columns.get(TOKEN_FIELDS[0])
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 2 or not len(tokens):
        return None
    if tokens.dtype.kind != "i" and not np.can_cast(tokens.dtype, np.int64):  # floats and uint64 have to be looked at
        return None
    values = tokens.astype(np.int64)
    shown = _torch().from_numpy(values) if _torch_installed() else values
    return {"ids": _ids(block), "texts": [""] * len(tokens), TOKEN_FIELDS[0]: shown}


class _Assembly:
    """One call: the arrays of a batch on their way to tensors."""

    def __init__(self, block: Block, options: TrainingOptions) -> None:
        self.options = options
        self.block = _named_payload(block)
        self.names = _names(self.block)
        self.tokens_name = self._find_tokens()
        stacked = stack_rows(self.block, self.tokens_name, is_tokens=True)
        self.stacked: Stacked = stacked
        self.tokens = stacked.values
        if options.return_labels:
            self._refuse_changes(self.tokens_name, self.tokens, np.dtype(np.int64))
            if _LABELS in self.names:
                warnings.warn(
                    "to_training: the records' own 'labels' are not read; return_labels=True makes labels of the tokens. What must "
                    "not be learned, say with a loss_mask",
                    UserWarning,
                    stacklevel=4,
                )
        self.rows, self.full = self.tokens.shape
        self.width = self.full - 1 if options.return_labels else self.full
        self.labels: NDArray[np.int64] | None = None

    def build(self) -> dict[str, Any]:
        """Every key, in the order of the documentation."""
        options = self.options
        out: dict[str, Any] = {"ids": _ids(self.block), "texts": _texts(self.block)}
        out["input_ids"] = self._emit(self.tokens_name, self.tokens[:, : self.width], tokens=True)
        if options.return_labels:
            self.labels = self._masked_labels()
            out[_LABELS] = self._emit(_LABELS, self.labels, tokens=True, owned=True)
        self._add_positions(out)
        if not options.return_labels and LOSS_MASK in self.names:
            out[LOSS_MASK] = self._field(LOSS_MASK)
        self._add_masks(out)
        if options.return_cu_seqlens:
            out["cu_seqlens"], out["max_seqlen"] = self._cumulative_lengths()
        if options.return_document_ids:
            out["document_ids"] = self._finish(self._document_ids(), None)
        for name in options.extra_fields:
            if name == LOSS_MASK:
                continue
            if name in out:
                raise ConfigError(
                    f"to_training: extra field {name!r} would replace a key of that name; rename the field"
                )
            out[name] = self._field(name)
        return out

    @functools.cached_property
    def padding(self) -> NDArray[np.int64] | None:
        return padding_lengths(self.block, self.full, self.stacked)

    @functools.cached_property
    def starts(self) -> NDArray[np.bool_]:
        return segment_starts(self.block, self.full, self.padding)

    def _find_tokens(self) -> str:
        asked = self.options.tokens_field
        if asked == "auto":
            found = next((name for name in TOKEN_FIELDS if name in self.names), None)
        else:
            found = asked if is_there(self.block.column(asked)) else None
        if found is None:
            looked = ", ".join(TOKEN_FIELDS) if asked == "auto" else asked
            raise DataError(
                f"to_training: no token field (looked for {looked}); the records have "
                f"{', '.join(sorted(self.names)) or 'no fields'}; tokenize the text first, or name the field with tokens_field="
            )
        return found

    def _masked_labels(self) -> NDArray[np.int64]:
        options, tokens = self.options, self.tokens
        labels = tokens[:, 1:].astype(np.int64)
        ignore = options.ignore_index
        if self.padding is not None:
            labels[np.arange(self.width) >= (self.width - self.padding)[:, None]] = ignore
        if LOSS_MASK in self.names:
            labels[self._per_token(LOSS_MASK)[:, 1:] == 0] = ignore
        if options.eos_mask_loss:
            labels[tokens[:, :-1] == options.eos_token_id] = ignore
        if options.mask_document_boundaries:
            labels[self.starts[:, 1:]] = ignore
        return labels

    def _add_positions(self, out: dict[str, Any]) -> None:
        if self.options.position_mode == "sequence":
            positions = np.broadcast_to(np.arange(self.width, dtype=np.int32), (self.rows, self.width))
            out[POSITIONS] = self._emit(POSITIONS, positions)
        elif POSITIONS in self.names:
            out[POSITIONS] = self._field(POSITIONS)

    def _add_masks(self, out: dict[str, Any]) -> None:
        options = self.options
        if self.labels is not None and (options.return_loss_mask or options.return_num_valid_tokens):
            valid = self.labels != options.ignore_index
            if options.return_loss_mask:
                out[LOSS_MASK] = self._finish(valid.astype(np.float32), None)
            if options.return_num_valid_tokens:
                out["num_valid_tokens"] = int(np.count_nonzero(valid))
        if options.return_padding_mask:
            out["padding_mask"] = self._finish(self._padding_mask(), None)

    def _padding_mask(self) -> NDArray[np.bool_]:
        if self.padding is None:
            return np.zeros((self.rows, self.width), np.bool_)
        return np.arange(self.width) >= (self.full - self.padding)[:, None]

    def _cumulative_lengths(self) -> tuple[Any, Any]:
        """`cu_seqlens` and `max_seqlen`: of the flat batch, or a row each, filled up with the row length."""
        starts, rows, width = self.starts[:, : self.width], self.rows, self.width
        if rows * width > _INT32_MAX:
            raise DataError(f"to_training: {rows} x {width} tokens exceed the int32 of cu_seqlens; use smaller batches")
        if self.options.flatten:
            ends = np.append(np.flatnonzero(starts.reshape(-1)), rows * width).astype(np.int32)
            return self._finish(ends, None, shaped=True), int(np.diff(ends).max(initial=0))
        counts = starts.sum(axis=1)
        out = np.full((rows, int(counts.max(initial=0)) + 1), width, np.int32)
        row, column = np.nonzero(starts)
        out[row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]] = column
        longest = np.diff(out, axis=1).max(axis=1, initial=0).astype(np.int32)
        return self._finish(out, None, shaped=True), self._finish(longest, None, shaped=True)

    def _document_ids(self) -> NDArray[np.int32]:
        starts = self.starts[:, : self.width]
        padding = self._padding_mask()
        begins = starts & ~padding
        if self.options.flatten:
            ids = np.cumsum(begins.reshape(-1), dtype=np.int32).reshape(starts.shape) - np.int32(1)
        else:
            ids = np.cumsum(begins, axis=1, dtype=np.int32) - np.int32(1)
        ids[padding] = -1
        return ids

    def _per_token(self, name: str) -> NDArray[Any]:
        values = stack_rows(self.block, name).values
        if values.shape != self.tokens.shape:
            raise DataError(
                f"to_training: field {name!r} has {values.shape[1]} values a row for {self.full} tokens; it needs one per token"
            )
        return values

    def _field(self, name: str) -> Any:
        return self._emit(name, self._per_token(name)[:, : self.width])

    def _emit(self, name: str, values: NDArray[Any], tokens: bool = False, owned: bool = False) -> Any:
        """A stacked field in the type asked for, as memory of its own."""
        dtype = self.options.dtype
        if isinstance(dtype, str) and dtype == "auto":
            dtype = np.dtype(np.int64) if tokens else values.dtype
            self._refuse_changes(name, values, dtype)
            values = values if owned and values.dtype == dtype else values.astype(dtype)
            return self._finish(values, None)
        if dtype is None:
            return self._finish(values if owned else values.copy(), None)
        if _is_torch(dtype):
            self._refuse_changes(name, values, dtype)
            return self._finish(values if owned else values.copy(), dtype)
        self._refuse_changes(name, values, _numpy_dtype(dtype))
        return self._finish(values.astype(_numpy_dtype(dtype)), dtype)

    def _refuse_changes(self, name: str, values: NDArray[Any], dtype: Any) -> None:
        """DataError for numbers that a cast to `dtype` would make others of."""
        if isinstance(dtype, np.dtype):
            if values.dtype == dtype or (
                np.can_cast(values.dtype, dtype) and dtype.kind != "f"
            ):  # int64 "fits" float64
                return
            changed = first_changed(values, exactly(dtype))
        else:
            changed = first_changed(values, _held_by_torch(dtype))
        if changed is None:
            return
        row, place = divmod(changed, values.shape[1])
        remedy = (
            "name another type with dtype=" if values.dtype.kind in "iu" else "name a floating-point type with dtype="
        )
        if name == self.tokens_name and values.dtype.kind == "f":
            remedy = "token ids are whole numbers; name another field with tokens_field="
        raise DataError(
            f"to_training: {name!r} of row {row} of the batch (sample {_ids(self.block)[row]}) holds {values[row, place]}, which "
            f"does not fit {dtype}; {remedy}"
        )

    def _finish(self, values: NDArray[Any], dtype: Any, shaped: bool = False) -> Any:
        """Flat if asked for, and a tensor, an array or a list. `dtype` casts a tensor; None keeps the type."""
        options = self.options
        if options.flatten and not shaped:
            values = values.reshape(-1)
        if options.dtype is None:
            return values.tolist()
        if not _wants_torch(options.dtype):
            return values
        tensor = _torch().from_numpy(values)
        return tensor if dtype is None else tensor.to(dtype)


def _named_payload(block: Block) -> Block:
    """The batch with named fields: payloads that are arrays are rows of tokens."""
    if block.rows is None:
        return block
    if all(isinstance(payload, Mapping) for payload in block.rows):
        return block
    for number, payload in enumerate(block.rows):
        if isinstance(payload, Mapping) or not hasattr(payload, "shape"):
            raise PayloadTypeError(
                f"to_training: row {number} of the batch is a {type(payload).__name__}; a payload must be a mapping with token "
                "ids (in every row), or an array of them (in every row)"
            )
    return block.with_columns({TOKEN_FIELDS[0]: block.rows})


def _names(block: Block) -> frozenset[str]:
    """Fields that any record has: one that only some have is an error where it is needed, never left out."""
    if block.rows is not None:
        return frozenset[str]().union(*block.rows)
    return frozenset(name for name, column in (block.columns or {}).items() if is_there(column))


def _ids(block: Block) -> list[tuple[int, int, int]]:
    return list(map(tuple, block.origin.firsts()[:, :3].tolist()))  # type: ignore[arg-type]  three columns


def _texts(block: Block) -> list[str]:
    if block.columns is not None and "text" not in block.columns:
        return [""] * len(block)
    column = block.column("text")
    if isinstance(column, Text):
        return column.to_str()
    return ["" if value is MISSING else str(value) for value in column]


def _nothing(options: TrainingOptions) -> dict[str, Any]:
    """The keys of an empty batch."""
    out: dict[str, Any] = {"ids": [], "texts": [], "input_ids": []}
    wanted = {
        "labels": options.return_labels,
        LOSS_MASK: options.return_loss_mask,
        "padding_mask": options.return_padding_mask,
        "document_ids": options.return_document_ids,
    }
    out |= {name: [] for name, asked in wanted.items() if asked}
    if options.return_num_valid_tokens:
        out["num_valid_tokens"] = 0
    if options.return_cu_seqlens:
        out["cu_seqlens"], out["max_seqlen"] = ([0], 0) if options.flatten else ([], [])
    return out | {name: [] for name in options.extra_fields}


def _rename(out: dict[str, Any], options: TrainingOptions, empty: bool) -> dict[str, Any]:
    names = options.rename_fields or {}
    missing = [name for name in names if name not in out]
    if missing and not empty:
        raise ConfigError(f"to_training: rename_fields names {missing[0]!r}; the keys are {', '.join(out)}")
    targets = [names.get(name, name) for name in out]
    for target in targets:
        if targets.count(target) > 1:
            raise ConfigError(f"to_training: after rename_fields two keys would be called {target!r}")
    return dict(zip(targets, out.values(), strict=True))


def _exclude(out: dict[str, Any], options: TrainingOptions) -> dict[str, Any]:
    for name in options.exclude_fields:
        if name not in out and name not in _KEYS and name not in options.extra_fields:
            raise ConfigError(f"to_training: exclude_fields names {name!r}; the keys are {', '.join(out)}")
    return {name: value for name, value in out.items() if name not in options.exclude_fields}


# ---------------------------------------------------------------------------------------------------
# torch, only if needed
# ---------------------------------------------------------------------------------------------------


def _is_torch(dtype: Any) -> bool:
    return type(dtype).__module__ == "torch"


def _wants_torch(dtype: Any) -> bool:
    return (isinstance(dtype, str) and dtype == "auto" and _torch_installed()) or _is_torch(dtype)


@functools.cache
def _torch_installed() -> bool:
    return "torch" in sys.modules or importlib.util.find_spec("torch") is not None


def _torch() -> Any:
    import torch

    return torch


def _held_by_torch(dtype: Any) -> Exactly:
    """What a torch type holds as it is."""
    torch = _torch()
    if dtype is torch.bool:
        return Exactly(0, 1, False)
    if dtype.is_floating_point or dtype.is_complex:
        return up_to(int(2 / torch.finfo(dtype).eps))
    limits = torch.iinfo(dtype)
    return Exactly(int(limits.min), int(limits.max), False)


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise ConfigError(
            f"to_training: dtype {dtype!r} is neither 'auto', None, a numpy dtype nor a torch dtype"
        ) from None

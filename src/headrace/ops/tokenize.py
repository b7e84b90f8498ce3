"""The `tokenize` operator: a text field in, token ids out, one encoder call per block.

Ids leave as one int32 array with offsets (`Ragged`), or as an `[n, max_length]` array under `padding="max_length"`. Special ids
are put in by this operator, not by the tokenizer, so that truncation leaves room for them and splitting puts the begin id on
the first piece and the end id on the last. Truncation and padding work on the right.

`padding="longest"` (or True) leaves rows ragged here: how long the longest is is known only when a batch is made, so
`to_training` pads it there and the result does not depend on how the stream was cut into blocks.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

import numpy as np

from headrace.core.block import MISSING, Block, Column, Drop, Ints, Origin, Ragged, field_roots, to_list
from headrace.core.op import BadRows, Fields, Worker
from headrace.core.tokens import ATTENTION_MASK, PAD_TOKEN_ID, PADDING, PIECE_BITS
from headrace.errors import ConfigError, InternalError, UnknownOptionError
from headrace.ops.tokenizer.gate import EncoderChoice, Notebook, choose_encoder
from headrace.ops.tokenizer.json_tokenizer import JsonTokenizer
from headrace.ops.tokenizer.load import load_tokenizer
from headrace.ops.tokenizer.rows import cut, pad, split, wrap
from headrace.ops.tokenizer.seam import Encoder, SpecialIds, Tokenizer, default_affixes
from headrace.ops.tokenizer.texts import read_texts

MODES = ("bos_eos", "bos", "eos", "none", "tokenizer_default")
PADDINGS = (False, True, "longest", "max_length", "do_not_pad")
TRUNCATIONS = (False, True, "longest_first", "only_first", "do_not_truncate")
TENSORS = (None, "np", "pt")

_LOOKED_AT = 16
"""Texts of the sample that are looked at for a begin token of their own."""
SPOT_BITS = 13
"""One document in 8192 is encoded by the reference as well, while the run goes on: 1 % of the time that encoding takes."""
SPOT_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)
SPOT_BYTES = 1 << 18
"""Longer documents are not spot-checked: the reference would hold the stream up for seconds."""


@dataclass(frozen=True)
class Tokenize:
    """Encode text field `field` of each record; every parameter means what its name means in `transformers`.

    `prepare()` loads the tokenizer and settles the encoder; its result goes to the workers.
    """

    tokenizer: Any = None
    tokenizer_id: Any = None
    _: KW_ONLY
    field: str
    missing_field: Literal["error", "empty"] = "error"
    add_attention_mask: bool = True
    max_length: int | None = None
    padding: bool | str = False
    truncation: bool | str = False
    return_tensors: str | None = None
    split_long_samples: bool = False
    use_fast: bool = True
    preserve_upstream_payload: bool = False
    special_tokens: str = "bos_eos"
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    allow_special: bool = False
    encoder: Literal["auto", "reference", "fast"] = "auto"
    choice: EncoderChoice | None = None

    def __post_init__(self) -> None:
        """Check everything that can be checked without loading the tokenizer."""
        _check_choices(self)
        _check_lengths(self)
        _check_overrides(self)

    @property
    def name(self) -> str:
        """Shown by explain() and in errors."""
        return "tokenize"

    @functools.cached_property
    def loaded(self) -> Tokenizer:
        """The tokenizer, loaded when first asked for. ConfigError if there is none to load."""
        if self.choice is not None:
            return self.choice.tokenizer
        return load_tokenizer(self.tokenizer, self.tokenizer_id, allow_special=self.allow_special)

    @functools.cached_property
    def affixes(self) -> tuple[list[int], list[int]]:
        """Ids put before and after every text. ConfigError if the tokenizer lacks one."""
        if self.special_tokens == "tokenizer_default":
            affixes = default_affixes(self.loaded)
            if self.max_length is not None and (self.truncation or self.split_long_samples):
                _check_room(self.max_length, len(affixes[0]) + len(affixes[1]))
            return affixes
        before = [self._special_id("bos")] if self.special_tokens in ("bos_eos", "bos") else []
        after = [self._special_id("eos")] if self.special_tokens in ("bos_eos", "eos") else []
        return before, after

    @property
    def padding_kind(self) -> Literal["", "longest", "max_length"]:
        """To what rows are padded, however that was spelled."""
        if self.padding == "max_length":
            return "max_length"
        return "longest" if self.padding in (True, "longest") else ""

    @functools.cached_property
    def pad_id(self) -> int:
        """The padding id: the tokenizer's, else its end id. ConfigError if it has neither."""
        ids = self.loaded.special_ids
        for value in (ids.pad, self.eos_token_id, ids.eos):
            if value is not None:
                return value
        raise ConfigError(
            f"padding={self.padding!r}: tokenizer {self.loaded.name} names neither a padding nor an end token; "
            "pass eos_token_id=..."
        )

    def prepare(self, sample: Block | Sequence[str] | None = None, notes: Notebook | None = None) -> Tokenize:
        """Load the tokenizer, check its special ids and settle the encoder on a sample of the corpus.

        `sample`: rows of the corpus (about 256), as they reach this operator, or their texts. `notes`: where the outcome may
        be known from an earlier start.
        """
        _ = self.affixes
        if self.padding_kind:
            _ = self.pad_id
        texts = self._sample_texts(sample) if isinstance(sample, Block) else sample or ()
        self._warn_of_two_begins(texts[:_LOOKED_AT])
        return replace(self, choice=choose_encoder(self.loaded, texts, self.encoder, notes=notes))

    def _warn_of_two_begins(self, texts: Sequence[str]) -> None:
        """A template has written the begin token already, and this operator would put another in front."""
        before, _ = self.affixes
        if not self.allow_special or not before:
            return
        for ids in self.loaded.encode(texts):
            if len(ids) and ids[0] == before[-1]:
                warnings.warn(
                    f"tokenize: texts begin with the begin token already and special_tokens={self.special_tokens!r} puts another "
                    f"in front (first ids: {[*before, *ids[:3].tolist()]}); pass special_tokens='eos' or 'none'",
                    stacklevel=2,
                )
                return

    def _sample_texts(self, sample: Block) -> list[str]:
        """Texts of the sample. ConfigError if no row of it has the field: a wrong name should fail before the run."""
        bad = BadRows()
        texts = read_texts(sample, self.field, False, bad)[0]
        if (
            self.missing_field == "error"
            and len(sample)
            and all(v is MISSING for v in to_list(sample.column(self.field)))
        ):
            raise ConfigError(
                f"tokenize(field={self.field!r}): none of {len(sample)} sampled records has it; {bad.errors[0]}"
            )
        return texts

    def describe(self) -> dict[str, Any]:
        """Every parameter that decides data, and the tokenizer's identity by content."""
        before, after = self.affixes
        return {
            "tokenizer": self.loaded.fingerprint,
            "field": self.field,
            "missing_field": self.missing_field,
            "add_attention_mask": self.add_attention_mask,
            "max_length": self.max_length,
            "padding": [self.padding_kind, self.pad_id] if self.padding_kind else [],
            "truncation": bool(self.truncation) and self.truncation != "do_not_truncate",
            "split_long_samples": self.split_long_samples,
            "preserve_upstream_payload": self.preserve_upstream_payload,
            "before": before,
            "after": after,
        }

    def needs(self, downstream: Fields) -> Fields:
        """The text field, and what is wanted further down if the upstream payload is kept."""
        own = field_roots([self.field])
        if not self.preserve_upstream_payload:
            return own
        return None if downstream is None else downstream - {"input_ids", ATTENTION_MASK} | own

    def summary(self) -> str:
        """One line for explain(): which encoder runs and why."""
        return (
            f"encoder: {self.choice.name} ({self.choice.reason})"
            if self.choice
            else f"encoder: {self.encoder}, not settled yet"
        )

    def worker(self) -> Worker:
        """A function from text block to token block, with an encoder of its own."""
        ready = self if self.choice is not None else self.prepare()
        assert ready.choice is not None
        return _TokenizeWorker(ready, ready.choice.build()).run

    def _special_id(self, role: Literal["bos", "eos"]) -> int:
        own: int | None = getattr(self, f"{role}_token_id")
        ids: SpecialIds = self.loaded.special_ids
        value: int | None = getattr(ids, role) if own is None else own
        if value is None:
            other = {"bos": "eos", "eos": "bos"}[role]
            raise ConfigError(
                f"special_tokens={self.special_tokens!r} needs a {role} id, and tokenizer {self.loaded.name} names no {role} token "
                f"(found: {ids}); pass {role}_token_id=..., or special_tokens={other!r} or 'none'"
            )
        return value


class _TokenizeWorker:
    """What runs: one encoder, one description."""

    def __init__(self, op: Tokenize, encoder: Encoder) -> None:
        self._op, self._encoder = op, encoder
        self._before, self._after = op.affixes
        self._truncates = bool(op.truncation) and op.truncation != "do_not_truncate"

    def run(self, block: Block, bad: BadRows) -> Block:
        """Token ids of the rows that have text."""
        op = self._op
        texts, kept = read_texts(block, op.field, op.missing_field == "empty", bad)
        origin = block.origin if kept is None else block.origin.take(kept)
        ids = self._encoder.encode(texts)
        self._spot_check(texts, ids, origin)
        ids, lost = self._truncate(ids, origin)
        ids = wrap(ids, self._before, self._after)
        rows = np.arange(len(block)) if kept is None else kept
        if op.split_long_samples:
            ids, origin, rows = self._split(ids, origin, rows)
        if op.padding_kind == "max_length":
            ids, origin, rows = self._reject_long(ids, origin, rows, bad)
        columns = self._columns(ids)
        if op.preserve_upstream_payload:
            same = len(rows) == len(block) and not op.split_long_samples
            upstream = block if same else block.take(rows)
            columns = {**upstream.as_columns(), **columns}
        out = block.with_columns(columns, origin)
        return out if lost is None else out.dropping(lost)

    def _truncate(self, ids: Ragged, origin: Origin) -> tuple[Ragged, Drop | None]:
        """Rows with room for the special ids, and what that cost."""
        if not self._truncates or self._op.max_length is None:
            return ids, None
        shorter = cut(ids, self._op.max_length - len(self._before) - len(self._after))
        if shorter is ids:
            return ids, None
        lost = ids.lengths - shorter.lengths
        return shorter, Drop.of_tokens(self._op.name, "truncated", origin, lost)

    def _split(self, ids: Ragged, origin: Origin, rows: Ints) -> tuple[Ragged, Origin, Ints]:
        if origin.rows is not None:
            raise ConfigError("tokenize(split_long_samples=True) cannot cut packed rows; tokenize before packing")
        assert self._op.max_length is not None
        pieces, row, ordinal = split(ids, self._op.max_length)
        parents = origin if len(row) == len(rows) else origin.take(row)
        piece = (parents.ids[:, -1] << PIECE_BITS) | ordinal
        return pieces, parents.with_piece(piece), rows[row]

    def _reject_long(self, ids: Ragged, origin: Origin, rows: Ints, bad: BadRows) -> tuple[Ragged, Origin, Ints]:
        """Rows that do not fit a fixed width go to `bad`: nothing said that they may be cut."""
        limit = self._op.max_length
        assert limit is not None
        lengths = ids.lengths
        if not len(lengths) or int(lengths.max()) <= limit:
            return ids, origin, rows
        for row, length in zip(rows[lengths > limit].tolist(), lengths[lengths > limit].tolist(), strict=True):
            bad.add(row, _too_long(self._op, length))
        fits = np.flatnonzero(lengths <= limit)
        parts = [ids[i] for i in fits.tolist()]
        return Ragged.from_rows(parts), origin.take(fits), rows[fits]

    def _columns(self, ids: Ragged) -> dict[str, Column]:
        op = self._op
        if op.padding_kind == "max_length":
            assert op.max_length is not None
            values, mask = pad(ids, op.max_length, op.pad_id)
            padding = (op.max_length - ids.lengths).astype(np.int32)
            columns: dict[str, Column] = {"input_ids": values, PADDING: padding}
            return {**columns, ATTENTION_MASK: mask} if op.add_attention_mask else columns
        columns = {"input_ids": ids}
        if op.padding_kind == "longest":
            columns[PAD_TOKEN_ID] = np.full(len(ids), op.pad_id, np.int64)
        if op.add_attention_mask:
            ids = ids if not ids.offsets[0] else Ragged(ids.flat, ids.offsets - ids.offsets[0])
            columns |= {
                "input_ids": ids,
                ATTENTION_MASK: Ragged(np.ones(int(ids.offsets[-1]), np.uint8), ids.offsets),
            }
        return columns

    def _spot_check(self, texts: list[str], ids: Ragged, origin: Origin) -> None:
        """Compare a few documents, chosen by their identity, with the reference: a difference stops the run."""
        choice, tokenizer = self._op.choice, self._op.loaded
        if choice is None or not choice.fast or origin.rows is not None or not isinstance(tokenizer, JsonTokenizer):
            return
        for row in np.flatnonzero(_is_spot(origin.ids)).tolist():
            if len(texts[row]) > SPOT_BYTES:
                continue
            if tokenizer.reference.encode_one(texts[row]) != ids[row].tolist():
                raise InternalError(
                    f"tokenize: {choice.name} and the reference give unequal ids for dataset {origin.ids[row, 0]}, shard "
                    f"{origin.ids[row, 1]}, row {origin.ids[row, 2]} ({texts[row][:60]!r}); pass encoder='reference' and start anew"
                )


def _is_spot(ids: Ints) -> np.ndarray:
    """True for one sample in 2^SPOT_BITS, by a hash of (dataset, shard, row): the same ones however the stream is cut."""
    key = ids[:, :3].astype(np.uint64) @ SPOT_MIX
    return (key ^ (key >> np.uint64(29))) * SPOT_MIX[0] >> np.uint64(64 - SPOT_BITS) == 0


def _too_long(op: Tokenize, length: int) -> Exception:
    from headrace.errors import RecordError

    return RecordError(
        f"a text of {length} tokens does not fit padding='max_length' with max_length={op.max_length}; "
        "pass truncation=True to cut it, or split_long_samples=True to keep all of it"
    )


def _check_choices(op: Tokenize) -> None:
    if (op.tokenizer is None) == (op.tokenizer_id is None):
        raise ConfigError(
            "tokenize needs exactly one of tokenizer= (an object) and tokenizer_id= (a folder, file or hub id); "
            f"got tokenizer={op.tokenizer!r:.60}, tokenizer_id={op.tokenizer_id!r}"
        )
    if not op.field:
        raise ConfigError("tokenize needs field=..., the name or dot path of the text field, for example field='text'")
    for what, value, known in (
        ("special_tokens", op.special_tokens, MODES),
        ("missing_field", op.missing_field, ("error", "empty")),
        ("padding", op.padding, PADDINGS),
        ("truncation", op.truncation, TRUNCATIONS),
        ("return_tensors", op.return_tensors, TENSORS),
        ("encoder", op.encoder, ("auto", "reference", "fast")),
    ):
        if value not in known:
            raise UnknownOptionError(what, str(value), map(str, known))
    if not op.use_fast:
        raise ConfigError(
            "use_fast=False asks for a Python tokenizer of transformers, which headrace does not load; "
            "load it yourself and pass the object as tokenizer=..."
        )


def _check_lengths(op: Tokenize) -> None:
    truncates = bool(op.truncation) and op.truncation != "do_not_truncate"
    if op.split_long_samples and truncates:
        raise ConfigError("split_long_samples=True keeps every token and truncation drops some; pass one of them")
    for wish, asked in (
        ("split_long_samples=True", op.split_long_samples),
        ("truncation", truncates),
        ("padding='max_length'", op.padding == "max_length"),
    ):
        if asked and op.max_length is None:
            raise ConfigError(f"{wish} needs max_length=..., a number of tokens")
    if op.max_length is None:
        return
    if isinstance(op.max_length, bool) or not isinstance(op.max_length, int) or op.max_length < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"max_length={op.max_length!r} is not a positive number of tokens")
    if truncates or op.split_long_samples or op.padding == "max_length":
        _check_room(op.max_length, {"bos_eos": 2, "bos": 1, "eos": 1}.get(op.special_tokens, 0))
    else:
        warnings.warn(
            f"tokenize(max_length={op.max_length}) does nothing without truncation=True, split_long_samples=True or "
            "padding='max_length'",
            stacklevel=4,
        )


def _check_room(max_length: int, specials: int) -> None:
    if specials and max_length <= specials:
        raise ConfigError(f"max_length={max_length} leaves no room for text beside {specials} special tokens")


def _check_overrides(op: Tokenize) -> None:
    for role in ("bos", "eos"):
        value = getattr(op, f"{role}_token_id")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise ConfigError(f"{role}_token_id={value!r} is not a token id: a number from 0 to {(1 << 31) - 1}")
        if op.special_tokens in ("none", "tokenizer_default"):
            raise ConfigError(
                f"{role}_token_id={value} has no effect with special_tokens={op.special_tokens!r}; drop one of them"
            )

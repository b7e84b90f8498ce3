"""A user's own tokenizer object or function as a Tokenizer.

Its content cannot be seen, so its fingerprint is its qualified name (and its `fingerprint` attribute, where it has one):
two versions of the same function look the same to a checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.core.block import Ragged
from headrace.core.exact import exactly, first_changed
from headrace.errors import ConfigError
from headrace.ops.tokenizer.seam import SpecialIds


@dataclass(frozen=True)
class ForeignTokenizer:
    """Ids by a Python call per text; `call` takes a str and returns ids without special tokens."""

    name: str
    fingerprint: str
    special_ids: SpecialIds
    call: Callable[[str], Any] = field(repr=False)
    decoder: Callable[[list[int]], str] | None = field(default=None, repr=False)

    def encode(self, texts: Sequence[str]) -> Ragged:
        """Ids of each text, int32. ConfigError if the call returns anything but ids."""
        return Ragged.from_rows([self._ids(text) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, if the object can do that."""
        if self.decoder is None:
            raise ConfigError(f"tokenizer {self.name} has no decode method")
        return self.decoder([int(i) for i in ids])

    def _ids(self, text: str) -> Any:
        ids = self.call(text)
        ids = getattr(ids, "ids", ids)  # an Encoding
        if hasattr(ids, "keys"):  # what a transformers tokenizer returns when called
            ids = ids["input_ids"]
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ConfigError(
                f"tokenizer {self.name} returned {type(ids).__name__} of shape {array.shape} and dtype {array.dtype} for a "
                "text; it must return one flat sequence of integer ids"
            )
        if (at := first_changed(array, exactly(np.dtype(np.int32)))) is not None:
            raise ConfigError(f"tokenizer {self.name} returned the id {array[at]} for a text; ids are int32")
        return array.astype(np.int32)


def from_object(tokenizer: Any) -> ForeignTokenizer:
    """Wrap an object with `encode` (tiktoken, a Python tokenizer of transformers) or a callable from str to ids."""
    call = _call_of(tokenizer)
    kind: Any = tokenizer if hasattr(tokenizer, "__qualname__") else type(tokenizer)
    name = str(getattr(tokenizer, "name_or_path", "") or getattr(tokenizer, "name", "") or kind.__qualname__)
    identity = f"object:{kind.__module__}.{kind.__qualname__}:{name}:{getattr(tokenizer, 'fingerprint', '')}"
    return ForeignTokenizer(name, identity, special_ids_of(tokenizer), call, getattr(tokenizer, "decode", None))


def special_ids_of(tokenizer: Any) -> SpecialIds:
    """Ids from the attributes that tokenizer objects of the field carry."""

    def read(role: str) -> int | None:
        value = getattr(tokenizer, f"{role}_token_id", None)
        return int(value) if isinstance(value, int) else None

    eos = read("eos")
    return SpecialIds(
        read("bos"), getattr(tokenizer, "eot_token", None) if eos is None else eos, read("pad"), read("unk")
    )


def _call_of(tokenizer: Any) -> Callable[[str], Any]:
    if hasattr(tokenizer, "encode_ordinary"):  # tiktoken: never reads special tokens in text
        return tokenizer.encode_ordinary
    if hasattr(tokenizer, "convert_tokens_to_ids"):  # a Python tokenizer of transformers
        return functools.partial(tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
    if hasattr(tokenizer, "encode"):
        return tokenizer.encode
    if callable(tokenizer):
        return tokenizer
    raise ConfigError(
        f"tokenizer={tokenizer!r} is a {type(tokenizer).__name__}; pass a path or hub id, a tokenizers.Tokenizer, a transformers "
        "tokenizer, or a function from str to a list of ids"
    )

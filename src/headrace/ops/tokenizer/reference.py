"""Encoding with the `tokenizers` library: the definition of what is right. Nothing else in headrace imports it.

Threads: the library encodes a batch on its own pool, sized to the machine. In a worker process that would be one pool per
worker on the same cores, so there it is switched off unless the user has set TOKENIZERS_PARALLELISM. In the user's own process
that variable is left alone. Affixes and checks use `encode`, which never starts the pool, so that a later fork of the
user's process (a DataLoader with workers) is not warned about.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence

import numpy as np
import tokenizers

from headrace.core.block import Ragged
from headrace.errors import ConfigError

PROBES = ("a", "hello world", "0 1 2", "x\ny", "")


class ReferenceEncoder:
    """Ids by `tokenizers`; may be shared between threads."""

    def __init__(self, json: bytes, allow_special: bool = False) -> None:
        """Parse tokenizer.json (0.1 s for 50 k tokens); ConfigError if the library refuses it."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(json)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"the tokenizers library ({tokenizers.__version__}) refuses tokenizer.json: {error}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = not allow_special
        if multiprocessing.parent_process() is not None:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    @property
    def name(self) -> str:
        """Library and version."""
        return f"tokenizers {tokenizers.__version__}"

    def encode(self, texts: Sequence[str]) -> Ragged:
        """Ids of each text, int32."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return Ragged.from_rows([np.array(e.ids, np.int32) for e in encodings])

    def encode_one(self, text: str) -> list[int]:
        """Ids of one text, on the calling thread."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of one text, and the characters that each stands for, on the calling thread."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def affixes(self) -> tuple[list[int], list[int]]:
        """Ids that the post-processor puts before and after a text; ConfigError if that is not all it does."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            before, after = full[:start], full[start + len(bare) :]
            if all(self._wraps(text, before, after) for text in PROBES):
                return before, after
        raise ConfigError(
            "special_tokens='tokenizer_default': the post-processor of this tokenizer.json does more than put fixed ids "
            f"before and after the text ({bare} became {full}); use 'bos_eos', 'bos', 'eos' or 'none'"
        )

    def _wraps(self, text: str, before: list[int], after: list[int]) -> bool:
        full = self._tokenizer.encode(text, add_special_tokens=True).ids
        return full == [*before, *self._tokenizer.encode(text, add_special_tokens=False).ids, *after]

"""Whatever the user passed becomes a Tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.ops.tokenizer.files import read_files
from headrace.ops.tokenizer.foreign import from_object, special_ids_of
from headrace.ops.tokenizer.json_tokenizer import JsonTokenizer, find_special_ids, from_files
from headrace.ops.tokenizer.seam import SpecialIds, Tokenizer


def load_tokenizer(tokenizer: Any = None, tokenizer_id: Any = None, *, allow_special: bool = False) -> Tokenizer:
    """A Tokenizer from an object (`tokenizer`) or from a folder, file or hub id (either argument).

    Objects of `tokenizers` and fast tokenizers of `transformers` are taken apart to their JSON, so that they travel to
    workers and have an identity by content like any file. ConfigError says what was passed and what would do.
    """
    if (tokenizer is None) == (tokenizer_id is None):
        raise ConfigError(
            f"tokenize needs one of tokenizer= (an object) and tokenizer_id= (a folder, file or hub id); "
            f"got tokenizer={tokenizer!r} and tokenizer_id={tokenizer_id!r}"
        )
    given = tokenizer_id if tokenizer is None else tokenizer
    if isinstance(given, (str, os.PathLike)):
        return from_files(_short_name(os.fspath(given)), read_files(given), allow_special)
    if isinstance(given, Tokenizer):
        return given
    backend = getattr(given, "backend_tokenizer", given)  # transformers keeps the tokenizers object there
    if hasattr(backend, "to_str") and hasattr(backend, "encode_batch"):
        return _from_tokenizers(given, backend, allow_special)
    if allow_special:
        raise ConfigError(f"allow_special=True has no meaning for {type(given).__name__}: it decides that by itself")
    return from_object(given)


def _from_tokenizers(given: Any, backend: Any, allow_special: bool) -> JsonTokenizer:
    json = backend.to_str().encode()
    own, found = special_ids_of(given), find_special_ids(json, {})
    ids = own if given is not backend else found  # a transformers tokenizer says it itself
    name = str(getattr(given, "name_or_path", "") or type(given).__name__)
    return JsonTokenizer(name, json, SpecialIds(ids.bos, ids.eos, ids.pad, ids.unk), allow_special)


def _short_name(text: str) -> str:
    """A folder's or hub id's own name; a tokenizer.json is named by its folder."""
    path = Path(text)
    return (
        path.parent.name or path.name if path.name == "tokenizer.json" else text if text.count("/") == 1 else path.name
    )

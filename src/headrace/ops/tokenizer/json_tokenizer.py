"""A tokenizer.json as a Tokenizer: one immutable value that pickles, with an identity by content.

Truncation and padding stored in the file are ignored (some published files cut every text at 128 tokens), and take no
part in the fingerprint. Text that spells a special token is plain text, unless `allow_special` is set: web pages do
contain `<|endoftext|>`, and a false document end in the middle of a document trains a wrong thing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from headrace.core.block import Ragged
from headrace.errors import ConfigError
from headrace.ops.tokenizer.seam import SpecialIds

ROLES = ("bos", "eos", "pad", "unk")
KNOWN_NAMES = {  # used only where no file beside tokenizer.json names the token, and only if exactly one of them exists
    "bos": (
        "<s>",
        "<bos>",
        "[BOS]",
        "<|begin_of_text|>",
        "<|startoftext|>",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    ),
    "eos": ("</s>", "<eos>", "[EOS]", "<|end_of_text|>", "<|endoftext|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<\uff5c\u2581pad\u2581\uff5c>"),
    "unk": ("<unk>", "[UNK]"),
}


class _Outline(msgspec.Struct):
    """What is wanted of tokenizer.json beside the model; the vocabulary is passed over, which takes a tenth of the time."""

    added_tokens: list[dict[str, Any]] | None = None
    normalizer: Any = None


@dataclass(frozen=True)
class JsonTokenizer:
    """`json` is the content of tokenizer.json; `special_ids` as the files beside it say."""

    name: str
    json: bytes = field(repr=False)
    special_ids: SpecialIds
    allow_special: bool = False

    @property
    def fingerprint(self) -> str:
        """xxh3-128 of the canonical JSON and of how special tokens in text are read; special ids are options, not here."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(canonical(self.json) + (b"+special" if self.allow_special else b""))

    @functools.cached_property
    def _outline(self) -> _Outline:
        return msgspec.json.decode(self.json, type=_Outline)

    @property
    def added_tokens(self) -> list[dict[str, Any]]:
        """The `added_tokens` of the file: id, content, special, ..."""
        return self._outline.added_tokens or []

    @property
    def normalizes(self) -> bool:
        """True if text passes a Unicode normalisation form first."""
        return "NF" in str(self._outline.normalizer)

    def encode(self, texts: Sequence[str]) -> Ragged:
        """Ids by the reference encoder."""
        return self.reference.encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self.reference.decode(ids)

    def count_special(self, texts: Sequence[str]) -> dict[str, int]:
        """How often the texts spell each special token: a look at a corpus before training on it."""
        names = [t["content"] for t in self.added_tokens if t.get("special")]
        counts = {name: sum(text.count(name) for text in texts) for name in names}
        return {name: count for name, count in counts.items() if count}

    def default_affixes(self) -> tuple[list[int], list[int]]:
        """Ids that the file's post-processor puts before and after a text. ConfigError if it does anything else."""
        return self.reference.affixes()

    @functools.cached_property
    def reference(self) -> Any:
        """The `tokenizers` encoder, one per process: it may be shared between threads."""
        from headrace.ops.tokenizer.reference import ReferenceEncoder

        return ReferenceEncoder(self.json, self.allow_special)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "reference"}


def from_files(name: str, files: Mapping[str, bytes], allow_special: bool = False) -> JsonTokenizer:
    """Make a tokenizer of the contents of `tokenizer.json` and of its neighbours."""
    json = files["tokenizer.json"]
    return JsonTokenizer(name, json, find_special_ids(json, files), allow_special)


def canonical(json: bytes) -> bytes:
    """The same bytes for the same tokenizer, however the file was written."""
    content = decode_json("tokenizer.json", json)
    content.pop("truncation", None)
    content.pop("padding", None)
    model = content.get("model") or {}
    merges = model.get("merges")
    if merges and isinstance(merges[0], str):  # files written before 2024 join the two halves with a space
        model["merges"] = [list(merge.split(" ", 1)) for merge in merges]
    return msgspec.json.encode(content, order="sorted")


def decode_json(what: str, data: bytes) -> dict[str, Any]:
    """A JSON object, or ConfigError saying what is wrong with the file."""
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{what} holds a JSON {type(content).__name__}, not an object")
    return content


def find_special_ids(json: bytes, files: Mapping[str, bytes]) -> SpecialIds:
    """Ids by role: tokenizer_config.json, then special_tokens_map.json, then (generation_)config.json, then known names."""
    content = decode_json("tokenizer.json", json)
    if "model" not in content:
        raise ConfigError("tokenizer.json has no 'model': this is not a file of the tokenizers library")
    added = {t["content"]: t["id"] for t in content.get("added_tokens") or []}
    vocab = content["model"].get("vocab")
    ids: dict[str, Any] = {**(vocab if isinstance(vocab, dict) else {}), **added}
    names = [decode_json(n, files[n]) for n in ("tokenizer_config.json", "special_tokens_map.json") if n in files]
    configs = [decode_json(n, files[n]) for n in ("generation_config.json", "config.json") if n in files]
    return SpecialIds(**{role: _role_id(role, ids, added, names, configs) for role in ROLES})


def _role_id(
    role: str, ids: dict[str, Any], added: dict[str, int], names: list[dict[str, Any]], configs: list[dict[str, Any]]
) -> int | None:
    said = False
    for config in names:
        value = config.get(f"{role}_token")
        token = value.get("content") if isinstance(value, dict) else value
        said = said or f"{role}_token" in config
        if isinstance(token, str) and token in ids:
            return int(ids[token])
    for config in configs:
        value = config.get(f"{role}_token_id")
        if isinstance(value, int) and not said:
            return value
    known = [added[name] for name in KNOWN_NAMES[role] if name in added]
    return known[0] if len(known) == 1 and not said else None

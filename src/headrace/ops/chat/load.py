"""A tokenizer with its chat template, from what the user gave."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from headrace.errors import ConfigError
from headrace.ops.chat.template import ChatTemplate
from headrace.ops.tokenizer.files import TEMPLATE, read_files
from headrace.ops.tokenizer.json_tokenizer import JsonTokenizer, decode_json, from_files
from headrace.ops.tokenizer.load import load_tokenizer

_ROLES: Final = ("bos", "eos", "pad", "unk")


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer that reads special tokens in text, a template, and the end token."""

    tokenizer: JsonTokenizer
    template: ChatTemplate | None
    eos: int | None


def load_chat(
    tokenizer: Any, tokenizer_id: Any, template: Any, eos_token: str | None, arguments: Mapping[str, Any]
) -> ChatTokenizer:
    """Load all of it. ConfigError says what is missing.

    `template`: Jinja text, or the path of a file, instead of the tokenizer's own. `eos_token`: instead of the tokenizer's own.
    """
    files: dict[str, bytes] = {}
    given = tokenizer_id if tokenizer is None else tokenizer
    if isinstance(given, (str, os.PathLike)):
        files = read_files(given)
        loaded: Any = from_files(Path(os.fspath(given)).name, files, True)
    else:
        loaded = load_tokenizer(tokenizer, tokenizer_id)
        if isinstance(loaded, JsonTokenizer):
            loaded = replace(loaded, allow_special=True)
    if not isinstance(loaded, JsonTokenizer):
        raise ConfigError(
            f"tokenize_chat needs a tokenizer.json (or a fast tokenizer, which holds one), to know which characters a token stands "
            f"for; {type(given).__name__} has none"
        )
    contents = {int(token["id"]): str(token["content"]) for token in loaded.added_tokens}
    ids = {content: number for number, content in contents.items()}
    eos = loaded.special_ids.eos
    if eos_token is not None:
        if eos_token not in ids:
            raise ConfigError(
                f"tokenize_chat(eos_token={eos_token!r}): tokenizer {loaded.name} has no such special token"
            )
        eos = ids[eos_token]
    source = _source(template, files, given)
    if source is None:
        return ChatTokenizer(loaded, None, eos)
    special = {f"{role}_token": contents.get(getattr(loaded.special_ids, role)) for role in _ROLES}
    special["eos_token"] = special["eos_token"] if eos is None else contents.get(eos, "")
    variables = {name: text for name, text in special.items() if text is not None}
    return ChatTokenizer(loaded, ChatTemplate(source, {**variables, **arguments}), eos)


def _source(template: Any, files: Mapping[str, bytes], given: Any) -> str | None:
    if template is not None:
        text = os.fspath(template)
        if "{" not in text:
            path = Path(text).expanduser()
            if not path.is_file():
                raise ConfigError(f"tokenize_chat(chat_template={text!r}) is neither Jinja text nor a file that exists")
            return path.read_text()
        return text
    if TEMPLATE in files:
        return files[TEMPLATE].decode()
    own: Any = getattr(given, "chat_template", None)
    if "tokenizer_config.json" in files:
        own = decode_json("tokenizer_config.json", files["tokenizer_config.json"]).get("chat_template")
    if isinstance(own, list):  # several, by name
        own = {entry["name"]: entry["template"] for entry in own}
    if isinstance(own, Mapping):
        if "default" not in own:
            raise ConfigError(
                f"the tokenizer has chat templates {sorted(own)}, none called 'default'; give chat_template=..."
            )
        own = own["default"]
    return own if isinstance(own, str) else None

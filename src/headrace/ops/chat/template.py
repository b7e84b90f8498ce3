"""A conversation as text by a chat template, and which of its characters an assistant wrote.

Templates are Jinja, as models publish them in `tokenizer_config.json` or `chat_template.jinja`. They run in a sandbox and know no
clock: `strftime_now` is not there, since the date of a run would be part of the data (templates have a fixed one for that case;
`chat_template_kwargs={"date_string": ...}` sets another).

Two ways lead to the spans:

* `{% generation %}` blocks of the template say it. They put a marker before and after, two characters that Unicode
  keeps for such use, which are then taken out again.
* Growing prefixes of the conversation: the text of one that ends before an assistant's message, with the generation prompt, must
  be the beginning of the text with the message; the rest of it is the span.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.errors import ConfigError, RecordError

BEGIN: Final = "\U0010fffe"
END: Final = "\U0010ffff"
_GENERATION: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_UNSET: Final[Mapping[str, Any]] = {"tools": None, "documents": None}
"""What templates ask for by `is not none`: it is there, as None, in every conversation without them."""

Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChatTemplate:
    """`source`: Jinja text. `variables`: what it may use beside the messages (`bos_token`, the user's arguments, ...)."""

    source: str
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tagged(self) -> bool:
        """Whether it says itself what an assistant wrote."""
        return _GENERATION.search(self.source) is not None

    def renderer(self) -> Renderer:
        """Compile it. ConfigError if it is no template, or Jinja is missing."""
        return Renderer(self)


class Renderer:
    """A compiled template; one per worker."""

    def __init__(self, template: ChatTemplate) -> None:
        """Compile."""
        try:
            import jinja2
            import jinja2.sandbox
        except ModuleNotFoundError as error:
            raise ConfigError("tokenize_chat() needs Jinja for chat templates: pip install 'headrace[chat]'") from error
        from headrace.ops.chat.tags import GenerationTags

        self._errors = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTags, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise(jinja2.TemplateError)
        try:
            self._template = environment.from_string(template.source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is wrong in line {error.lineno}: {error.message}") from error
        self._variables = dict(template.variables)

    def render(self, messages: Messages, prompt: bool = False, **variables: Any) -> str:
        """Text of a conversation, markers included; `prompt` ends it with the beginning of an answer."""
        try:
            return self._template.render(
                **{**_UNSET, **self._variables, **variables}, messages=list(messages), add_generation_prompt=prompt
            )
        except self._errors as error:
            raise RecordError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error

    def by_tags(self, messages: Messages, **variables: Any) -> tuple[str, list[Span]]:
        """Text, and the spans of its generation blocks."""
        if _holds_marker(messages):
            raise RecordError("a message holds U+10FFFE or U+10FFFF, which mark what an assistant wrote; remove it")
        text, spans, at = self.render(messages, **variables), [], 0
        pieces: list[str] = []
        for number, piece in enumerate(_between_markers(text)):
            if number % 2 and piece:
                spans.append((at, at + len(piece)))
            pieces.append(piece)
            at += len(piece)
        return "".join(pieces), spans

    def by_prefixes(self, messages: Messages, **variables: Any) -> tuple[str, list[Span]]:
        """Text, and the span of each assistant's message."""
        text = _without_markers(self.render(messages, **variables))
        spans: list[Span] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, until = messages[:number], messages[: number + 1]
            prompt = _without_markers(self.render(before, prompt=True, **variables))
            if before and prompt == _without_markers(self.render(before, **variables)):
                raise RecordError(
                    "the chat template has no generation prompt (add_generation_prompt changes nothing), so where an answer begins "
                    "cannot be found; mark answers in it with {% generation %} ... {% endgeneration %}"
                )
            whole = _without_markers(self.render(until, **variables))
            if not (whole.startswith(prompt) and text.startswith(whole)):
                raise RecordError(
                    f"the chat template renders messages before number {number} otherwise once that is there, so where it begins "
                    "cannot be found; mark answers in it with {% generation %} ... {% endgeneration %}"
                )
            spans.append((len(prompt), len(whole)))
        return text, spans


def _holds_marker(value: Any) -> bool:
    if isinstance(value, str):
        return BEGIN in value or END in value
    if isinstance(value, Mapping):
        return any(_holds_marker(inner) for inner in value.values())
    return isinstance(value, (list, tuple)) and any(_holds_marker(inner) for inner in value)


def _between_markers(text: str) -> list[str]:
    """Pieces outside and inside of marked spans, in turn."""
    pieces: list[str] = []
    for piece in text.split(BEGIN):
        inside, end, after = piece.partition(END)
        pieces += [inside, after] if end else [inside]
    return pieces


def _without_markers(text: str) -> str:
    return text.replace(BEGIN, "").replace(END, "")


def _tojson(value: Any, indent: int | None = None, **settings: Any) -> str:
    """As published templates expect it: no escapes for HTML, none for letters."""
    return json.dumps(value, ensure_ascii=settings.pop("ensure_ascii", False), indent=indent, **settings)


def _raise(kind: type[Exception]) -> Any:
    def raise_exception(message: str) -> None:
        raise kind(message)

    return raise_exception

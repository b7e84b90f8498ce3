"""`tokenize_chat`: conversations in, token ids and a mask of what is trained on out.

The whole conversation is one text by the tokenizer's chat template, encoded once, with special tokens read as such: the template
spells them. A token is trained on if the character that it begins with is part of an assistant's span. Ids and mask are aligned
and not shifted; packing carries both, and `to_training` turns the mask into ignored labels.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from dataclasses import field as dataclass_field
from typing import Any, Final, Literal

import numpy as np
import xxhash

from headrace.arguments import whole_number
from headrace.core.block import Block, Column, Drop, Ragged, field_roots, lookup
from headrace.core.op import BadRows, Fields, Worker
from headrace.errors import ConfigError, RecordError, UnknownOptionError
from headrace.ops.chat.load import ChatTokenizer, load_chat
from headrace.ops.chat.messages import read_messages
from headrace.ops.chat.template import Messages, Renderer, Span

SpanSource = Literal["auto", "generation_tags", "prefix_diff"]
LossScope = Literal["all_assistant", "last_span", "after_last_user"]
SPAN_SOURCES: Final = ("auto", "generation_tags", "prefix_diff")
LOSS_SCOPES: Final = ("all_assistant", "last_span", "after_last_user")
_RESERVED: Final = ("messages", "tools", "add_generation_prompt", "enable_thinking")
_NAME: Final = "tokenize_chat"


@dataclass(frozen=True)
class TokenizeChat:
    """Encode the messages in `field`.

    `span_source`: where assistants' spans come from, see `template.py`; "auto" takes the template's own marks, where it has some.
    `loss_scope`: every span, the last one, or those of messages after the last user's.
    `apply_chat_template=False`: the messages' contents one after the other, the end token behind each assistant's.
    """

    tokenizer: Any = None
    tokenizer_id: Any = None
    _: KW_ONLY
    eos_token: str | None = None
    field: str = "messages"
    max_length: int | None = None
    chat_template: Any = None
    apply_chat_template: bool = True
    span_source: SpanSource = "auto"
    loss_scope: LossScope = "all_assistant"
    chat_template_kwargs: Mapping[str, Any] = dataclass_field(default_factory=dict)
    tools_field: str = "tools"
    enable_thinking_field: str = "enable_thinking"
    mask_field_out: str = "loss_mask"
    preserve_upstream_payload: bool = False

    def __post_init__(self) -> None:
        """Check everything that can be checked without loading the tokenizer."""
        if (self.tokenizer is None) == (self.tokenizer_id is None):
            raise ConfigError(
                f"{_NAME} needs exactly one of tokenizer= (an object) and tokenizer_id= (a folder, file or hub id)"
            )
        for what, value, known in (
            ("span_source", self.span_source, SPAN_SOURCES),
            ("loss_scope", self.loss_scope, LOSS_SCOPES),
        ):
            if value not in known:
                raise UnknownOptionError(what, str(value), known)
        if self.max_length is not None:
            object.__setattr__(self, "max_length", whole_number(f"{_NAME}: max_length", self.max_length, 2))
        taken = sorted(set(self.chat_template_kwargs) & {*_RESERVED})
        if taken:
            raise ConfigError(f"{_NAME}: chat_template_kwargs may not set {taken[0]!r}, which comes from each record")
        if not self.field or not self.mask_field_out or self.mask_field_out == "input_ids":
            raise ConfigError(
                f"{_NAME}: name the field of the messages, and a field for the mask that is not input_ids"
            )

    @property
    def name(self) -> str:
        """Shown by explain() and in errors."""
        return _NAME

    @functools.cached_property
    def loaded(self) -> ChatTokenizer:
        """The tokenizer and its template, loaded when first asked for."""
        given = (self.tokenizer, self.tokenizer_id, self.chat_template, self.eos_token)
        chat = load_chat(*given, self.chat_template_kwargs)
        if not self.apply_chat_template:
            if chat.eos is None:
                raise ConfigError(f"{_NAME}(apply_chat_template=False) needs an end token; pass eos_token=...")
            return chat
        if chat.template is None:
            raise ConfigError(f"{_NAME}: tokenizer {chat.tokenizer.name} has no chat template; pass chat_template=...")
        if self.span_source == "generation_tags" and not chat.template.tagged:
            raise ConfigError(
                f"{_NAME}(span_source='generation_tags'): the chat template has no {{% generation %}} block"
            )
        if self.span_source == "auto" and not chat.template.tagged:
            warnings.warn(
                f"{_NAME}: the chat template does not mark what an assistant wrote, so it is found by rendering growing prefixes; "
                "say span_source='prefix_diff' if that is meant",
                stacklevel=3,
            )
        return chat

    def prepare(self, sample: Block | None, notes: Any = None) -> TokenizeChat:
        """Load what is needed, so that what is missing is said before the run."""
        if self.loaded.template is not None:
            self.loaded.template.renderer()
        return self

    def describe(self) -> dict[str, Any]:
        """Every parameter that decides data, and tokenizer and template by content."""
        chat = self.loaded
        source = chat.template.source if chat.template is not None and self.apply_chat_template else ""
        return {
            "tokenizer": chat.tokenizer.fingerprint,
            "template": xxhash.xxh3_128_hexdigest(source.encode()),
            "arguments": repr(sorted(self.chat_template_kwargs.items())),
            "eos": chat.eos,
            "field": self.field,
            "max_length": self.max_length,
            "apply_chat_template": self.apply_chat_template,
            "tags": self.by_tags,
            "loss_scope": self.loss_scope,
            "tools_field": self.tools_field,
            "enable_thinking_field": self.enable_thinking_field,
            "mask_field_out": self.mask_field_out,
            "preserve_upstream_payload": self.preserve_upstream_payload,
        }

    @property
    def by_tags(self) -> bool:
        """Whether the template's own marks say what an assistant wrote."""
        template = self.loaded.template
        return self.span_source != "prefix_diff" and template is not None and template.tagged

    def needs(self, downstream: Fields) -> Fields:
        """The messages and what belongs to them, and what is wanted further down if the upstream payload is kept."""
        own = field_roots([self.field, self.tools_field, self.enable_thinking_field])
        if not self.preserve_upstream_payload:
            return own
        return None if downstream is None else downstream - {"input_ids", self.mask_field_out} | own

    def worker(self) -> Worker:
        """A function from block to block, with a template and an encoder of its own."""
        return _ChatWorker(self).run


class _ChatWorker:
    """What runs: one compiled template, one description."""

    def __init__(self, op: TokenizeChat) -> None:
        self._op, self._chat, self._by_tags = op, op.loaded, op.by_tags
        self._renderer: Renderer | None = None
        if op.apply_chat_template and self._chat.template is not None:
            self._renderer = self._chat.template.renderer()

    def run(self, block: Block, bad: BadRows) -> Block:
        """Ids and mask of each conversation that has something to train on."""
        kept: list[int] = []
        ids: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        dropped: dict[str, list[int]] = {}
        lost = np.zeros(len(block), np.int64)
        for row, payload in enumerate(block.payloads()):
            try:
                tokens, mask, cut = self._encode(payload)
            except RecordError as error:
                bad.add(row, error)
                continue
            lost[row] = cut
            reason = "fewer than two tokens" if len(tokens) < 2 else "" if mask.any() else "nothing to train on"
            if reason:
                dropped.setdefault(reason, []).append(row)
                continue
            kept.append(row)
            ids.append(tokens)
            masks.append(mask)
        index = np.asarray(kept, np.int64)
        columns: dict[str, Column] = {
            "input_ids": _rows(ids, np.int32),
            self._op.mask_field_out: _rows(masks, np.uint8),
        }
        upstream = block.take(index)
        if self._op.preserve_upstream_payload:
            columns = {**upstream.as_columns(), **columns}
        out = upstream.with_columns(columns)
        drops = [
            Drop(_NAME, reason, block.origin.ids[np.asarray(rows, np.int64)])
            for reason, rows in sorted(dropped.items())
        ]
        if (truncated := Drop.of_tokens(_NAME, "truncated", block.origin, lost)) is not None:
            drops.append(truncated)
        return out.dropping(*drops) if drops else out

    def _encode(self, payload: Any) -> tuple[np.ndarray, np.ndarray, int]:
        """Ids, mask, and how many tokens were cut off."""
        if not isinstance(payload, Mapping):
            raise RecordError(f"{_NAME} needs records that are mappings; this one is a {type(payload).__name__}")
        messages = read_messages(lookup(payload, self._op.field), self._op.field)
        ids, mask = self._plain(messages) if self._renderer is None else self._rendered(payload, messages)
        eos, limit = self._chat.eos, self._op.max_length
        if eos is not None and len(ids) and ids[-1] != eos and (limit is None or len(ids) < limit):
            ids, mask = [*ids, eos], [*mask, mask[-1]]
        if mask and mask[0]:
            raise RecordError("the first token would be trained on, and nothing comes before it to predict it from")
        cut = 0 if limit is None else max(0, len(ids) - limit)
        return np.asarray(ids[:limit], np.int32), np.asarray(mask[:limit], np.uint8), cut

    def _plain(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Contents one after the other, the end token behind each answer."""
        ids: list[Any] = []
        mask: list[bool] = []
        wanted = _in_scope(messages, self._op.loss_scope)
        for number, message in enumerate(messages):
            own = self._chat.tokenizer.reference.encode_one(_content(message))
            if message["role"] == "assistant":
                own = [*own, self._chat.eos]
            ids += own
            mask += [number in wanted] * len(own)
        return ids, mask

    def _rendered(self, payload: Mapping[str, Any], messages: Messages) -> tuple[list[int], list[bool]]:
        assert self._renderer is not None
        variables: dict[str, Any] = {}
        for name, key in (("tools", self._op.tools_field), ("enable_thinking", self._op.enable_thinking_field)):
            if payload.get(key) is not None:
                variables[name] = payload[key]
        find = self._renderer.by_tags if self._by_tags else self._renderer.by_prefixes
        text, spans = find(messages, **variables)
        spans = self._scoped(messages, spans)
        ids, offsets = self._chat.tokenizer.reference.encode_with_offsets(text)
        return ids, _inside(offsets, spans)

    def _scoped(self, messages: Messages, spans: list[Span]) -> list[Span]:
        scope = self._op.loss_scope
        if scope == "all_assistant" or not spans:
            return spans
        if scope == "last_span":
            return spans[-1:]
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(answers) != len(spans):
            raise RecordError(
                f"the chat template marks {len(spans)} spans for {len(answers)} messages of an assistant, so which follow the last "
                "user's message cannot be told; use span_source='prefix_diff' or another loss_scope"
            )
        wanted = _in_scope(messages, scope)
        return [span for number, span in zip(answers, spans, strict=True) if number in wanted]


def _in_scope(messages: Messages, scope: LossScope) -> set[int]:
    """Messages of an assistant that are trained on."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if scope == "last_span":
        return set(answers[-1:])
    if scope == "after_last_user":
        asked = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
        return {number for number in answers if number > asked}
    return set(answers)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise RecordError(
            f"a message of {message['role']!r} has no text: {content!r:.60}; use a chat template for other content"
        )
    return content


def _inside(offsets: list[Span], spans: list[Span]) -> list[bool]:
    """Whether each token begins in one of the spans (ascending)."""
    starts = np.asarray([start for start, _ in offsets], np.int64)
    begins, ends = np.asarray(spans, np.int64).reshape(-1, 2).T
    span = np.searchsorted(begins, starts, side="right") - 1
    inside = (span >= 0) & (starts < np.append(ends, 0)[span])
    return inside.tolist()


def _rows(rows: list[np.ndarray], dtype: Any) -> Ragged:
    return Ragged.from_rows(rows) if rows else Ragged(np.empty(0, dtype), np.zeros(1, np.int64))

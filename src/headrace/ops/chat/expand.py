"""`expand_chat`: a conversation of several turns becomes one record for each answered turn.

Each record holds the conversation up to before the next user's message, so that it ends with an answer. A user's message that
nobody answers gives none. The context is repeated: `n` turns cost about `n / 2` times their tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from headrace.core.block import Block, Drop, field_roots
from headrace.core.op import BadRows, Fields, Worker
from headrace.core.tokens import PIECE_BITS
from headrace.errors import ConfigError, RecordError
from headrace.ops.chat.messages import read_messages

_NAME: Final = "expand_chat"


@dataclass(frozen=True, slots=True)
class ExpandChat:
    """One record for each answered turn of the messages in `field`."""

    field: str = "messages"
    name: str = _NAME

    def __post_init__(self) -> None:
        """A name of a field."""
        if not self.field:
            raise ConfigError(f"{_NAME}: name the field that holds the messages")

    def describe(self) -> dict[str, Any]:
        """Parameters that decide data."""
        return {"field": self.field}

    def needs(self, downstream: Fields) -> Fields:
        """Whatever is wanted of its output, and the messages."""
        return None if downstream is None else downstream | field_roots([self.field])

    def worker(self) -> Worker:
        """A function from block to block."""
        return self._run

    def _run(self, block: Block, bad: BadRows) -> Block:
        if block.origin.rows is not None:
            raise ConfigError(f"{_NAME}() cannot expand packed rows; call it before packing")
        rows: list[int] = []
        ordinals: list[int] = []
        payloads: list[Any] = []
        silent: list[int] = []
        for row, payload in enumerate(block.payloads()):
            try:
                if not isinstance(payload, Mapping):
                    raise RecordError(
                        f"{_NAME} needs records that are mappings; this one is a {type(payload).__name__}"
                    )
                messages = read_messages(payload.get(self.field), self.field)
            except RecordError as error:
                bad.add(row, error)
                continue
            ends = answered(messages)
            for ordinal, end in enumerate(ends):
                last = ordinal == len(ends) - 1
                record = dict(payload) if last else copy.deepcopy(dict(payload))
                payloads.append({**record, self.field: record[self.field][:end]})
                rows.append(row)
                ordinals.append(ordinal)
            if not ends:
                silent.append(row)
        index = np.asarray(rows, np.int64)
        parents = block.origin.take(index)
        origin = parents.with_piece((parents.ids[:, -1] << PIECE_BITS) | np.asarray(ordinals, np.int64))
        out = block.take(index).with_rows(payloads, origin)
        ids = block.origin.ids[np.asarray(silent, np.int64)]
        return out.dropping(Drop(_NAME, "no turn is answered", ids)) if silent else out


def answered(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Where the conversation ends for each user's message that is answered: before the next one.

    >>> answered([{"role": r} for r in ("user", "assistant", "user", "user", "tool", "assistant")])
    [2, 6]
    """
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    ends = [*asked[1:], len(messages)] if asked else []
    return [
        end
        for start, end in zip(asked, ends, strict=True)
        if any(message["role"] == "assistant" for message in messages[start + 1 : end])
    ]

"""`on_error` of the packing operator: documents that cannot be packed are left out before a packer sees them.

Which field holds tokens, and which others go along, is learnt from the stream (`fields.py`), so what is refused depends on what
was accepted before, and only on that: a refused document teaches nothing, and a document is refused only when all before it
have been judged. So any grouping into blocks, and a run that was restored, refuse the same documents.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from headrace.core.block import Block, Drop, Ints, Origin
from headrace.core.refusal import Refusal
from headrace.errors import RecordError
from headrace.ops.pack.domains import Packer
from headrace.ops.pack.fields import AlignedFields

_NAME: Final = "pack_flat"


class Gate:
    """In front of a packer of one lane. It has no state of its own: the packer's says what the stream has taught."""

    def __init__(self, packer: Packer, fields: AlignedFields, longest: int | None, policy: str) -> None:
        """`longest`: tokens of the longest document that the packer takes, if a longer one is an error."""
        self._packer, self._fields, self._longest, self._policy = packer, fields, longest, policy
        self.held, self.state, self.begun = packer.held, packer.state, packer.begun

    def push(self, block: Block) -> list[Block]:
        """Pack what can be packed."""
        kept, drops = self._judge(block)
        if not drops:
            return self._packer.push(block)
        out = self._packer.push(block.take(np.asarray(kept, np.int64))) if kept else []
        out = out or [Block(block.lane, Origin.empty(), {})]
        return [out[0].dropping(*drops, *(() if kept else block.drops)), *out[1:]]

    def adopt(self, documents: Block, begun: Ints) -> list[Block]:
        """Documents of another packer, which were judged before."""
        out = self._packer.adopt(documents, begun)
        self._fields.restore(self._packer.state()["fields"])
        return out

    def flush(self) -> list[Block]:
        """Flush the packer; the stream may go on with other fields."""
        self._fields.clear()
        return self._packer.flush()

    end = flush

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """Give the packer its documents back."""
        self._packer.restore(state, held)
        self._fields.restore(state["fields"])

    def _judge(self, block: Block) -> tuple[list[int], list[Drop]]:
        """Rows that can be packed, and word of the others."""
        kept: list[int] = []
        drops: list[Drop] = []
        start = 0
        stop = len(block)
        while start < stop:
            part, before = block.slice(start, stop), self._fields.state()
            try:
                self._check(part)
            except RecordError as error:
                self._fields.restore(before)
                if row := self._row(part, error):
                    stop = start + row  # those before it first: what they teach may make it fit
                    continue
                drops.append(self._refused(part, error))
                start += 1
            else:
                kept += range(start, stop)
                start = stop
            stop = len(block)
        return kept, drops

    def _check(self, part: Block) -> None:
        lengths = np.diff(self._fields.align(part).offsets)
        if self._longest is not None and (long := lengths > self._longest).any():
            row = int(np.flatnonzero(long)[0])
            error = RecordError(f"{_NAME}: a document of {lengths[row]} tokens does not fit a row of {self._longest}")
            error.origin = tuple(part.origin.ids[row].tolist())
            raise error

    def _row(self, part: Block, error: RecordError) -> int:
        if error.origin is None:
            raise error
        return int(np.flatnonzero((part.origin.ids == np.asarray(error.origin)).all(axis=1))[0])

    def _refused(self, part: Block, error: RecordError) -> Drop:
        first, keep = part.slice(0, 1), self._policy == "quarantine"
        refusal = Refusal.of(error, first.payloads()[0] if keep else None, keep=keep)
        return Drop(_NAME, f"{self._policy}: {type(error).__name__}", first.origin.ids, refusal=refusal)

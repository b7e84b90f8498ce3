"""The fast encoder while it runs.

An error or a Rust panic (a BaseException) in the fast library switches this encoder to the reference for that call and for
good. Both give equal ids, so the switch changes nothing but speed; it is logged, and kept in `fallback`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from headrace.core.block import Ragged
from headrace.ops.tokenizer.seam import Encoder

log = logging.getLogger("headrace.tokenize")


class GuardedEncoder:
    """A fast encoder with the reference behind it. One per thread."""

    def __init__(self, make_fast: Callable[[], Encoder], reference: Encoder, renew: int | None = None) -> None:
        """`renew`: make the fast encoder anew after so many characters, because its cache only grows."""
        self._make_fast, self._reference, self._renew = make_fast, reference, renew
        self._fast: Encoder | None = None
        self._seen = 0
        self.fallback: str | None = None

    @property
    def name(self) -> str:
        """The library in use now."""
        return self._reference.name if self._fast is None and self.fallback else "fast"

    def encode(self, texts: Sequence[str]) -> Ragged:
        """Ids of each text, int32."""
        if self.fallback is None:
            try:
                return self._encode_fast(texts)
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # noqa: BLE001 - a Rust panic is a BaseException, and the reference can go on
                self._give_up(error)
        return self._reference.encode(texts)

    def _encode_fast(self, texts: Sequence[str]) -> Ragged:
        if self._fast is None:
            self._fast = self._make_fast()
        ids = self._fast.encode(texts)
        if len(ids) != len(texts):
            raise RuntimeError(f"{len(texts)} texts gave {len(ids)} rows")
        if self._renew is not None:
            self._seen += sum(map(len, texts))
            if self._seen >= self._renew:
                self._fast, self._seen = None, 0
        return ids

    def _give_up(self, error: BaseException) -> None:
        self.fallback = f"{type(error).__name__}: {str(error)[:200]}"
        self._fast = None
        log.warning("tokenize: the fast encoder failed (%s); going on with %s", self.fallback, self._reference.name)

"""The fast encoder while it runs.

An error or a Rust panic (a BaseException) in the fast library sends that call to the reference, and the fast encoder is made
anew; after FAILURES of them this encoder stays with the reference. Both give equal ids, so nothing changes but speed. Each
failure is logged, and kept in `failures`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from headrace.core.block import Ragged
from headrace.ops.tokenizer.seam import Encoder

FAILURES = 3
log = logging.getLogger("headrace.tokenize")


class GuardedEncoder:
    """A fast encoder with the reference behind it. One per thread."""

    def __init__(
        self,
        take: Callable[[], Encoder],
        discard: Callable[[Encoder | None], None],
        reference: Callable[[], Encoder],
        renew: int | None = None,
    ) -> None:
        """`take` gives a fast encoder, `discard` hears of one that failed, `reference` gives the one that can always go on.

        `renew`: take another one after so many characters, because the cache of the old one only grows.
        """
        self._take, self._discard, self._reference, self._renew = take, discard, reference, renew
        self._fast: Encoder | None = None
        self._seen = 0
        self.failures: list[str] = []

    @property
    def name(self) -> str:
        """The library in use now."""
        return self._reference().name if self._fast is None else self._fast.name

    def encode(self, texts: Sequence[str]) -> Ragged:
        """Ids of each text, int32."""
        if len(self.failures) < FAILURES:
            try:
                return self._encode_fast(texts)
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # noqa: BLE001 - a Rust panic is a BaseException, and the reference can go on
                self._note(error)
        return self._reference().encode(texts)

    def _encode_fast(self, texts: Sequence[str]) -> Ragged:
        if self._fast is None:
            self._fast = self._take()
        ids = self._fast.encode(texts)
        if len(ids) != len(texts):
            raise RuntimeError(f"{len(texts)} texts gave {len(ids)} rows")
        if self._renew is not None:
            self._seen += sum(map(len, texts))
            if self._seen >= self._renew:
                self._fast, self._seen = None, 0
        return ids

    def _note(self, error: BaseException) -> None:
        self.failures.append(f"{type(error).__name__}: {str(error)[:200]}")
        self._discard(self._fast)
        self._fast, self._seen = None, 0
        stays = len(self.failures) == FAILURES
        log.warning(
            "tokenize: the fast encoder failed (%s); %s encodes %s",
            self.failures[-1],
            self._reference().name,
            "from here on, at a fraction of the speed" if stays else "this block",
        )

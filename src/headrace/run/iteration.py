"""One run over a pipeline, as the iterator that the training loop holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

from headrace.core import checkpoint as ckpt
from headrace.core.block import Block
from headrace.core.message import Item
from headrace.observe.summary import summarize
from headrace.run.consumer import Consumer
from headrace.run.digest import DigestLog
from headrace.run.uneven import is_masked
from headrace.types import SampleBatch

_log = logging.getLogger("headrace")

CATCH_UP_S: Final = 0.3
"""Seconds that the end of a run waits for batches of other groups, so that its last checkpoint is the same as theirs."""


class PipelineIterator(Iterator[Any]):
    """One run over a pipeline. Dropping it ends the run."""

    def __init__(
        self,
        consumer: Consumer,
        recipe: dict[str, Any],
        on_close: Callable[[PipelineIterator], None],
        *,
        batched: bool,
        digests: DigestLog | None = None,
        whole: bool = False,
        progress: bool = False,
    ) -> None:
        """Start the run. `recipe`: what its positions belong to. `whole`: a run from its beginning, on a whole rank; no batch at
        all is then worth a word."""
        self.consumer, self.digests, self.closed = consumer, digests, False
        self._recipe, self._on_close, self._batched, self._whole = recipe, on_close, batched, whole
        self._bar: Any = None
        try:
            consumer.start()
            if progress:
                from headrace.observe.bar import ProgressBar

                self._bar = ProgressBar(lambda: summarize(consumer.producer.summary(), consumer.deliveries))
        except BaseException:  # whatever it is, the run ends with it
            self.closed = True
            consumer.close()
            raise

    def __iter__(self) -> PipelineIterator:
        return self

    def __next__(self) -> Any:
        if self.closed:
            raise StopIteration
        try:
            while True:
                message = self.consumer.next()
                given = self._given(message)
                if self.digests is not None and not is_masked(message):
                    self.digests.add(message, self.consumer.following)
                self.consumer.deliver()  # behind all that may fail: a batch that the loop never had comes again
                if given is not None:
                    return given
        except BaseException as error:  # whatever it is, the run ends with it
            if isinstance(error, StopIteration) and self._whole:
                self._tell_if_empty()
            self.close()
            raise

    def _given(self, message: Block | Item) -> Any:
        """What the loop receives; None for what a function dropped."""
        if isinstance(message, Item):
            return message.value
        batch = SampleBatch.from_block(message)
        return batch if self._batched else batch.records[0]

    def state(self, within: float | None = None) -> dict[str, Any]:
        """The checkpoint of this run as it stands; `within` as for `Consumer.snapshot`."""
        state = ckpt.assemble(self._recipe, self.consumer.topology.lanes, self.consumer.snapshot(within))
        for lane in self.consumer.behind:
            state["lanes"][str(lane)][ckpt.CAUGHT_UP] = True
        return state

    def _tell_if_empty(self) -> None:
        deliveries = self.consumer.deliveries
        if deliveries.batches or deliveries.padded:
            return
        datasets = summarize(self.consumer.producer.summary(), deliveries).datasets
        ends = [f"{n} of {its.name!r} ({why})" for its in datasets for why, n in its.dropped.items()]
        _log.warning(
            "the run ended without a batch: %d samples were read%s. Give more data, a smaller batch, drop_last=False, or "
            "fewer groups.",
            sum(its.handed_out for its in datasets),
            f", and dropped {', '.join(ends)}" if ends else "",
        )

    def close(self) -> None:
        """End the run."""
        if self.closed:
            return
        self.closed = True
        with ExitStack() as last_first:  # all of them, whatever one raises
            last_first.callback(self.consumer.close)
            if self.digests is not None:
                last_first.callback(self.digests.close)
            last_first.callback(self._on_close, self)
            if self._bar is not None:
                last_first.callback(self._bar.close)

    def __del__(self) -> None:
        if not self.closed:
            self.close()

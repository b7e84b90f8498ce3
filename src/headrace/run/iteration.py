"""One run over a pipeline, as the iterator that the training loop holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from headrace.core.block import Block
from headrace.observe.summary import summarize
from headrace.run.consumer import Consumer
from headrace.run.digest import DigestLog
from headrace.run.uneven import is_masked
from headrace.types import SampleBatch

_log = logging.getLogger("headrace")


class PipelineIterator(Iterator[Any]):
    """One run over a pipeline. Dropping it ends the run."""

    def __init__(self, consumer: Consumer, on_close: Callable[[Consumer], None], batched: bool, progress: bool) -> None:
        self.consumer, self.closed = consumer, False
        self._on_close, self._batched = on_close, batched
        self._bar: Any = None
        self.digests: DigestLog | None = None
        self.whole = False
        """Whether this is a run from its beginning, on a whole rank: then no batch at all is worth a word."""
        try:
            consumer.start()
        except BaseException:  # whatever it is, the run ends with it
            self.closed = True
            consumer.close()
            raise
        if progress:
            from headrace.observe.bar import ProgressBar

            self._bar = ProgressBar(lambda: summarize(consumer.producer.summary(), consumer.deliveries))

    def __iter__(self) -> PipelineIterator:
        return self

    def __next__(self) -> Any:
        if self.closed:
            raise StopIteration
        try:
            while True:
                message = self.consumer.next()
                if self.digests is not None and not is_masked(message):
                    self.digests.add(message, self.consumer.position)
                if isinstance(message, Block):
                    return self._deliver(message)
                self.consumer.deliver(message)
                if message.value is not None:
                    return message.value
        except BaseException as error:  # whatever it is, the run ends with it
            if isinstance(error, StopIteration) and self.whole:
                self._tell_if_empty()
            self.close()
            raise

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

    def _deliver(self, block: Block) -> Any:
        self.consumer.deliver(block)
        batch = SampleBatch.from_block(block)
        return batch if self._batched else batch.records[0]

    def close(self) -> None:
        """End the run."""
        if not self.closed:
            self.closed = True
            if self._bar is not None:
                self._bar.close()
            self._on_close(self.consumer)
            if self.digests is not None:
                self.digests.close()
            self.consumer.close()

    def __del__(self) -> None:
        if not self.closed:
            self.close()

"""What a rank does about failures: tells its own, learns of others', and turns the echoes into one clear error."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

import msgspec
import torch.distributed as dist

from headrace.errors import WorkerDied
from headrace.parallel.torch_group import Group
from headrace.parallel.torch_record import Position, looks_like_transport
from headrace.parallel.torch_runtime import abort_process_groups
from headrace.parallel.torch_watchdog import Address, Failure, Hub, Watchdog, own_address

ECHO_WAIT = 1.0  # seconds to wait for the cause, after a transport error that is mostly its echo


class FailureGuard:
    """Watches all processes of the job, also those of other pipeline replicas: a collective ties them together.

    Every process makes one at the same time. `position` is where this rank stands, written by the engine.
    """

    def __init__(self, position: Position, silence: float) -> None:
        """Start the hub on the first process, and a watchdog on each."""
        self.position = position
        self.failed: WorkerDied | None = None
        world = Group(None)
        self.rank = world.rank
        self._hub = Hub(_own_host(), silence) if world.rank == 0 else None
        where = self._hub.address if self._hub else None
        told = None if where is None else msgspec.json.encode([where.host, where.port, where.token])
        address = Address(*msgspec.json.decode(world.broadcast_bytes(told, 0), type=tuple[str, int, str]))
        self._dog: Watchdog | None = Watchdog(self.rank, address, lambda: str(position), self._heard)
        position.interrupted = self.check
        world.barrier()  # everybody is watched before anybody works
        atexit.register(self._at_exit)

    def check(self) -> None:
        """Raise if another rank has failed."""
        if self._dog is not None and self._dog.failure is not None:
            raise self._news(self._dog.failure)

    def refuse_if_failed(self) -> None:
        """Raise if this pipeline has failed before: its process groups are gone."""
        if self.failed is not None:
            raise WorkerDied(f"this pipeline has failed and cannot go on: {self.failed}") from self.failed

    def fail(self, error: BaseException) -> NoReturn:
        """Say what went wrong here, or raise what went wrong elsewhere and caused it."""
        if isinstance(error, WorkerDied) or self._dog is None:
            self.failed = error if isinstance(error, WorkerDied) else WorkerDied(str(error))
            raise error
        self.raise_cause(error)
        self._dog.report(f"{type(error).__name__}: {error}")
        self.failed = WorkerDied(f"rank {self.rank} failed at {self.position}: {error}")
        raise error

    def raise_cause(self, error: BaseException) -> None:
        """Raise what went wrong elsewhere, if `error` is the echo of it, as errors of the transport mostly are."""
        if self._dog is None or not looks_like_transport(error):
            return
        failure = self._dog.wait_for_news(ECHO_WAIT)
        if failure is not None and failure.rank != self.rank:
            self.failed = self._news(failure)
            raise self.failed from error

    def close(self, *, together: bool = True) -> None:
        """Say goodbye; `together` waits for every process, so that nobody leaves while somebody may still fail."""
        if self._dog is None:
            return
        if together and self.failed is None:
            try:
                dist.barrier()
            except RuntimeError as error:
                self.fail(error)
        atexit.unregister(self._at_exit)
        self._dog.close()
        if self._hub is not None:
            self._hub.close()
        self._dog = self._hub = None

    def _heard(self, _: Failure) -> None:
        """On the watchdog's thread: set the calls free that wait for a tensor."""
        abort_process_groups()

    def _news(self, failure: Failure) -> WorkerDied:
        return WorkerDied(
            f"rank {failure.rank} failed: {failure.reason}. It stood at {failure.position}; this rank {self.rank} stood "
            f"at {self.position}. Its own log says more; start the job again from a checkpoint"
        )

    def _at_exit(self) -> None:
        """A process that ends well says goodbye; one that ends by an exception says so."""
        crash = getattr(sys, "last_value", None)
        if crash is not None and self._dog is not None and self._dog.failure is None and self.failed is None:
            self._dog.report(f"the program ended with {type(crash).__name__}: {crash}")
        self.close(together=False)


def _own_host() -> str:
    return own_address(os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500")))

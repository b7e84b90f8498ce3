"""What each stage costs: seconds for its three kinds of work, bytes that it holds and sends, and its links.

Any real number serves as a time: floats of seconds from a measurement, or integers and fractions where a result must be
exact. A full backward takes `backward_input + backward_weight`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import ConfigError


@dataclass(frozen=True)
class StageCosts:
    """Costs by stage, for one microbatch; `boundary`, `latency` and `bandwidth` by link, from stage s to s+1.

    `forward`, `backward_input`, `backward_weight`: seconds. `latency`: seconds one way. `bandwidth`: bytes a second
    (infinite: free). `boundary`: bytes of the activation that stage s hands on, and of the gradient that comes back.
    `activation`: bytes saved for the backward of one microbatch. `state`: bytes of parameters, gradients and optimizer.
    `overlap`: how much of the shorter half of an overlapped pair is hidden, from 0 (run in turn) to 1.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    latency: tuple[float, ...] = ()
    bandwidth: tuple[float, ...] = ()
    boundary: tuple[int, ...] = ()
    activation: tuple[int, ...] = ()
    state: tuple[int, ...] = ()
    overlap: float = 0.0

    def __post_init__(self) -> None:
        """Fill the tables that were left out, and refuse lengths and values that no pipeline has."""
        n = len(self.forward)
        if n == 0:
            raise ConfigError("costs of no stages; give one forward time for each stage")
        for name, size in (("latency", n - 1), ("boundary", n - 1), ("activation", n), ("state", n)):
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * size)
        if not self.bandwidth:
            object.__setattr__(self, "bandwidth", (math.inf,) * (n - 1))
        for name in ("backward_input", "backward_weight", "activation", "state"):
            self._check(name, n, "stage")
        for name in ("latency", "bandwidth", "boundary"):
            self._check(name, n - 1, "link")
        self._check("forward", n, "stage")
        if any(b == 0 for b in self.bandwidth):
            raise ConfigError(f"bandwidth of link {self.bandwidth.index(0)} is 0 bytes/s; leave it out for a free link")
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap is the hidden share of the shorter half, from 0 to 1; got {self.overlap}")

    def _check(self, name: str, size: int, what: str) -> None:
        values: tuple[float, ...] = getattr(self, name)
        if len(values) != size:
            raise ConfigError(
                f"{name} has {len(values)} values for {len(self.forward)} stages; give {size}, one a {what}"
            )
        for index, value in enumerate(values):
            if value != value or value < 0:
                raise ConfigError(f"{name} of {what} {index} is {value}; times and bytes cannot be negative or NaN")

    @staticmethod
    def uniform(
        num_stages: int,
        times: tuple[float, float, float] = (1, 1, 1),
        latency: float = 0,
        *,
        activation: int = 0,
        overlap: float = 0,
    ) -> StageCosts:
        """Equal stages: `times` are forward, input gradient and weight gradient of one stage and microbatch."""
        n = num_stages
        f, i, w = times
        return StageCosts(
            (f,) * n, (i,) * n, (w,) * n, (latency,) * (n - 1), activation=(activation,) * n, overlap=overlap
        )

    @staticmethod
    def of(forward: Sequence[float], backward: Sequence[float], weight_share: float = 0.5) -> StageCosts:
        """From forward and full backward times, when only these were measured."""
        if not 0 <= weight_share <= 1:
            raise ConfigError(f"weight_share is the part of the backward spent on weights, 0 to 1; got {weight_share}")
        weight = tuple(b * weight_share for b in backward)
        return StageCosts(tuple(forward), tuple(b - w for b, w in zip(backward, weight, strict=True)), weight)

    @property
    def num_stages(self) -> int:
        """How many stages these costs describe."""
        return len(self.forward)

    @property
    def backward(self) -> tuple[float, ...]:
        """Seconds of the full backward of each stage."""
        return tuple(i + w for i, w in zip(self.backward_input, self.backward_weight, strict=True))

    def hop(self, link: int) -> float:
        """Seconds that one message takes over an idle link."""
        return self.latency[link] + self.wire(link)

    def wire(self, link: int) -> float:
        """Seconds that one message occupies a link."""
        band = self.bandwidth[link]
        return 0 if band == math.inf else self.boundary[link] / band

"""Weights of a mixture, and the exact shares made of them.

A float weight is not the number a person typed: 0.1 + 0.2 and 0.7 do not add up to one. All arithmetic of the mixture is
on whole numbers, so weights first become shares `p / q` with one common `q`: the simple fractions that the floats stand
for where there are such (0.25 and 0.75 are 1/4 and 3/4; 1, 1, 1 are thirds), else multiples of 2^-46. The
latter moves a weight by at most 7e-15: less than a hundredth of a sample in 10^12.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, SupportsFloat

from headrace.errors import CurriculumError

FINEST: Final = 1 << 46
"""Largest common denominator of the shares; it keeps a block's arithmetic inside int64."""

_SIMPLE: Final = 1 << 32
_FLOAT_ERROR: Final = Fraction(1, 1 << 50)


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """Share of each component in the samples handed out.

    Weights are relative and need not add up to one. Zero means never. Negative, NaN, infinite and all-zero
    weights raise `CurriculumError`, which prints them.

        MixtureSpec({"code": 0.25, "web": 0.75})
        MixtureSpec({"code": 1, "web": 3})           # the same mixture
    """

    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        weights: Any = self.weights
        if not isinstance(weights, Mapping):
            raise CurriculumError(
                f"a mixture is a dict of weights by dataset name, such as {{'code': 1, 'web': 3}}; found {weights!r:.80}"
            )
        object.__setattr__(self, "weights", {str(k): _number(k, v, self.weights) for k, v in self.weights.items()})
        if not any(self.weights.values()):
            raise CurriculumError(f"a mixture needs at least one positive weight, found {_show(self.weights)}")

    @classmethod
    def of(cls, mixture: MixtureSpec | Mapping[str, float]) -> MixtureSpec:
        """The mixture itself, or one made of a plain mapping."""
        return mixture if isinstance(mixture, MixtureSpec) else cls(mixture)

    def validate_for(self, names: Iterable[str]) -> None:
        """Raise `CurriculumError` unless there is exactly one weight for each of `names`."""
        known = set(names)
        missing, unknown = sorted(known - set(self.weights)), sorted(set(self.weights) - known)
        if missing or unknown:
            parts = [f"no weight for {', '.join(map(repr, missing))}"] if missing else []
            parts += [f"no dataset named {', '.join(map(repr, unknown))}"] if unknown else []
            raise CurriculumError(
                f"the mixture does not match the datasets: {'; '.join(parts)} "
                f"(datasets: {', '.join(map(repr, sorted(known)))}; weights: {_show(self.weights)})"
            )

    def normalized_for(self, names: Iterable[str]) -> dict[str, float]:
        """Weights of `names` that add up to one, in the order of `names`."""
        listed = list(names)
        self.validate_for(listed)
        total = math.fsum(self.weights.values())
        return {name: self.weights[name] / total for name in listed}


def _number(name: object, value: object, weights: Mapping[str, float]) -> float:
    """A weight as a float, or an error that prints them all."""
    if isinstance(value, (bool, str)) or not isinstance(value, SupportsFloat):
        raise CurriculumError(f"the weight of {name!r} must be a number, found {value!r} (weights: {_show(weights)})")
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise CurriculumError(
            f"the weight of {name!r} is {number}; weights must be finite and not negative (weights: {_show(weights)})"
        )
    return number


def _show(weights: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{k!r}: {v}" for k, v in weights.items()) + "}"


def exact_shares(weights: Mapping[str, float]) -> tuple[dict[str, int], int]:
    """Numerators by name, and their sum, the common denominator. Positive weights only, in the order of their names.

    >>> exact_shares({"web": 0.75, "code": 0.25})
    ({'code': 1, 'web': 3}, 4)
    """
    positive = {name: Fraction(weights[name]) for name in sorted(weights) if weights[name] > 0}
    total = sum(positive.values(), Fraction(0))
    shares = {name: weight / total for name, weight in positive.items()}
    simple = {name: share.limit_denominator(_SIMPLE) for name, share in shares.items()}
    close = all(abs(simple[name] - share) <= _FLOAT_ERROR * share for name, share in shares.items())
    if close and sum(simple.values()) == 1:
        common = math.lcm(*(share.denominator for share in simple.values()))
        if common <= FINEST:
            return {name: int(share * common) for name, share in simple.items()}, common
    return _largest_remainder(shares), FINEST


def _largest_remainder(shares: Mapping[str, Fraction]) -> dict[str, int]:
    """Multiples of 1 / FINEST that add up to FINEST; each at least one, ties by name."""
    out = {name: max(1, math.floor(share * FINEST)) for name, share in shares.items()}
    missing = FINEST - sum(out.values())
    by_remainder = sorted(shares, key=lambda name: (out[name] - shares[name] * FINEST, name))
    for name in by_remainder[:missing] if missing > 0 else []:
        out[name] += 1
    heaviest = max(shares, key=lambda name: (shares[name], name))
    out[heaviest] += FINEST - sum(out.values())
    return out

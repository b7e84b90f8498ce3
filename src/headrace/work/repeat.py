"""What happens when a dataset has been handed out: the policies, resolved and checked.

    policy                      at the end of its data a dataset ...          the stream ends when ...
    "stop"                      ends the stream                               it is asked for a sample it has not got
    "repeat"                    begins its next pass                          never, or after 1 + max_repeats passes as "stop"
    "redistribute"              leaves; the others share its weight           every dataset has left
    (stop_after_passes=N)       begins its next pass                          each dataset has been through N passes

With neither a policy nor `max_repeats`, `stop_after_passes` is 1: everything is seen at least once, and the mixture holds
throughout, so a dataset that is small for its weight repeats. `statistics()` of the source shows how often.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from headrace.arguments import Unset, flag, whole_number
from headrace.errors import ConfigError, UnknownOptionError

Policy = Literal["stop", "repeat", "redistribute"]
POLICIES: Final = ("stop", "repeat", "redistribute")


@dataclass(frozen=True, slots=True)
class Repetition:
    """Resolved settings by dataset name. `max_repeats[name]` counts extra passes; None is no limit."""

    policy: Mapping[str, Policy]
    max_repeats: Mapping[str, int | None]
    reshuffle: Mapping[str, bool]
    stop_after_passes: int | None

    def passes(self, name: str) -> int | None:
        """Passes that a dataset may give in all, or None."""
        if self.policy[name] != "repeat":
            return 1
        extra = self.max_repeats[name]
        return None if extra is None else 1 + extra

    def ends_stream(self, name: str) -> bool:
        """Whether the stream ends when this dataset has reached its limit (else the others go on)."""
        return self.policy[name] != "redistribute"


def resolve_repetition(
    names: Sequence[str], policy: Any, max_repeats: Any, reshuffle: Any, stop_after_passes: Any
) -> Repetition:
    """Check every combination and fill in the defaults. `ConfigError` says which two settings exclude each other."""
    if isinstance(stop_after_passes, Unset):
        stop_after_passes = 1 if policy is None and max_repeats is None else None
    elif stop_after_passes is not None:
        stop_after_passes = whole_number("stop_after_passes (None is no limit)", stop_after_passes, 1)
        if max_repeats is not None:
            raise ConfigError("stop_after_passes and max_repeats both say when to end; give one of them")
    policies = _per_dataset("exhausted_policy", policy, names, "repeat")
    for name, value in policies.items():
        if value not in POLICIES:
            raise ConfigError(f"exhausted_policy of {name!r} must be one of {', '.join(POLICIES)}, found {value!r}")
        if stop_after_passes is not None and value != "repeat":
            raise ConfigError(
                f"stop_after_passes={stop_after_passes} needs every dataset to repeat, but {name!r} is set to {value!r}"
            )
    repeats = _per_dataset("max_repeats", max_repeats, names, None)
    for name, value in repeats.items():
        if value is not None:
            repeats[name] = whole_number(f"max_repeats of {name!r} (None is no limit)", value, 0)
    shuffles = _per_dataset("reshuffle_on_repeat", True if isinstance(reshuffle, Unset) else reshuffle, names, True)
    for name, value in shuffles.items():
        flag(f"reshuffle_on_repeat of {name!r}", value)
    _warn_without_effect(policies, max_repeats, reshuffle)
    return Repetition(policies, repeats, shuffles, stop_after_passes)


def _per_dataset(option: str, value: Any, names: Sequence[str], default: Any) -> dict[str, Any]:
    """One value for all, or a mapping by name in which the missing ones take the default."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, default if value is None else value)
    for name in value:
        if name not in names:
            raise UnknownOptionError(f"dataset in {option}", str(name), names)
    return {name: value.get(name, default) for name in names}


def _warn_without_effect(policies: Mapping[str, str], max_repeats: Any, reshuffle: Any) -> None:
    """Settings of repetition on datasets that never repeat."""
    for option, value in (("max_repeats", max_repeats), ("reshuffle_on_repeat", reshuffle)):
        if value is None or isinstance(value, Unset):
            continue
        given = [n for n in value if value[n] is not None] if isinstance(value, Mapping) else list(policies)
        idle = [name for name in given if policies[name] != "repeat"]
        if idle:
            warnings.warn(
                f"{option} has no effect on {', '.join(map(repr, idle))}: exhausted_policy does not let it repeat",
                UserWarning,
                stacklevel=5,
            )

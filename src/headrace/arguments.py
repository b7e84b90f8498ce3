"""Arguments and options, checked and made plain where they are given."""

from __future__ import annotations

import operator
from typing import Any, Final

from headrace.errors import ConfigError


class Unset:
    """Not given, where None has a meaning of its own ("never", "no limit")."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


def whole_number(where: str, value: Any, least: int | None = None) -> int:
    """`value` as an `int`, so that a numpy integer in a recipe can be written to a checkpoint.

    ConfigError for anything else (`"8"`, 2.5, True, None), or for one below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigError(f"{where} must be a whole number, found {value!r}")
    if least is not None and number < least:
        raise ConfigError(f"{where} must be at least {least}, found {number}")
    return number


def flag(where: str, value: Any) -> bool:
    """`value`, if it is True or False; ConfigError for what only counts as such ("no" counts as true)."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be True or False, found {value!r}")
    return value


def shown(value: Any) -> str:
    """What was found, for a message: its type, and the beginning of what it holds."""
    return f"a {type(value).__name__} ({value!r:.60})"

"""About how many bytes Python objects hold: for bounds on memory, which are looked at for every batch.

    >>> object_bytes({"image": bytes(1000)})
    1128

What says its size is believed (`len` of text and bytes, `nbytes` of arrays and tensors). Of a container a few elements are looked
at, six levels deep, and stand for the others. A small payload takes less than a microsecond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

OBJECT: Final = 64
"""Bytes of a Python object, whatever it is."""
FEW: Final = 4
"""Elements that are looked at."""
_FIELDS: Final = 64
"""The same of mappings, tuples and objects, whose elements are not alike."""
_DEEP: Final = 6

_FLAT: Final = frozenset((int, float, bool, complex, type(None)))
_LONG: Final = frozenset((str, bytes, bytearray))


def objects_bytes(values: Sequence[Any]) -> int:
    """Of all of these, going by a few that are spread over them."""
    return _of_many(values, len(values), FEW, _DEEP)


def object_bytes(value: Any, deep: int = _DEEP) -> int:
    """Of one object and what it holds."""
    return _of_many((value,), 1, 1, deep)


def _of_many(values: Collection[Any], count: int, most: int, deep: int) -> int:
    if count > most:
        values = list(values)[:: -(-count // most)]
    total = 0
    for value in values:
        kind = type(value)
        if kind in _LONG:
            total += len(value)
        elif kind not in _FLAT and deep:
            total += _held(value, kind, deep - 1)
    if count > most:
        total = total * count // len(values)
    return total + OBJECT * count


def _held(value: Any, kind: type, deep: int) -> int:
    """Of what is in a container or in an object's fields."""
    if kind is dict:
        return _of_many(value.values(), len(value), _FIELDS, deep)
    if kind is list:
        return _of_many(value, len(value), FEW, deep)
    if (said := _said(value)) is not None:
        return said
    if isinstance(value, Mapping):
        return _of_many(value.values(), len(value), _FIELDS, deep)
    if isinstance(value, tuple):
        return _of_many(value, len(value), _FIELDS, deep)
    if isinstance(value, (list, set, frozenset, deque)):
        return _of_many(value, len(value), FEW, deep)
    fields = list(getattr(value, "__dict__", {}).values())
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        fields += [getattr(value, name, None) for name in ((names,) if isinstance(names, str) else names)]
    return _of_many(fields, len(fields), _FIELDS, max(0, deep - 2))  # what it refers to may be no part of it


def _said(value: Any) -> int | None:
    try:
        said = getattr(value, "nbytes", None)
        if callable(said):
            said = said()
    except Exception:  # noqa: BLE001  a user's property; nothing depends on it but an estimate
        return None
    return said if isinstance(said, int) else None

"""Fields that an operator was given by name, looked for in the first records before a run.

A field that no record has is a slip of the pen, and would do nothing for the whole run; one that only some records have is legal.
So a look at the first records refuses an operator none of whose fields they have, and warns of a single one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from headrace.core.block import MISSING, Block, to_list
from headrace.core.tokens import HIDDEN
from headrace.errors import ConfigError


def look_for(method: str, names: Sequence[str], sample: Block | None) -> None:
    """ConfigError if no record of `sample` has any of `names`, a warning for one that none has. A dot path looks inside."""
    if sample is None or not all(isinstance(row, Mapping) for row in sample.rows or ()):
        return
    absent = [name for name in names if all(value is MISSING for value in to_list(sample.column(name)))]
    if not absent:
        return
    has = sorted(name for name in sample.as_columns() if name not in HIDDEN)
    near = [match for name in absent for match in get_close_matches(name, has, n=1)]
    message = (
        f"{method}: none of the first {len(sample)} records has {', '.join(map(repr, absent))}; they have "
        f"{', '.join(has[:20]) or 'no fields'}{f'; did you mean {near[0]!r}?' if near else ''}"
    )
    if len(absent) == len(names):
        raise ConfigError(message)
    warnings.warn(message, UserWarning, stacklevel=2)

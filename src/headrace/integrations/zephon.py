"""`install_as_zephon()`: programs written for `zephon` run on headrace as they stand, as `install_as_MySQLdb` does in its field.

    import headrace
    headrace.install_as_zephon()

    from zephon import Pipeline  # headrace's

The public modules are the same objects under both names. A name that headrace does not have fails at its import, and an
option that it does not have at its call, by name.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final

from headrace.errors import ConfigError

NAME: Final = "zephon"
MODULES: Final = ("", ".io", ".work", ".ops", ".types", ".options", ".pipeline", ".observability")


def install_as_zephon() -> None:
    """Register headrace's modules as `zephon` and its submodules. Again does no harm.

    ConfigError if the package of that name was imported before: objects of both would meet.
    """
    ours = {NAME + name: import_module("headrace" + name) for name in MODULES}
    for name, module in ours.items():
        if sys.modules.get(name, module) is not module:
            raise ConfigError(
                f"install_as_zephon(): {name} of another package was imported before; call it first, at the top of the program"
            )
    sys.modules.update(ours)

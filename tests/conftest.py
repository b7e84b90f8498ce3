"""Two ways to draw the cases of the laws.

`make test` draws the same cases on every machine and every run, so that a red run is a change's doing; `make test-all` draws
new ones every time (`HYPOTHESIS_PROFILE=random`), and prints what replays a failure.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("random", print_blob=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

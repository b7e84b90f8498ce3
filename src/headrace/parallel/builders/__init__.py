"""Builders: one schedule a file, each a function of counts that returns rows of actions.

`build(name, num_ranks, num_microbatches, **params)` is the one door. Builders import no torch and know no times.
"""

from __future__ import annotations

from headrace.parallel.builders.registry import Recipe, build, recipe, schedules

__all__ = ["Recipe", "build", "recipe", "schedules"]

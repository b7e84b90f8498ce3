"""The text of `Pipeline.explain()`."""

from __future__ import annotations

from headrace.steps.evidence import Verdict
from headrace.steps.settings import Settings
from headrace.steps.statistics import Statistics


def explain(settings: Settings, stats: Statistics, verdict: Verdict | None) -> str:
    """The plan, and what a run took, as lines for a person."""
    lines = [
        f"step pipeline, {settings.mode}, runner {settings.runner}, {'ordered' if settings.ordered else 'as finished'}"
    ]
    for steps, count in settings.groups:
        names = " > ".join(f"{step.name}{'*' if step.many else ''}" for step in steps)
        many = "auto: up to " if settings.auto else ""
        lines.append(f"  [{names}]  {many}{count} {'worker' if count == 1 else 'workers'}")
    if settings.auto:
        lines.append(f"  auto: {verdict if verdict is not None else 'not decided yet'}")
    policy = f"  on_error {settings.on_error}, max_retries {settings.max_retries}"
    lines.append(policy + (f", timeout {settings.timeout} s" if settings.timeout is not None else ""))
    if settings.assign is not None:
        lines.append("  items of one key stay with one worker")
    if settings.shuffle_buffer:
        lines.append(f"  outputs shuffled in a buffer of {settings.shuffle_buffer}, seed {settings.seed}")
    if stats.received:
        lines += _ran(stats)
    return "\n".join(lines)


def _ran(stats: Statistics) -> list[str]:
    lines = [
        f"  {stats.received} items in, {stats.finished} done, {stats.skipped} of them skipped, {stats.in_flight} under way, "
        f"{stats.delivered} outputs delivered"
    ]
    lines += [
        f"    {step.name:<24} {step.received:>10} in {step.produced:>10} out {step.seconds_per_item * 1e6:>12.2f} us each"
        for step in stats.steps
    ]
    workers = stats.workers
    lines.append(f"  batches of up to {', '.join(map(str, stats.batch_size)) or '?'} items, {workers.batches} sent")
    if workers.slab_hits or workers.slab_misses:
        lines.append(
            f"  large buffers: {workers.slab_hits} through shared memory, {workers.slab_misses} through sockets"
        )
    if workers.deaths:
        lines.append(f"  {workers.deaths} workers died, {workers.retries} items tried again")
    lines += [f"  error: {text}" for text in stats.errors]
    lines.append(f"  bottleneck: {stats.bottleneck}")
    return lines

"""From a chain of operators to stages: say it, build it, run it are three places, and this is the second.

Consecutive stateless operators fuse into one stage: a worker takes a block through all of them, so that nothing is handed
over in between. A stateful operator runs on the thread that drives the lane, in order. Light operators (views, column
selection) join whatever stage they stand in. Pure: no threads, files or clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from headrace.arguments import Unset
from headrace.core.op import Fields
from headrace.errors import ConfigError
from headrace.options import FLUSH_EVERY, OnError, RuntimeOptions

DEFAULT_PARALLELISM: Final = {
    "fetch": 4,
    "tokenize": 4,
    "tokenize_chat": 4,
    "map_transform": 4,
    "filter": 4,
    "map_block": 4,
    "map_batch": 4,
    "decode_text": 2,
}
"""Workers of an operator when the user names none; never more than the machine has processors."""

PLACEMENTS: Final = ("auto", "local", "process", "threads", "inline")
"""Where an operator may be placed: "auto" and "local" leave it to `runner`."""

LIGHT: Final = frozenset({"select", "materialize"})
"""Operators that cost less than handing a block to another thread."""

BLOCK_ROWS: Final = 256
MOST_BLOCK_ROWS: Final = 1024
READ_BYTES: Final = 4 << 20
"""Stored bytes of a block that workers only read."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operator of the chain, with what the user asked for."""

    op: Any
    parallelism: int | None = None
    placement: str = "auto"
    on_error: OnError | None = None

    @property
    def stateful(self) -> bool:
        """Whether it remembers."""
        return hasattr(self.op, "accumulator")

    @property
    def post_batch(self) -> bool:
        """Whether it works on finished batches."""
        return self.op.name == "map_batch"

    def workers(self, cpus: int) -> int:
        """Workers it wants."""
        if self.parallelism is not None:
            return self.parallelism
        return min(DEFAULT_PARALLELISM.get(self.op.name, 1), cpus)


@dataclass(frozen=True, slots=True)
class Stage:
    """Operators that run together. `workers` is 0 where they run on the driving thread."""

    nodes: tuple[Node, ...]
    runner: str
    workers: int
    window: int

    @property
    def pooled(self) -> bool:
        """Whether blocks are handed to workers."""
        return self.workers > 0

    @property
    def label(self) -> str:
        """Its operators."""
        return "+".join(node.op.name for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run."""

    stages: tuple[Stage, ...]
    fields: Fields
    micro_batch: int
    cut_every: int
    prefetch: int
    flush_every: int
    batched: bool
    allocation: str
    deterministic: bool

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every operator in order."""
        return tuple(node for stage in self.stages for node in stage.nodes)


def compile_plan(nodes: Sequence[Node], options: RuntimeOptions, cpus: int) -> Plan:
    """Check the chain and cut it into stages."""
    _check(nodes)
    if options.quarantine_path is None and any(node.on_error == "quarantine" for node in nodes):
        raise ConfigError("on_error='quarantine' needs options(quarantine_path=...), the JSONL file to write to")
    flush_every = _flush_every(nodes, options)
    if not flush_every and any(getattr(node.op, "carries", False) and node.op.reorders for node in nodes):
        raise ConfigError(
            "flush_every_k_chunks=None with a stateful_transform that does not keep the order: which records it has dropped would "
            "never be known; keep the flushes, or promise preserves_cursor_order=True"
        )
    limit = options.max_workers or max(1, min(cpus, 16))
    groups = _group(nodes, options)
    for stage, runner in options.per_stage_runner.items():
        groups = _with_runner(groups, stage, runner)
    workers = _allocate(groups, options, limit, cpus)
    stages = []
    for i, (group, runner) in enumerate(groups):
        window = options.per_stage_prefetch.get(i, options.default_stage_prefetch or 2 * workers[i] + 2)
        stages.append(Stage(tuple(group), runner, workers[i], window if workers[i] else 0))
    for stage, window in options.per_stage_prefetch.items():
        if stage >= len(stages) or not stages[stage].pooled:
            why = "there is no such stage" if stage >= len(stages) else "it has no workers, and so no queue"
            raise ConfigError(f"option per_stage_prefetch={{{stage}: {window}}}: {why}. {_listed(stages)}")
    total = max(1, sum(workers))
    return Plan(
        stages=tuple(stages),
        fields=projection(nodes),
        micro_batch=options.micro_batch or _block_rows(stages),
        cut_every=options.cut_every,
        prefetch=options.prefetch_batches or max(16, 4 * total),
        flush_every=flush_every,
        batched=any(node.op.name == "batch" for node in nodes),
        allocation=options.worker_allocation,
        deterministic=options.deterministic,
    )


def _block_rows(stages: Sequence[Stage]) -> int:
    """Rows in a block: more small ones where workers do nothing but read, since the way there and back is then what costs."""
    pooled = [stage for stage in stages if stage.pooled]
    if len(pooled) != 1 or any(node.op.name != "fetch" and node.op.name not in LIGHT for node in pooled[0].nodes):
        return BLOCK_ROWS
    row_bytes = int(stages[0].nodes[0].op.readers.row_bytes)
    return min(MOST_BLOCK_ROWS, max(BLOCK_ROWS, READ_BYTES // row_bytes)) if row_bytes else BLOCK_ROWS


def in_recipe(nodes: Sequence[Node]) -> dict[str, Node]:
    """Operators by the names they have in a checkpoint's recipe: number and name, of those that the user has put there."""
    named = [node for node in nodes if node.op.name not in ("fetch", "materialize")]
    return {f"{number}.{node.op.name}": node for number, node in enumerate(named)}


def projection(nodes: Sequence[Node]) -> Fields:
    """Top-level payload fields that any operator, or the consumer, can read. None means all."""
    wanted: Fields = None
    for node in reversed(nodes):
        wanted = node.op.needs(wanted)
    return wanted


def _check(nodes: Sequence[Node]) -> None:
    batched = packed = False
    for node in nodes:
        name = node.op.name
        if node.post_batch and not batched:
            raise ConfigError("map_batch() works on finished batches: call batch() before it, or use map_transform()")
        if batched and not node.post_batch:
            raise ConfigError(f"{name}() after batch(): only map_batch() may follow batch()")
        if packed and hasattr(node.op, "assemble"):
            raise ConfigError(f"{name}() after another packing operator: rows are packed already; keep one of the two")
        if packed and name == "ensure_mixture":
            raise ConfigError(
                "ensure_mixture() after a packing operator: a packed row mixes components; call it before packing"
            )
        packed = packed or hasattr(node.op, "assemble")
        batched = batched or name == "batch"


def _flush_every(nodes: Sequence[Node], options: RuntimeOptions) -> int:
    reorders = any(node.stateful and node.op.reorders for node in nodes)
    if not reorders:
        return 0
    every = options.flush_every_k_chunks
    return FLUSH_EVERY if isinstance(every, Unset) else every or 0


def _runner(node: Node, options: RuntimeOptions) -> str:
    if node.stateful or options.runner == "inline":
        return "inline"
    if node.op.name == "fetch":
        asked = options.runner is not None or node.parallelism is not None
        return "inline" if node.op.readers.at_hand and not asked else "threads"
    if node.post_batch:
        return "threads"
    if node.placement in ("process", "threads", "inline"):
        return node.placement
    return options.runner or "threads"


def _group(nodes: Sequence[Node], options: RuntimeOptions) -> list[tuple[list[Node], str]]:
    """Neighbours with the same runner, and no differing wish for workers, form a stage."""
    groups: list[tuple[list[Node], str]] = []
    for node in nodes:
        runner = _runner(node, options)
        if groups and _joins(node, runner, *groups[-1]):
            groups[-1][0].append(node)
        else:
            groups.append(([node], runner))
    return groups


def _joins(node: Node, runner: str, group: list[Node], group_runner: str) -> bool:
    if node.stateful or group[-1].stateful or node.post_batch != group[-1].post_batch:
        return False
    if node.op.name in LIGHT and node.placement == "auto":
        return True
    if runner != group_runner:
        return False
    asked = {n.parallelism for n in group if n.parallelism is not None}
    return not asked or node.parallelism is None or node.parallelism in asked


def _with_runner(groups: list[tuple[list[Node], str]], stage: int, runner: str) -> list[tuple[list[Node], str]]:
    """One stage elsewhere. Stages are cut before that and stay as they are, so that their numbers do."""
    asked = f"option per_stage_runner={{{stage}: {runner!r}}}"
    if stage >= len(groups):
        raise ConfigError(f"{asked}: there is no such stage. {_listed(groups)}")
    nodes, _ = groups[stage]
    if nodes[0].stateful and runner != "inline":
        raise ConfigError(
            f"{asked}: {nodes[0].op.name} remembers, so it runs inline, on the thread that drives the lane. {_listed(groups)}"
        )
    return [*groups[:stage], (nodes, runner), *groups[stage + 1 :]]


def _listed(stages: Sequence[Stage | tuple[list[Node], str]]) -> str:
    """The stages by number, as explain() shows them, for messages."""
    names = (
        "+".join(node.op.name for node in (stage.nodes if isinstance(stage, Stage) else stage[0])) for stage in stages
    )
    return "The stages are " + ", ".join(f"{i}: {name}" for i, name in enumerate(names))


def _allocate(groups: list[tuple[list[Node], str]], options: RuntimeOptions, limit: int, cpus: int) -> list[int]:
    wanted = [0 if runner == "inline" else max(n.workers(cpus) for n in group) for group, runner in groups]
    pooled = [i for i, w in enumerate(wanted) if w]
    match options.worker_allocation:
        case "per_stage_fixed":
            return [limit if w else 0 for w in wanted]
        case "global" | "autotune":
            return _share_out(wanted, pooled, limit)
        case _:
            bounded = options.max_workers is not None and sum(wanted) > options.max_workers
            return _share_out(wanted, pooled, limit) if bounded else wanted


def _share_out(wanted: list[int], pooled: list[int], limit: int) -> list[int]:
    """`limit` workers over the pooled stages: one each, then each next one to the stage that is furthest from its wish."""
    out = [1 if i in pooled else 0 for i in range(len(wanted))]
    for _ in range(limit - len(pooled) if pooled else 0):
        neediest = max(pooled, key=lambda i: wanted[i] / (out[i] + 1))
        out[neediest] += 1
    return out


def describe(plan: Plan) -> str:
    """The plan as `Pipeline.explain()` prints it."""
    lines = []
    for i, stage in enumerate(plan.stages):
        ops = ", ".join(f"'{_op_label(node, stage)}'" for node in stage.nodes)
        lines.append(f"Stage[{i}] runner={stage.runner} workers={stage.workers or 'driver'} ops=[{ops}]")
    lines += ["", "Execution Graph:", f"Allocation={plan.allocation} deterministic={plan.deterministic}"]
    for i, stage in enumerate(plan.stages):
        chain = " -> ".join(_op_label(node, stage) for node in stage.nodes)
        queue = f"[in_q={stage.window}]-> " if stage.pooled else ""
        last = i == len(plan.stages) - 1
        target = f"==[final_prefetch={plan.prefetch}]==> pipeline_end" if last else f"--> Stage[{i + 1}]"
        lines.append(f"Stage[{i}] {queue}{chain} {target}")
    return "\n".join(lines)


def _op_label(node: Node, stage: Stage) -> str:
    return f"{node.op.name}@p{stage.workers or 1}"


def with_fetch_fields(plan: Plan) -> Plan:
    """The plan with the projection handed to fetch."""
    first = plan.stages[0]
    fetch = replace(first.nodes[0], op=first.nodes[0].op.projected(plan.fields))
    return replace(plan, stages=(replace(first, nodes=(fetch, *first.nodes[1:])), *plan.stages[1:]))

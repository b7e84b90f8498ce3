"""`Pipeline`: what the user touches. It says what is to happen to the records of a curriculum; never how.

    pipeline = Pipeline(work_source).tokenize(tokenizer_id="gpt2", field="text").pack_flat(2049, algorithm="wrap").batch(8)
    for batch in pipeline:
        inputs = batch.to_training(return_labels=True)

Every builder method returns the pipeline itself. Iterating compiles the chain into stages, starts the workers, and delivers
batches (or single records, without `batch`) until the curriculum ends; iterating again starts from the beginning.
`checkpoint()` may be called at any time and costs the same after any number of batches. A batch counts once the loop has it. A
restored state waits until a batch has followed it, or the end was met: a run that cannot begin, or is closed before, leaves it.
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from headrace.builder import Chain
from headrace.core import checkpoint as ckpt
from headrace.core.accept import Target, passed_over, take_over
from headrace.core.bookmark import Bookmark, Start
from headrace.core.checkpoint import LaneState, Snapshot
from headrace.core.entries import from_entries, to_entries
from headrace.core.lanes import Topology
from headrace.core.part import split
from headrace.core.plan import Node, Plan, compile_plan, describe, in_recipe, with_fetch_fields
from headrace.custom.carry import carried
from headrace.errors import CheckpointError, CheckpointMismatch, ConfigError
from headrace.io.notes import Notes
from headrace.io.options import StoreOptions
from headrace.observe.summary import MTPQueueStats, PipelineSummary, summarize
from headrace.run.aggregate import Aggregation, Codec
from headrace.run.board import Board, open_board
from headrace.run.consumer import Consumer, Producer
from headrace.run.digest import DigestLog
from headrace.run.host import EngineSpec, HostedEngine
from headrace.run.iteration import CATCH_UP_S, PipelineIterator
from headrace.run.node_client import NodeEngine
from headrace.run.sample import sample_before
from headrace.run.uneven_plan import Ending, Run, launchers_store, plan_ending
from headrace.work import WorkSource

_log = logging.getLogger("headrace")


class Pipeline(Chain):
    """A chain of operators over a work source.

    >>> from headrace.io import Dataset, InMemoryShard
    >>> from headrace.work import MixtureSpec, StaticMixtureWorkSource
    >>> data = Dataset.from_dict("toy", {0: InMemoryShard([{"x": i} for i in range(5)])})
    >>> source = StaticMixtureWorkSource(datasets=[data], mixture=MixtureSpec({"toy": 1.0}))
    >>> [len(batch) for batch in Pipeline(source).batch(microbatch_size=2, drop_last=False)]
    [2, 2, 1]
    """

    def __init__(self, work_source: WorkSource) -> None:
        """Begin a chain with the implicit fetch."""
        super().__init__(work_source)
        self._iterator: weakref.ref[PipelineIterator] | None = None
        self._bookmark = Bookmark()
        self._part: tuple[int, int] | None = None
        self.restores = 0
        """Times that a state was restored."""
        self.elsewhere: Callable[[], str] | None = None
        """Says where else batches of this pipeline are delivered, if they are: a checkpoint taken here would not know of them."""
        self._summary: PipelineSummary | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The chain, the options and a restored state that waits; a run does not travel."""
        bookmark = self._bookmark.to_copy()
        return {**self.__dict__, "_iterator": None, "_bookmark": bookmark, "elsewhere": None, "_summary": None}

    def _changed(self) -> None:
        if self._running is not None:
            raise RuntimeError("the pipeline is being iterated: close its iterator before changing it")
        super()._changed()

    # -- compiling -----------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """Lanes of the run and this rank's place."""
        options = self._options
        lanes = options.lanes if options.canonical_replicas is not None else self._bookmark.lanes or options.lanes
        topology = Topology(lanes, options.groups, options.group, options.mapping_strategy)
        return topology if self._part is None else split(topology, *self._part)

    def _ready(self) -> tuple[Node, ...]:
        """The chain with tokenizers loaded and encoders settled on a sample of this corpus."""
        if self._prepared is None:
            nodes: list[Node] = [self._fetch]
            for node in self._nodes:
                if hasattr(node.op, "prepare"):
                    notes = Notes("encoders", StoreOptions.from_any(self._options.io_options))
                    packed = any(hasattr(before.op, "assemble") for before in nodes)  # rows that a sample cannot show
                    sample = None if packed else sample_before(nodes, self.work_source.lane(0, self.topology.lanes))
                    node = replace(node, op=node.op.prepare(sample, notes))
                if hasattr(node.op, "validation"):
                    node = replace(node, op=replace(node.op, validation=self._options.auto_validation))
                if hasattr(node.op, "on_error"):
                    node = replace(node, op=replace(node.op, on_error=node.on_error or self._options.on_error))
                if hasattr(node.op, "with_components"):
                    node = replace(node, op=node.op.with_components(self.work_source.component_ids()))
                nodes.append(node)
            self._fetch.op.readers.rest()  # a step pipeline's workers, if the sample needed them
            self._prepared = carried(nodes)
        return self._prepared

    def _plan(self, nodes: Sequence[Node]) -> Plan:
        return with_fetch_fields(compile_plan(nodes, self._options, _cpus()))

    def plan(self) -> Plan:
        """What will run."""
        return self._plan(self._ready())

    def explain(self) -> str:
        """The plan as text: stages, operators with their workers, queue sizes, and which encoder tokenizes and why."""
        plan = self.plan()
        lines = [describe(plan)]
        notes = [f"{node.op.name}: {node.op.summary()}" for node in plan.nodes if hasattr(node.op, "summary")]
        fields = "all" if plan.fields is None else ", ".join(sorted(plan.fields)) or "none"
        notes.append(f"fetch: decodes {fields} fields" if plan.fields is None else f"fetch: decodes {fields}")
        if plan.flush_every:
            notes.append(f"flush sentinel every {plan.flush_every} chunks")
        topology = self.topology
        notes.append(
            f"lanes: {len(topology.computed)} of {topology.lanes} computed by group {topology.group} of {topology.groups}"
        )
        if topology.overhead > 1:
            notes.append(
                f"{topology.groups} groups do not divide {topology.lanes} lanes: each group computes {topology.overhead:.1f} "
                "times what it delivers"
            )
        if self._summary is not None:
            settled = ", ".join(f"{stage} {n}" for stage, n in self._summary.workers.items())
            notes += ["", f"last run: {self._summary.bottleneck()}; workers: {settled or 'none'}"]
        return "\n".join([*lines, "", *notes])

    def recipe(self) -> dict[str, Any]:
        """Everything that decides the data, msgpack-able: what a checkpoint's fingerprint is made of."""
        return {
            "curriculum": self.work_source.recipe(),
            "operators": {name: op.describe() for name, op in self._operators().items()},
            "flush_every_k_chunks": self._plan(self._ready()).flush_every,
        }

    def _operators(self) -> dict[str, Any]:
        """Operators by the names they have in the recipe."""
        return {name: node.op for name, node in in_recipe(self._ready()).items()}

    # -- running -------------------------------------------------------------------------------------

    def __iter__(self) -> PipelineIterator:
        if self._running is not None:
            raise RuntimeError(
                "this pipeline is being iterated already; close that iterator first, or build another pipeline"
            )
        start = self._start()
        topology, position = start.topology, start.at.position
        if topology.overhead > 1 and not self._options.deterministic:
            raise ConfigError(
                f"deterministic=False with {topology.groups} groups over {topology.lanes} lanes: groups that compute the same lane "
                "would each have it in another order; choose canonical_replicas that the groups divide"
            )
        if not position:
            self._tell_if_ranks_are_not_told_apart()
        plan, recipe, digests = self.plan(), self.recipe(), None
        spec = EngineSpec(plan, self._options, topology, self.work_source, start.at.lanes, position)
        with ExitStack() as on_failure:
            if self._options.digest:
                digests = DigestLog(self._options.digest_path, topology, position, recipe, self._datasets)
                on_failure.callback(digests.close)
            producer = self._producer(spec)
            ending = self._ending(spec, producer)
            if start.apart and (self._options.share is not None or ending.rule != "keep"):
                raise CheckpointError(
                    "this checkpoint was saved with uneven='keep' after lanes had ended, and groups stand at different places: "
                    "continue with uneven='keep', without share"
                )
            iterator = PipelineIterator(
                Consumer(producer, spec.start, position, self._options.cut_every, ending, start.at.passed),
                recipe,
                self._remember,
                batched=plan.batched,
                digests=digests,
                whole=position == 0 and self._part is None,
                progress=self._options.progress,
            )
            on_failure.pop_all()
        self._iterator = weakref.ref(iterator)  # dropping the iterator ends the run
        return iterator

    def _tell_if_ranks_are_not_told_apart(self) -> None:
        options, launched = self._options, os.environ.get("WORLD_SIZE", "")
        if options.world_size == 1 and options.dp_degree is None and launched.isdecimal() and int(launched) > 1:
            _log.warning(
                "WORLD_SIZE is %s, and this pipeline was not given world_size and global_rank: every rank delivers the same "
                "batches. Set options(world_size=..., global_rank=...), or dp_degree=1 where that is what you want.",
                launched,
            )

    def _ending(self, spec: EngineSpec, producer: Producer) -> Ending:
        """How finite data end, and with whom that must be agreed."""
        options = self._options
        node = producer.messages if isinstance(producer, NodeEngine) else None
        run = Run(spec.plan, options, spec.topology, self.work_source, spec.position, spec.start, self._part, node)
        shared = (
            options.aggregate_dir is not None or options.aggregate_store is not None or launchers_store() is not None
        )
        return plan_ending(run, self._board if shared else None)

    def _producer(self, spec: EngineSpec) -> Producer:
        """The engine here, in a process of its own, or shared by the ranks of this node."""
        if self._options.share == "node":
            state = ckpt.assemble(self.recipe(), spec.topology.lanes, Snapshot(spec.position, spec.start))
            return NodeEngine(spec, state)
        return HostedEngine(spec) if self._options.mtp_mode else spec.build()

    @property
    def _running(self) -> PipelineIterator | None:
        iterator = None if self._iterator is None else self._iterator()
        return None if iterator is None or iterator.closed else iterator

    def _start(self) -> Start:
        if self._bookmark.waits:
            return Start.behind(self._marked(), self.topology)
        return Start(Snapshot(0, self._fresh(self.topology)), self.topology)

    def _fresh(self, topology: Topology) -> dict[int, LaneState]:
        source, lanes = self.work_source, topology.lanes
        return {lane: LaneState(0, 0, 0, 0, {0: source.lane(lane, lanes).state()}) for lane in topology.computed}

    def close(self) -> None:
        """End a running iteration: workers and threads are gone within two seconds. `checkpoint()` still works."""
        if (running := self._running) is not None:
            running.close()

    def _remember(self, run: PipelineIterator) -> None:
        """Keep what is asked for after a run has ended. One that has delivered nothing leaves the position as it was."""
        consumer = run.consumer
        if consumer.begun:
            self._bookmark = self._bookmark.moved(run.state(CATCH_UP_S))
        self._summary = summarize(consumer.producer.summary(), consumer.deliveries)

    # -- checkpoints ---------------------------------------------------------------------------------

    def checkpoint(self, *, as_bytes: bool = False) -> Any:
        """Where this rank's delivery stands: a dict of a few KB a lane (or bytes), to be stored with the model.

        Allowed at any time: before the first batch, between batches, after the last, twice in a row. It does not disturb the
        stream, and needs no other rank.

        With world_size > 1 and `aggregate_dir` or `aggregate_store` set it is a collective: every rank must call it, and each
        receives the state of all; see `headrace.run.aggregate`.
        """
        state = self._state()
        if self._options.aggregates:
            state = self._aggregation().gather(state)
        return ckpt.to_bytes(state) if as_bytes else state

    def _board(self) -> Board:
        """Where the ranks of this run leave messages for each other."""
        options = self._options
        if options.aggregate_dir is not None:
            return open_board(f"{str(options.aggregate_dir).rstrip('/')}/{options.run_id}", options.io_options)
        from headrace.integrations.torch_store import TorchStoreBoard

        return TorchStoreBoard(options.aggregate_store or "torch://", options.run_id, options.aggregate_timeout_s)

    def _aggregation(self) -> Aggregation:
        options = self._options
        codec = Codec(options.aggregate_serializer, options.aggregate_compressor)
        return Aggregation(
            self._board(), options.global_rank, options.world_size, timeout_s=options.aggregate_timeout_s, codec=codec
        )

    def _state(self) -> dict[str, Any]:
        if self.elsewhere is not None and (where := self.elsewhere()):
            raise CheckpointError(f"this pipeline cannot say how far delivery has got: {where}")
        if (running := self._running) is not None:
            if running.digests is not None:
                running.digests.flush()
            return running.state()
        if self._bookmark.state:
            return self._marked()
        topology = self.topology
        return ckpt.assemble(self.recipe(), topology.lanes, Snapshot(0, self._fresh(topology)))

    def _marked(self) -> dict[str, Any]:
        """The checkpoint at the bookmark, as one of the pipeline as it is now; an error where that has become another."""
        if self._bookmark.waits:
            return self._taken_over(self._bookmark.state, ())
        return self._bookmark.of(self.recipe(), self.topology.lanes)

    def state_dict(self) -> dict[str, bytes]:
        """`checkpoint()` as flat entries, one per lane, which `torch.distributed.checkpoint` stores and reshards as it is.

            dcp.save({"model": model, "data": pipeline}, checkpoint_id=path)  # on any number of ranks
            dcp.load({"model": model, "data": pipeline}, checkpoint_id=path)  # on any other number

        Give `options(canonical_replicas=...)` in both runs, so that lanes have the same names.
        """
        return to_entries(self._state())

    def load_state_dict(self, state_dict: dict[str, Any], *, accept: Collection[str] = ()) -> None:
        """Continue at the next iteration from `state_dict()` entries that cover the lanes of this rank."""
        state = from_entries(state_dict)
        lanes, asked = int(state["canonical_replicas"]), self.topology.lanes
        if lanes != asked and len(state["lanes"]) < lanes:
            raise CheckpointError(
                f"this run was saved with {lanes} lanes, and a pipeline of {asked} asked for its entries: set "
                f"options(canonical_replicas={lanes}) before state_dict() is called"
            )
        self.restore(state, accept=accept)

    def restore(self, state: Any, *, accept: Collection[str] = ()) -> None:
        """Continue from a checkpoint (or from those of several ranks, as a list) at the next iteration.

        CheckpointMismatch lists every difference between the checkpoint's recipe and this pipeline's. `accept` takes
        differences on purpose, by kind: "mixture", "datasets", "shards", "curriculum", "flush", or an operator's name; see
        `headrace.core.accept` for what that means. Another mixture needs the states of all ranks.
        """
        if self._running is not None:
            raise CheckpointError(
                "restore() while the pipeline is being iterated: it would not reach the running workers; close the iterator first"
            )
        states = state if isinstance(state, (list, tuple)) else [state]
        if not states:
            raise CheckpointError("restore([]): there is no checkpoint in the list")
        given = ckpt.merge([ckpt.from_any(s) for s in states])
        merged = self._taken_over(given, accept)
        topology = replace(self.topology, lanes=int(merged["canonical_replicas"]))
        ckpt.require_lanes(merged, topology.computed)
        self._bookmark = Bookmark(merged, waits=True, lanes=topology.lanes)
        self.restores += 1
        if note := passed_over(given, merged):
            _log.warning("restore(accept=%r): %s", set(accept), note)

    def rewind(self) -> None:
        """Forget a restored state that waits: the next iteration begins anew."""
        self._bookmark = self._bookmark.anew()

    def _taken_over(self, merged: dict[str, Any], accept: Collection[str]) -> dict[str, Any]:
        """A state as one of this pipeline. CheckpointMismatch for differences that are not accepted."""
        asked, lanes = self._options.canonical_replicas, merged["canonical_replicas"]
        if asked is not None and asked != lanes:
            raise CheckpointMismatch(
                [f"canonical_replicas: {lanes} -> {asked}"],
                f"The number of lanes is fixed for the life of a run: set options(canonical_replicas={lanes}), with as many "
                "ranks as you like.",
            )
        never = ""
        if any(getattr(node.op, "carries", False) for node in self._nodes):
            never = (
                "this is a pipeline with a stateful_transform: what its state makes of a changed run cannot be known; restore with "
                "the recipe that the checkpoint was taken with"
            )
        return take_over(merged, Target(self.recipe(), self.work_source, self._operators(), never), accept)

    # -- looking -------------------------------------------------------------------------------------

    def inflight_summary(self) -> dict[int, int]:
        """Chunks of each lane that were handed out and may still have records on their way to the loop."""
        running = self._running
        return {} if running is None else running.consumer.in_flight()

    def metrics_snapshot(self) -> PipelineSummary | None:
        """Counts and times of the running iteration, or of the last one; None before the first."""
        if (running := self._running) is not None:
            consumer = running.consumer
            return summarize(consumer.producer.summary(), consumer.deliveries)
        return self._summary

    def mtp_queue_stats(self) -> MTPQueueStats | None:
        """Finished batches that wait, with `mtp_mode`; None without, and before the first iteration."""
        summary = self.metrics_snapshot() if self._options.mtp_mode else None
        return None if summary is None else MTPQueueStats(summary.queue_depth, summary.queue_capacity)

    def to_torch_dataset(self, stateful: bool = True) -> Any:
        """A torch `IterableDataset` over this pipeline, for loaders that insist on one (`batch_size=None`).

        `stateful=False` leaves out `state_dict` and `load_state_dict`, so that no loader calls them.
        """
        from headrace.integrations.torch_data import PipelineDataset, StatefulPipelineDataset

        return StatefulPipelineDataset(self) if stateful else PipelineDataset(self)

    @property
    def starts_at(self) -> int:
        """Global position of the next iteration's first batch: 0, or that of a restored state that waits."""
        return self._bookmark.starts_at(self.topology.computed)

    def part(self, part: int, parts: int, *, anew: bool = False) -> Pipeline:
        """A copy for one of several loader workers: it delivers batches `part`, `part + parts`, ... of this rank, counted from
        the beginning of the run. It starts where this pipeline would, or from the beginning.
        """
        if self._options.share is not None:
            raise ConfigError(
                f"share={self._options.share!r} with loader workers: the engine is shared by ranks, not by their workers; use "
                "num_workers=0"
            )
        copied = copy.copy(self)
        copied._iterator, copied._part, copied.elsewhere = None, (part, parts), None
        copied._bookmark = self._bookmark.anew() if anew else self._bookmark.to_copy()
        log = self._options.digest_log and f"{self._options.digest_log}.{part}-{parts}"
        refused = self._options.quarantine_path
        if refused is not None and parts > 1:
            refused = f"{refused}.{part}-{parts}"
        copied._options = self._options.updated(mtp_mode=False, progress=False, digest_log=log, quarantine_path=refused)
        return copied


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

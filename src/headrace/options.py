"""Settings of a run, frozen and checked where they are born.

None of them changes the data (law 1), but for those that are part of the recipe by nature and say so: `canonical_replicas`,
`flush_every_k_chunks`, and what `on_error` does with a record that cannot be used.
"""

from __future__ import annotations

import logging
import math
import multiprocessing as mp
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from multiprocessing.context import BaseContext
from types import NoneType
from typing import Any, Final, Literal, get_args

from headrace.arguments import UNSET, Unset, flag, whole_number
from headrace.errors import ConfigError, UnknownOptionError

Runner = Literal["inline", "threads", "process"]
Allocation = Literal["fit_to_ops", "per_stage_fixed", "global", "autotune"]
OnError = Literal["raise", "skip", "quarantine"]
Mapping_ = Literal["interleaved", "contiguous"]
Validation = Literal["strict", "warn", "off"]
IpcTransport = Literal["socketpair", "pipe"]

_log = logging.getLogger("headrace")

FLUSH_EVERY: Final = 8
"""Chunks between flush sentinels where a pipeline reorders or regroups records and nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """Everything that `Pipeline.options()` takes.

    Execution
        runner: "threads" (default), "process" or "inline", for every stage. Where it is "process", fetch stays on threads.
            `per_stage_runner` for single stages, by the number that `explain()` shows; operators that remember run inline always.
        max_workers: upper bound on workers of all stages together; a stage that has workers has at least one. None means as many
            as `worker_allocation` says, of the processors of this machine, 1 to 16, where that needs a number.
        worker_allocation: "fit_to_ops" takes each operator's parallelism, "per_stage_fixed" gives each stage `max_workers` of its
            own, "global" divides `max_workers` over the stages, "autotune" moves workers while running.
        deterministic: False lets the first stage release blocks as they finish. A checkpoint then records that order.
        micro_batch: rows in a block that one worker takes at a time; None: 256, and up to 1024 small ones where workers only
            read.
        cut_every: samples of a lane between the points that a checkpoint can rest on. What a restore may have to run again,
            beside the records that operators held. Never changes the data, nor whether a checkpoint restores.
        prefetch_batches: finished batches prepared ahead; None derives it from the workers, and prepares more of small ones.
        prefetch_bytes: bound on the bytes of those batches. Of Python objects they are estimated, from a few rows of each batch.
        flush_every_k_chunks: not given means 8 where a pipeline reorders or regroups records; None or 0 means never.
        mp_context: how worker processes start. "forkserver": those of a stage are forks of one fresh process that has loaded the
            workers' program and nothing of yours (on Linux; elsewhere as with "spawn"). "spawn": each is a fresh process.
        max_worker_retries: how often the task of a worker that was killed is tried again.
        shm_enabled: False sends large arrays to and from worker processes through their sockets, which is slower, and not through
            shared memory.
        mtp_mode: the engine runs in a process of its own. `mtp_buffer` is the number of finished batches prepared ahead in it
            (None: as `prefetch_batches`), `mtp_buffer_bytes` the bound on their bytes (None: `prefetch_bytes`).
    Bad records
        on_error: "raise", "skip" or "quarantine". `max_errors` bounds the last two: a run that meets more refused records ends with
            a RecordError. Each run counts its own, on each rank in the lanes that it computes; those before a restored run's
            position were the run before's, and are neither counted nor logged again. `quarantine_path` is a JSONL file, to which
            each refused record is written once, whatever a restored run repeats.
        auto_validation: user functions are called twice on the first records of a run and must agree.
    Digests
        digest: a 128-bit digest of every delivered batch. `digest_log` is the file that they are appended to, for
            `headrace.verify`. `{rank}` in its name, and in `quarantine_path`, is replaced by the global rank.
    Topology
        world_size, global_rank, dp_degree, dp_group_id, canonical_replicas, mapping_strategy.
    Collective checkpoints (optional)
        aggregate_dir (a folder or object-store URL that all ranks see) or aggregate_store ("torch://", "torch://host:port"):
            `checkpoint()` then gathers on rank 0 and returns the state of all ranks on each. `run_id` keeps runs apart;
            aggregate_timeout_s, aggregate_serializer, aggregate_compressor.
        share: "node" runs one engine for all ranks of a node; `local_rank` and `local_world_size` say which of how many this
            one is, and come from LOCAL_RANK and LOCAL_WORLD_SIZE where they are not given.
        uneven: how finite data end when there are several groups: "drop" stops before the first step that not all groups can
            fill, "pad" fills steps with masked batches until all data are delivered, "keep" lets each group end where its own
            data end. None means "drop", and "keep" for a single group. `batches_per_step` is the number of batches of all groups
            together in an optimizer step, so that no step ends half filled; None means one batch a group.
    Accepted, and without effect (`Pipeline.options` warns where one is set to something else than its default)
        execution_tracking: counters are always on. mixture_config: the order in a chunk is the curriculum's.
        allow_latency_flush_in_deterministic: nothing waits for a time to pass.
        op_queue_capacity: operators of a stage hand over without a queue; see `per_stage_prefetch` for those between stages.
        shutdown_mode: closing always takes two seconds at most.
        ipc_transport, ipc_buffer_bytes, shm_min_item_bytes: the transport chooses by itself, by size.
        mtp_prefetch: what is read ahead is bounded by `mtp_buffer`. mtp_auto_checkpoint: `checkpoint()` always works after the end.
    """

    runner: Runner | None = None
    per_stage_runner: Mapping[int, Runner] = field(default_factory=dict)
    run_id: str = "default_run_id"
    mp_context: BaseContext | str = "forkserver"
    worker_allocation: Allocation = "fit_to_ops"
    max_workers: int | None = None
    deterministic: bool = True
    micro_batch: int | None = None
    cut_every: int = 1024
    prefetch_batches: int | None = None
    prefetch_bytes: int = 256 << 20
    default_stage_prefetch: int | None = None
    per_stage_prefetch: Mapping[int, int] = field(default_factory=dict)
    op_queue_capacity: int | None = None
    allow_latency_flush_in_deterministic: bool = True
    flush_every_k_chunks: int | Unset | None = UNSET
    shutdown_mode: Literal["graceful", "hard"] = "graceful"
    max_worker_retries: int = 3
    auto_validation: Validation = "strict"
    on_error: OnError = "raise"
    max_errors: int | None = None
    quarantine_path: str | None = None
    progress: bool = False
    mixture_config: Any = None
    # transport between processes
    ipc_transport: IpcTransport = "socketpair"
    ipc_buffer_bytes: int = 512 << 10
    shm_enabled: bool = True
    shm_min_item_bytes: int = 64 << 10
    # the engine in its own process
    mtp_mode: bool = False
    mtp_buffer: int | None = None
    mtp_buffer_bytes: int | None = None
    mtp_prefetch: int | None = None
    mtp_auto_checkpoint: bool = True
    # topology
    world_size: int = 1
    global_rank: int = 0
    dp_degree: int | None = None
    dp_group_id: int | None = None
    canonical_replicas: int | None = None
    mapping_strategy: Mapping_ = "interleaved"
    # one engine for the ranks of a node
    share: Literal["node"] | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    # the end of finite data
    uneven: Literal["drop", "pad", "keep"] | None = None
    batches_per_step: int | None = None
    # the documented collective form of checkpoint()
    aggregate_dir: str | None = None
    aggregate_store: str | None = None
    aggregate_timeout_s: float = 180.0
    aggregate_serializer: Literal["msgpack", "json"] = "msgpack"
    aggregate_compressor: Literal["zstd", "none"] = "zstd"
    # storage and observation
    io_options: Any = None
    execution_tracking: Any = None
    digest: bool = False
    digest_log: str | None = None
    metrics_sink_config: None = None

    def __post_init__(self) -> None:
        """Check every value; each message names the option, the value and what would do."""
        for name, choices in _CHOICES.items():
            _choice(f"option {name}", getattr(self, name), choices)
        for name, least in _AT_LEAST.items():
            if (value := getattr(self, name)) is not None or name in _NEEDED:
                object.__setattr__(self, name, whole_number(f"option {name}", value, least))
        for name in _FLAGS:
            flag(f"option {name}", getattr(self, name))
        for name in _TEXTS:
            if (value := getattr(self, name)) is not None or name in _NEEDED:
                object.__setattr__(self, name, _text(f"option {name}", value))
        self._check_stages()
        if not isinstance(every := self.flush_every_k_chunks, Unset) and every is not None:
            every = whole_number("option flush_every_k_chunks (None is never)", every, 0)
            object.__setattr__(self, "flush_every_k_chunks", every)
        if not isinstance(self.mp_context, BaseContext):
            _choice("option mp_context", self.mp_context, mp.get_all_start_methods())
        if self.start_method == "fork":
            raise ConfigError(
                "option mp_context='fork': forking a process that has threads deadlocks; use 'forkserver' or 'spawn'"
            )
        seconds: Any = self.aggregate_timeout_s
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise ConfigError(f"option aggregate_timeout_s={seconds!r}: give seconds above 0")
        if self.on_error == "quarantine" and self.quarantine_path is None:
            raise ConfigError("option on_error='quarantine' needs quarantine_path=..., the JSONL file to write to")
        self._check_ranks("quarantine_path")
        if self.aggregate_dir is not None and self.aggregate_store is not None:
            raise ConfigError(
                f"options aggregate_dir={self.aggregate_dir!r} and aggregate_store={self.aggregate_store!r}: give one of the two"
            )
        if self.aggregate_store is not None and not self.aggregate_store.startswith("torch://"):
            raise ConfigError(
                f"option aggregate_store={self.aggregate_store!r}: give 'torch://' or 'torch://host:port'"
            )
        if (sink := self.metrics_sink_config) is not None:
            raise ConfigError(
                f"option metrics_sink_config={sink!r:.80}: there are no sinks; read pipeline.metrics_snapshot()"
            )
        self._check_digest()
        self._check_topology()

    def _check_stages(self) -> None:
        """Options by the index of a stage."""
        for name in ("per_stage_runner", "per_stage_prefetch"):
            given: Any = getattr(self, name)
            if not isinstance(given, Mapping):
                raise ConfigError(f"option {name}={given!r}: give a dict from the index of a stage to its value")
            checked: dict[int, Any] = {}
            for stage, value in given.items():
                index, where = (
                    whole_number(f"option {name}: the index of a stage", stage, 0),
                    f"option {name}[{stage!r}]",
                )
                if name == "per_stage_runner":
                    _choice(where, value, get_args(Runner))
                    checked[index] = value
                else:
                    checked[index] = whole_number(where, value, 1)
            object.__setattr__(self, name, checked)

    def _check_digest(self) -> None:
        if self.digest_log is None:
            return
        if not self.digest:
            raise ConfigError(
                f"option digest_log={self.digest_log!r} without digest=True: nothing would be written to it"
            )
        self._check_ranks("digest_log")

    def _check_ranks(self, name: str) -> None:
        path = getattr(self, name)
        if path is not None and self.world_size > 1 and "{rank}" not in path:
            raise ConfigError(
                f"option {name}={path!r} with world_size={self.world_size}: every rank would write to one file; put {{rank}} in "
                "its name"
            )

    def _check_topology(self) -> None:
        if self.global_rank >= self.world_size:
            raise ConfigError(f"global_rank={self.global_rank} with world_size={self.world_size}: ranks count from 0")
        if self.dp_group_id is None and self.groups < self.world_size:
            raise ConfigError(
                f"dp_degree={self.dp_degree} with world_size={self.world_size}: several ranks share a group, so say which one "
                f"rank {self.global_rank} belongs to: dp_group_id=..., 0 to {self.groups - 1}"
            )
        if self.group >= self.groups:
            raise ConfigError(f"dp_group_id={self.group} with dp_degree={self.groups}: groups count from 0")
        if self.groups > self.world_size and self.world_size > 1:
            raise ConfigError(
                f"dp_degree={self.groups} is more than world_size={self.world_size}: no rank would be left"
            )

    @property
    def groups(self) -> int:
        """Data-parallel groups."""
        return self.world_size if self.dp_degree is None else self.dp_degree

    @property
    def group(self) -> int:
        """This rank's data-parallel group."""
        return self.global_rank if self.dp_group_id is None else self.dp_group_id

    @property
    def lanes(self) -> int:
        """Lanes of the whole run, fixed for its life."""
        return self.groups if self.canonical_replicas is None else self.canonical_replicas

    @property
    def quarantine_file(self) -> str | None:
        """This rank's quarantine file."""
        return None if self.quarantine_path is None else self.quarantine_path.replace("{rank}", str(self.global_rank))

    @property
    def digest_path(self) -> str | None:
        """This rank's digest log."""
        return None if self.digest_log is None else self.digest_log.replace("{rank}", str(self.global_rank))

    @property
    def aggregates(self) -> bool:
        """Whether `checkpoint()` is a collective of all ranks."""
        return self.world_size > 1 and (self.aggregate_dir is not None or self.aggregate_store is not None)

    @property
    def start_method(self) -> str:
        """How worker processes start."""
        if isinstance(self.mp_context, str):
            return self.mp_context
        return str(self.mp_context.get_start_method())

    def updated(self, **hints: Any) -> RuntimeOptions:
        """The same options with some replaced. UnknownOptionError for a name nobody knows."""
        known = {f.name for f in fields(self)}
        for name in hints:
            if name not in known:
                raise UnknownOptionError("option", name, known)
        changed = replace(self, **hints)
        if idle := [name for name in hints if name in _WITHOUT_EFFECT and getattr(changed, name) != _DEFAULTS[name]]:
            _log.warning("accepted, and without effect: options(%s)", ", ".join(f"{n}={hints[n]!r:.80}" for n in idle))
        return changed


_CHOICES: Final[dict[str, tuple[Any, ...]]] = {
    "runner": (None, *get_args(Runner)),
    "worker_allocation": get_args(Allocation),
    "shutdown_mode": ("graceful", "hard"),
    "auto_validation": get_args(Validation),
    "on_error": get_args(OnError),
    "ipc_transport": get_args(IpcTransport),
    "mapping_strategy": get_args(Mapping_),
    "share": (None, "node"),
    "uneven": (None, "drop", "pad", "keep"),
    "aggregate_serializer": ("msgpack", "json"),
    "aggregate_compressor": ("zstd", "none"),
}
_AT_LEAST: Final = {
    "max_workers": 1,
    "micro_batch": 1,
    "cut_every": 1,
    "prefetch_batches": 1,
    "prefetch_bytes": 1,
    "default_stage_prefetch": 1,
    "op_queue_capacity": 1,
    "max_worker_retries": 0,
    "max_errors": 0,
    "ipc_buffer_bytes": 4096,
    "shm_min_item_bytes": 0,
    "mtp_buffer": 1,
    "mtp_buffer_bytes": 1,
    "mtp_prefetch": 0,
    "world_size": 1,
    "global_rank": 0,
    "dp_degree": 1,
    "dp_group_id": 0,
    "canonical_replicas": 1,
    "local_rank": 0,
    "local_world_size": 1,
    "batches_per_step": 1,
}
_WITHOUT_EFFECT: Final = frozenset(
    {
        "execution_tracking",
        "mixture_config",
        "allow_latency_flush_in_deterministic",
        "op_queue_capacity",
        "shutdown_mode",
    }
    | {"ipc_transport", "ipc_buffer_bytes", "shm_min_item_bytes", "mtp_prefetch", "mtp_auto_checkpoint"}
)
_FLAGS: Final = (
    "deterministic",
    "progress",
    "digest",
    "mtp_mode",
    "mtp_auto_checkpoint",
    "shm_enabled",
    "allow_latency_flush_in_deterministic",
)
_TEXTS: Final = ("run_id", "quarantine_path", "aggregate_dir", "aggregate_store", "digest_log")
_NEEDED: Final = frozenset(
    {"cut_every", "prefetch_bytes", "max_worker_retries", "ipc_buffer_bytes", "shm_min_item_bytes"}
    | {"world_size", "global_rank", "run_id"}
)
"""Options for which None means nothing."""
_DEFAULTS: Final = {f.name: f.default for f in fields(RuntimeOptions)}


def _choice(where: str, value: Any, choices: Sequence[Any]) -> None:
    if not isinstance(value, (str, NoneType)) or value not in choices:
        allowed = ", ".join(repr(c) for c in choices if c is not None)
        raise ConfigError(f"{where}={value!r}: choose one of {allowed}")


def _text(where: str, value: Any) -> str:
    """A name or path, as `str`."""
    try:
        text = os.fspath(value)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{where}={value!r}: give a string that is not empty")
    return text

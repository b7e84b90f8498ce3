"""The chain of operators of a pipeline, as a user builds it: every method adds one and returns the pipeline itself.

Arguments are checked here, where they are given; the operators check what is theirs when they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, Self, TypeVar, get_args

from headrace.arguments import flag, shown, whole_number
from headrace.core.plan import PLACEMENTS, Node
from headrace.errors import ConfigError, UnknownOptionError
from headrace.io.options import StoreOptions
from headrace.ops.batch import Batch
from headrace.ops.fetch import Fetch, SharedReaders
from headrace.ops.map import Filter, MapBatch, MapBlock, MapTransform, Materialize, Select, require_callable
from headrace.ops.mixture import EnsureMixture
from headrace.ops.pack.flat import PackFlat
from headrace.ops.shuffle import Shuffle
from headrace.ops.tokenize import Tokenize
from headrace.options import OnError, RuntimeOptions
from headrace.work import MixtureSpec, WorkSource


class Chain:
    """Operators over a work source, in order, and the options of a run."""

    def __init__(self, work_source: WorkSource) -> None:
        """Begin with the implicit fetch."""
        given: Any = work_source
        if not isinstance(given, WorkSource):
            raise ConfigError(
                f"Pipeline() takes a work source, found {shown(given)}; for datasets write "
                "Pipeline(StaticMixtureWorkSource(datasets=[...], mixture={name: weight}))"
            )
        self.work_source = work_source
        self._datasets = dict(work_source.datasets_by_id)
        self._options = RuntimeOptions()
        self._fetch = Node(Fetch(SharedReaders(self._datasets)))
        self._nodes: list[Node] = []
        self._prepared: tuple[Node, ...] | None = None

    def __repr__(self) -> str:
        chain = " -> ".join(node.op.name for node in (self._fetch, *self._nodes))
        return f"<Pipeline over {self.work_source!r}: {chain}>"

    def _add(
        self, op: Any, parallelism: int | None = None, placement: str = "auto", on_error: OnError | None = None
    ) -> Self:
        if placement not in PLACEMENTS:
            raise ConfigError(f"{op.name}(placement={placement!r}): choose one of {', '.join(map(repr, PLACEMENTS))}")
        if on_error is not None and on_error not in get_args(OnError):
            raise ConfigError(
                f"{op.name}(on_error={on_error!r}): choose one of {', '.join(map(repr, get_args(OnError)))}"
            )
        parallelism = _workers(f"{op.name}: parallelism", parallelism)
        self._changed()
        self._nodes.append(Node(op, parallelism, placement, on_error))
        return self

    def _changed(self) -> None:
        """The chain is about to become another."""
        self._prepared = None

    def fetch_parallelism(self, parallelism: int | None, max_batch: int | None = None) -> Self:
        """Workers of the implicit fetch, and rows in the blocks that workers take at a time."""
        return self.fetch(parallelism, max_batch)

    def fetch(self, parallelism: int | None = None, max_batch: int | None = None) -> Self:
        """Configure the implicit fetch; None leaves a setting as it is by default."""
        parallelism = _workers("fetch: parallelism", parallelism)
        max_batch = _workers("fetch: max_batch", max_batch)
        self._changed()
        self._fetch = Node(self._fetch.op, parallelism, self._fetch.placement, self._fetch.on_error)
        if max_batch is not None:
            self._options = self._options.updated(micro_batch=max_batch)
        return self

    def select(self, *fields: str) -> Self:
        """Keep only these payload fields. Fields that nothing downstream reads are not even decoded.

        ConfigError before the run if none of the first records has any of them; a warning for one that none of them has.
        """
        return self._add(Select(fields))

    def decode_text(
        self,
        parallelism: int | None = None,
        *,
        placement: str = "auto",
        on_error: OnError | None = None,
        **settings: Any,
    ) -> Self:
        """Bytes to text: `fields=("text",)`, `encoding`, `errors`, `normalize_newlines`, `lowercase`."""
        from headrace.ops.decode import DecodeText

        return self._add(_make(DecodeText, "decode_text", settings), parallelism, placement, on_error)

    def map_transform(
        self,
        fn: Callable[[Any], Any],
        *,
        drop_none: bool = True,
        placement: str = "auto",
        parallelism: int | None = None,
        on_error: OnError | None = None,
    ) -> Self:
        """`fn(payload) -> payload`, one record at a time; None drops the record."""
        require_callable(fn, "map_transform")
        op = MapTransform(fn, flag("map_transform: drop_none", drop_none), self._options.auto_validation)
        return self._add(op, parallelism, placement, on_error)

    def map_block(
        self,
        fn: Callable[[dict[str, Any]], Any],
        *,
        reads: Iterable[str] | None = None,
        placement: str = "auto",
        parallelism: int | None = None,
    ) -> Self:
        """`fn(columns) -> columns`: the vectorised form of `map_transform`; see `headrace.ops.map.MapBlock`."""
        require_callable(fn, "map_block")
        names = None if reads is None else frozenset([reads] if isinstance(reads, str) else reads)
        op = MapBlock(fn, names, self._options.auto_validation)
        return self._add(op, parallelism, placement)

    def filter(
        self,
        predicate: Callable[[Any], Any],
        *,
        placement: str = "auto",
        parallelism: int | None = None,
        on_error: OnError | None = None,
    ) -> Self:
        """Keep the records for which `predicate(payload)` is true; the others are counted as dropped."""
        require_callable(predicate, "filter")
        return self._add(Filter(predicate), parallelism, placement, on_error)

    def tokenize(
        self,
        tokenizer: Any = None,
        tokenizer_id: Any = None,
        *,
        placement: str = "auto",
        parallelism: int | None = None,
        on_error: OnError | None = None,
        **settings: Any,
    ) -> Self:
        """Text to token ids; every setting is a field of `headrace.ops.tokenize.Tokenize`."""
        return self._add(
            _make(Tokenize, "tokenize", settings, tokenizer, tokenizer_id), parallelism, placement, on_error
        )

    def stateful_transform(
        self, name: str, *, placement: str = "auto", parallelism: int | None = 1, **settings: Any
    ) -> Self:
        """Functions over a state that sees every record of a lane in order: `init_state`, `push`, `flush`, ...; see
        `headrace.custom.stateful`. Records that never leave are counted as dropped."""
        from headrace.custom.stateful import StatefulTransform

        for needed in ("init_state", "push"):
            if needed not in settings:
                raise ConfigError(f"stateful_transform({name!r}) needs {needed}=, a function")
        op = _make(StatefulTransform, "stateful_transform", settings, name)
        return self._add(op, parallelism, placement, op.on_error)

    def add_op(
        self,
        op: Any,
        /,
        *,
        name: str | None = None,
        process_many: Callable[[Any], Any] | None = None,
        preserves_cursor_order: bool = True,
        parallelism: int | None = None,
        placement: str = "auto",
        on_error: OnError | None = None,
        **settings: Any,
    ) -> Self:
        """An operator of one's own on whole records: a name and `process_many(records) -> records`, or an object that has
        such a method (and `setup()`, called once in each worker). See `headrace.custom.stateless`."""
        from headrace.custom.stateless import instance_op, record_op, refuse_accumulator

        refuse_accumulator(op if isinstance(op, str) else type(op).__name__, list(settings))
        for unknown in settings:
            raise UnknownOptionError(
                "argument of add_op()", unknown, ("name", "process_many", "parallelism", "placement", "on_error")
            )
        if not preserves_cursor_order:
            raise ConfigError(
                "add_op(preserves_cursor_order=False): an operator that reorders remembers; see stateful_transform"
            )
        if not isinstance(op, str):
            return self._add(instance_op(op, name, on_error), parallelism, placement, on_error)
        if process_many is None:
            raise ConfigError(f"add_op({op!r}) needs process_many=, a function from records to records")
        return self._add(record_op(op, process_many, on_error), parallelism, placement, on_error)

    def tokenize_chat(
        self,
        tokenizer: Any = None,
        tokenizer_id: Any = None,
        *,
        placement: str = "auto",
        parallelism: int | None = None,
        on_error: OnError | None = None,
        **settings: Any,
    ) -> Self:
        """Conversations to token ids and a mask of what is trained on; settings are fields of
        `headrace.ops.chat.tokenize.TokenizeChat`."""
        from headrace.ops.chat.tokenize import TokenizeChat

        return self._add(
            _make(TokenizeChat, "tokenize_chat", settings, tokenizer, tokenizer_id), parallelism, placement, on_error
        )

    def expand_chat(
        self,
        *,
        field: str = "messages",
        placement: str = "auto",
        parallelism: int | None = None,
        on_error: OnError | None = None,
    ) -> Self:
        """One record for each answered turn of a conversation: all of it up to that answer."""
        from headrace.ops.chat.expand import ExpandChat

        return self._add(ExpandChat(field), parallelism, placement, on_error)

    def shuffle(self, buffer_size: int | None = None, **settings: Any) -> Self:
        """Reorder records through a buffer (8192 by default); settings are fields of `headrace.ops.shuffle.Shuffle`."""
        placement, parallelism = settings.pop("placement", "auto"), settings.pop("parallelism", None)
        return self._add(
            _make(Shuffle, "shuffle", settings, 8192 if buffer_size is None else buffer_size), parallelism, placement
        )

    def ensure_mixture(self, *, mixture: MixtureSpec | Mapping[str, float] | None = None, **settings: Any) -> Self:
        """Let components leave in proportion to the mixture, by tokens unless told otherwise, whatever filters took away.

        `mixture` stands in for the work source's; settings are fields of `headrace.ops.mixture.EnsureMixture`.
        """
        placement, parallelism = settings.pop("placement", "auto"), settings.pop("parallelism", None)
        given = getattr(self.work_source, "mixture", None) if mixture is None else mixture
        if given is None:
            raise ConfigError(
                f"ensure_mixture(): {self.work_source!r} has no mixture of its own; give mixture={{name: weight}}"
            )
        targets = tuple(sorted(MixtureSpec.of(given).weights.items()))
        op = _make(EnsureMixture, "ensure_mixture", settings, targets)
        return self._add(op, parallelism, placement, op.on_error)

    def pack_flat(self, max_length: int, **settings: Any) -> Self:
        """Rows of exactly `max_length` tokens; settings are fields of `headrace.ops.pack.flat.PackFlat`."""
        placement, parallelism = settings.pop("placement", "auto"), settings.pop("parallelism", None)
        op = _make(PackFlat, "pack_flat", settings, max_length)
        return self._add(op, parallelism, placement, op.on_error)

    def materialize(self, placement: str = "auto", parallelism: int | None = None) -> Self:
        """Pass records on unchanged: a place for a stage boundary."""
        return self._add(Materialize(), parallelism, placement)

    def batch(self, microbatch_size: int, *, drop_last: bool = True, placement: str = "auto") -> Self:
        """Group rows of a lane into `SampleBatch` objects of `microbatch_size` rows."""
        return self._add(Batch(microbatch_size, drop_last), None, placement)

    def map_batch(
        self,
        fn: Callable[[Any], Any],
        *,
        drop_none: bool = True,
        placement: str = "auto",
        parallelism: int | None = None,
    ) -> Self:
        """`fn(SampleBatch) -> anything`; None drops the batch. The result is what the loop receives."""
        require_callable(fn, "map_batch")
        return self._add(MapBatch(fn, flag("map_batch: drop_none", drop_none)), parallelism, placement)

    def options(self, **hints: Any) -> Self:
        """Set runtime options by name; see `headrace.options.RuntimeOptions`."""
        if hints.get("io_options") is not None:
            hints["io_options"] = StoreOptions.from_any(hints["io_options"])
        updated = self._options.updated(**hints)
        self._changed()
        self._options = updated
        if "io_options" in hints:
            self._fetch = Node(Fetch(SharedReaders(self._datasets, hints["io_options"])), self._fetch.parallelism)
        return self


Op = TypeVar("Op")


def _make(kind: Callable[..., Op], method: str, settings: dict[str, Any], *given: Any) -> Op:
    """An operator from a method's keyword arguments; a name that it does not have is refused with the nearest it has."""
    known = {field.name for field in fields(kind) if field.init and not field.name.startswith("_")}  # type: ignore[arg-type]
    for name in settings:
        if name not in known:
            raise UnknownOptionError(f"argument of {method}()", name, known)
    return kind(*given, **settings)


def _workers(where: str, value: Any) -> int | None:
    """A number of at least one, or None for the default."""
    return None if value is None else whole_number(f"{where} (None is the default)", value, 1)

"""The log of digests, appended to while a run delivers: two kinds of lines, both JSON.

    {"headrace_digests": 1, "recipe": .., "lanes": 4, "groups": 2, "group": 0, "position": 0, "datasets": {"0": "web"}, ..}
    {"j": [0, 2, ..], "lane": [0, 2, ..], "rows": [8, 8, ..], "digests": "..", "samples": "..", .., "lane_digests": {"0": "9f.."}}

A run, and every resumed leg of it, begins with a line of the first kind: where it stands. A line of the second kind holds up to
`GROUP` batches: what does not touch a batch's values is put off and done for a group at once, which is several times faster. `j` is
the global number of a batch, so lines of several ranks and legs are one stream, whatever the topology; `samples` and `marks` let
`headrace.verify.diff` name the sample that differs. Lines are written with every checkpoint and at the end as well, so a run that
continues from a checkpoint leaves no gap; one that is killed loses its last second.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
import xxhash

from headrace.core.block import DATASET, ROW, Block, Ints
from headrace.core.digest import BatchDigest, RollingDigest, digest_block, digest_value, row_marks
from headrace.core.lanes import Topology
from headrace.core.message import Item

FORMAT: Final = 1
GROUP: Final = 256
LATE_S: Final = 1.0
"""Seconds that a batch waits to be written, at most, as long as others follow."""

_json = msgspec.json.Encoder()


class Leg(msgspec.Struct, kw_only=True):
    """The first line of a run, or of a resumed part of it."""

    headrace_digests: int = FORMAT
    recipe: str
    lanes: int
    groups: int
    group: int
    mapping: str
    position: int
    datasets: dict[str, str]


class Group(msgspec.Struct, kw_only=True):
    """Batches in the order of delivery. Bytes are base64 in the file.

    j, lane, rows: of each batch. digests: 16 bytes each. samples: dataset, shard and row of every segment of all batches, uint32
    (int64 if `wide`); `segments` of them in each batch, and, for packed rows, `row_segments` (uint32) in each row. marks: uint64 of
    every row of the batches that have marks (`marked` counts them). lane_digests, stream_digest: rolling, since the leg began.
    """

    j: list[int]
    lane: list[int]
    rows: list[int]
    digests: bytes
    wide: bool
    samples: bytes
    segments: list[int]
    row_segments: bytes
    packed: list[bool]
    marks: bytes
    marked: list[int]
    lane_digests: dict[str, str]
    stream_digest: str


class DigestLog:
    """Digests what one rank delivers, and writes it to a file if there is one."""

    def __init__(
        self, path: str | None, topology: Topology, position: int, recipe: Any, datasets: Mapping[int, Any]
    ) -> None:
        """Begin a leg at global position `position`."""
        self._rolling = RollingDigest()
        self._topology = topology
        self._waiting: deque[tuple[int, int, BatchDigest]] = deque()  # position, lane
        self._flushed = time.monotonic()
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab")  # noqa: SIM115  lives as long as the run
            leg = Leg(
                recipe=xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(recipe)),
                lanes=topology.lanes,
                groups=topology.groups,
                group=topology.group,
                mapping=topology.mapping,
                position=position,
                datasets={str(i): dataset.name for i, dataset in datasets.items()},
            )
            lead = b"" if self._file.tell() == 0 or _ends_line(path) else b"\n"  # a killed run may leave half a line
            self._file.write(lead + _json.encode(leg) + b"\n")
            self._file.flush()

    def add(self, message: Block | Item, position: int) -> None:
        """Count a batch; `position` is the rank's after it."""
        found = digest_block(message) if isinstance(message, Block) else digest_value(message.value, message.origin)
        self._waiting.append((position, message.lane, found))
        if len(self._waiting) >= GROUP or time.monotonic() - self._flushed > LATE_S:
            self.flush()

    @property
    def rolling(self) -> RollingDigest:
        """Everything since the leg began."""
        self.flush()
        return self._rolling

    def flush(self) -> None:
        """Add up and write out what waits; any thread may call it."""
        with self._lock:
            self._flushed = time.monotonic()
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if waiting:
                self._write(waiting)

    def _write(self, waiting: Sequence[tuple[int, int, BatchDigest]]) -> None:
        positions, lanes, found = zip(*waiting, strict=True)
        numbers = [last_number(self._topology, position) for position in positions]
        digests = [batch.digest for batch in found]
        self._rolling.extend(numbers, lanes, digests)
        if self._file is not None:
            self._file.write(_json.encode(_group(numbers, lanes, digests, found, self._rolling)) + b"\n")
            self._file.flush()

    def close(self) -> None:
        """End the leg."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def _group(
    numbers: Sequence[int],
    lanes: Sequence[int],
    digests: Sequence[bytes],
    found: Sequence[BatchDigest],
    rolling: RollingDigest,
) -> Group:
    origins = [batch.origin for batch in found]
    rows = [len(origin.ids) if origin.rows is None else len(origin.rows) - 1 for origin in origins]
    ids = [origin.ids for origin in origins]
    samples = np.concatenate(ids)[:, DATASET : ROW + 1]
    wide = bool(samples.size) and int(samples.view(np.uint64).max()) >= 1 << 32  # or negative
    return Group(
        j=list(numbers),
        lane=list(lanes),
        rows=rows,
        digests=b"".join(digests),
        wide=wide,
        samples=samples.astype("<i8" if wide else "<u4").tobytes(),
        segments=list(map(len, ids)),
        row_segments=_row_segments([origin.rows for origin in origins if origin.rows is not None]),
        packed=[origin.rows is not None for origin in origins],
        marks=row_marks(found).tobytes(),
        marked=[n if batch.rows and batch.rows.header else 0 for n, batch in zip(rows, found, strict=True)],
        lane_digests={str(lane): f"{value:032x}" for lane, value in sorted(rolling.lanes.items())},
        stream_digest=f"{rolling.total:032x}",
    )


def _row_segments(ends: Sequence[Ints]) -> bytes:
    """Segments in each row of packed batches, from where the rows of each batch begin and end."""
    if not ends:
        return b""
    together = np.concatenate(ends)
    inside = np.ones(len(together), bool)
    inside[np.cumsum([0, *map(len, ends[:-1])])] = False  # the first of each batch ends no row
    return (together[1:] - together[:-1])[inside[1:]].astype("<u4").tobytes()


def last_number(topology: Topology, position: int) -> int:
    """Global number of the batch that brought a rank to `position`."""
    groups = topology.rank_groups
    if topology.mapping == "contiguous":
        block, done = topology.lanes // groups, position // groups - 1
        return done // block * topology.lanes + topology.group * block + done % block
    return position - groups + (topology.group - position) % groups


def _ends_line(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"

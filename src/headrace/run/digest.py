"""The log of digests: one line of JSON per delivered batch, appended.

    {"headrace_digests": 1, "recipe": ..., "lanes": 4, "groups": 2, "group": 0, "position": 0, "datasets": {"0": "web"}}
    {"j": 0, "lane": 0, "rows": 8, "digest": "9f..", "lane_digest": "9f..", "samples": "..", "marks": ".."}

A run, and every resumed leg of it, begins with a line that says where it stands. `j` is the batch's global number, so lines of
several ranks and legs are one stream, whatever the topology. `samples` (base64 of uint32 dataset, shard, row of each segment) and
`marks` (uint32 per row) let `headrace.verify.diff` name the sample that differs. Lines are written out every `FLUSH_EVERY` batches,
with every checkpoint, and at the end, so a run that continues from a checkpoint leaves no gap.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import xxhash

from headrace.core.block import Block
from headrace.core.digest import RollingDigest, digest_block, digest_value
from headrace.core.lanes import Topology
from headrace.core.message import Item

FORMAT: Final = 1
FLUSH_EVERY: Final = 64

_log = logging.getLogger("headrace")
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


class Line(msgspec.Struct, kw_only=True):
    """One batch. `samples` and `segments` are None or arrays as bytes; `wide` says int64 instead of uint32."""

    j: int
    lane: int
    rows: int
    digest: str
    lane_digest: str
    samples: bytes = b""
    segments: bytes | None = None
    marks: bytes = b""
    wide: bool = False


class DigestLog:
    """Digests what one rank delivers, and writes it to a file if there is one."""

    def __init__(
        self, path: str | None, topology: Topology, position: int, recipe: Any, datasets: Mapping[int, Any]
    ) -> None:
        """Begin a leg at global position `position`."""
        self.rolling = RollingDigest()
        self._topology = topology
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
        number = last_number(self._topology, position)
        found = digest_block(message) if isinstance(message, Block) else digest_value(message.value, message.origin)
        rolling = self.rolling.add(number, message.lane, found.digest)
        if self._file is None:
            return
        samples = found.samples
        wide = bool(samples.size) and (int(samples.max()) >= 1 << 32 or int(samples.min()) < 0)
        size = "<i8" if wide else "<u4"
        line = Line(
            j=number,
            lane=message.lane,
            rows=len(message.origin),
            digest=found.digest.hex(),
            lane_digest=f"{rolling:032x}",
            samples=samples.astype(size).tobytes(),
            segments=None if found.segments is None else found.segments.astype("<u4").tobytes(),
            marks=found.marks.astype("<u4", copy=False).tobytes(),
            wide=wide,
        )
        self._file.write(_json.encode(line) + b"\n")
        if self.rolling.batches % FLUSH_EVERY == 0:
            self._file.flush()

    def flush(self) -> None:
        """Write out what is buffered."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """End the leg."""
        if self._file is not None:
            self._file.close()
            self._file = None


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

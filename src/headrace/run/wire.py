"""What goes over the socket between a parent and one worker: frames of header, pickle and buffers.

    header   kind u8 | flags u8 | buffers u16 | a i32 | b i32 | first i64 | seconds f64 | body u64, then for each
    buffer   offset i64 (in the slab; -1: the bytes follow in the frame) | size u64
    body     a pickle (protocol 5); may itself lie in the slab: then `buffers` counts it as the last one and body is 0
    bytes    of those buffers that are not in the slab

Large contiguous buffers leave the pickle (PEP 574) and go through the slab; everything else stays in it. Items
are pickled plainly, which is 1.3-1.7 times faster than by value; a pickle that mentions the main script is made
again by value, since the worker's `__main__` is not the user's.
"""

from __future__ import annotations

import gc
import pickle
import socket
import struct
import sys
from typing import TYPE_CHECKING

from headrace.run.failure import from_exception
from headrace.run.shm import THRESHOLD

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from headrace.run.failure import Failure
    from headrace.run.shm import SlabReader, SlabWriter

Bytes = bytes | bytearray | memoryview

HEADER = struct.Struct("<BBHiiqdQ")
BUFFER = struct.Struct("<qQ")

INIT, ITEMS, ACK, FAILED_START, EMIT, END, READY = range(1, 8)
LAST, BODY_IN_SLAB = 1, 2  # flags


class Frame:
    """A received frame: its numbers, its body, and its buffers, ready for `decode`."""

    __slots__ = ("a", "b", "body", "buffers", "first", "flags", "kind", "let_go", "nbytes", "seconds")

    def __init__(self, head: tuple[Any, ...], body: Bytes) -> None:
        """`head` as `HEADER` unpacks it."""
        self.kind, self.flags, _, self.a, self.b, self.first, self.seconds, self.nbytes = head
        self.body = body
        self.buffers: list[Any] = []
        self.let_go: Callable[[], None] | None = None

    def decode(self) -> Any:
        """The object of the body; to be called once. If it raises, `salvage` is left to call."""
        value = _loads(self.body, self.buffers)
        if self.let_go is not None:
            self.body = b""
            self.let_go()
        return value

    def salvage(self) -> Any:
        """What can be read after `decode` has raised, with an `Unreadable` for what cannot."""
        from headrace.run import salvage  # only a failure pays for it

        try:
            return salvage.load(self.body, self.buffers)
        finally:
            self.discard()

    def discard(self) -> None:
        """Let go of the body and the buffers unread, instead of `decode`."""
        self.body = b""
        self.buffers.clear()
        if self.let_go is not None:
            self.let_go()


def _loads(body: Bytes, buffers: list[Any]) -> Any:
    """Read a pickle, with the garbage collector held back.

    A thousand small dicts set it off several times, and every hundredth time it walks through all that the process holds: with
    200 000 rows in a list of the user's, that was 1.3 of 1.9 us an item. Only a process with one thread does it, since
    nobody else can switch the collector on or off in the meantime.
    """
    threads = sys.modules.get("threading")
    if not gc.isenabled() or (threads is not None and threads.active_count() > 1):
        return pickle.loads(body, buffers=buffers)  # noqa: S301 (from our own parent or worker)
    gc.disable()
    try:
        return pickle.loads(body, buffers=buffers)  # noqa: S301 (as above)
    finally:
        gc.enable()


class Inbox:
    """How buffers that lie in a slab become arrays here: leased (no copy), or copied by `copy` and let go of."""

    def __init__(
        self, reader: SlabReader | None, copy: Callable[[memoryview], Any] | None = None, *, writable: bool = True
    ) -> None:
        """Read from `reader`; `copy=None` leases, `writable` or not."""
        self._writable = writable
        self._reader = reader
        self._copy = copy

    def array(self, offset: int, size: int) -> Any:
        """The buffer of an array."""
        assert self._reader is not None
        if self._copy is None:
            array = self._reader.lease(offset, size)
            array.flags.writeable = self._writable
            return array
        array = self._copy(self._reader.view(offset, size))
        self._reader.release(offset)
        return array

    def body(self, offset: int, size: int) -> tuple[memoryview, Callable[[], None]]:
        """The bytes of a pickle, and what to call after reading them."""
        reader = self._reader
        assert reader is not None
        return reader.view(offset, size), lambda: reader.release(offset)

    def fill(self, frame: Frame, table: list[tuple[int, int]], loose: Callable[[int], Any]) -> bool:
        """Give the frame its buffers, `loose(size)` for those in the stream; False at the end of the stream."""
        frame.nbytes += sum(size for _, size in table)
        if frame.flags & BODY_IN_SLAB:
            frame.body, frame.let_go = self.body(*table.pop())
        for offset, size in table:
            buffer = self.array(offset, size) if offset >= 0 else loose(size)
            if buffer is None:
                return False
            frame.buffers.append(buffer)
        return True


class _Large:
    """A buffer callback: keeps the buffers of at least this many bytes, leaves the others in the pickle."""

    def __init__(self, least: int) -> None:
        self.kept: list[memoryview] = []
        self._least = least

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: cannot leave the pickle
            return True
        if raw.nbytes < self._least:
            return True
        self.kept.append(raw)
        return False


def dumps(value: Any) -> bytes:
    """A pickle of `value` with all of it inside, by reference where that works and by value where it does not."""
    return _dumps(value, sys.maxsize)[0]


def _dumps(value: Any, least: int = THRESHOLD) -> tuple[bytes, list[memoryview]]:
    try:
        large = _Large(least)
        data = pickle.dumps(value, protocol=5, buffer_callback=large.take)
        if b"__main__" not in data:
            return data, large.kept
    except Exception:  # noqa: BLE001 (tried by value below; the error of that is the one to report)
        pass
    import cloudpickle  # 50 ms that only this case pays

    large = _Large(least)
    return cloudpickle.dumps(value, protocol=5, buffer_callback=large.take), large.kept


class Unreadable:
    """Stands in the place of an object that could not be read; see `salvage`."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        """`error`: what its class, or the import of it, raised."""
        self.error = error

    def __repr__(self) -> str:
        """For messages about the item."""
        return "an item that cannot be unpickled"

    def failure(self, where: str, note: str) -> Failure:
        """The failure of an item that contains it. Several may: the note is added once."""
        failure = from_exception(self.error, where, None)
        failure.item = ""
        if (note := f"headrace: {note}") not in getattr(failure.error, "__notes__", ()):
            failure.error.add_note(note)
        return failure


class Packed:
    """An object that somebody else pickled: passed on as it is, without being read on the way."""

    __slots__ = ("body", "buffers")

    def __init__(self, body: bytes, buffers: list[Any]) -> None:
        """The pickle and its out-of-band buffers."""
        self.body = body
        self.buffers = buffers

    def decode(self) -> Any:
        """The object."""
        return _loads(self.body, self.buffers)

    def decode_apart(self) -> list[Any]:
        """The items of a list, with an `Unreadable` in the place of each that cannot be read."""
        try:
            return self.decode()
        except Exception:  # noqa: BLE001 (whatever unpickling a user's item raises; told item by item)
            from headrace.run import salvage  # only a failure pays for it

            return salvage.apart(salvage.load(self.body, self.buffers))


class Head:
    """The numbers of a frame. ITEMS: run `b` items after passing over `a`; ACK: `a` items took `seconds`."""

    __slots__ = ("a", "b", "first", "flags", "kind", "seconds")

    def __init__(self, kind: int, flags: int = 0, a: int = 0, b: int = 0, first: int = 0, seconds: float = 0.0) -> None:
        """See the class; `first` is the index of the first item in the whole input."""
        self.kind, self.flags, self.a, self.b, self.first, self.seconds = kind, flags, a, b, first, seconds


def encode(head: Head, value: Any, slab: SlabWriter | None) -> list[Bytes]:
    """The parts of a frame, in order, for `sendmsg`. Raises whatever pickling `value` raises."""
    if isinstance(value, Packed):
        body, kept = value.body, [memoryview(buffer).cast("B") for buffer in value.buffers]
    else:
        body, kept = _dumps(value)
    flags = head.flags
    table: list[bytes] = []
    tail: list[Bytes] = []
    for raw in kept:
        offset = slab.put(raw) if slab is not None else -1
        table.append(BUFFER.pack(offset, raw.nbytes))
        if offset < 0:
            tail.append(raw)
    size = len(body)
    if size >= THRESHOLD and slab is not None and (offset := slab.put(memoryview(body))) >= 0:
        table.append(BUFFER.pack(offset, size))
        flags |= BODY_IN_SLAB
        body, size = b"", 0
    start = HEADER.pack(head.kind, flags, len(table), head.a, head.b, head.first, head.seconds, size)
    if not table:
        return [start + body] if size < 4096 else [start, body]
    return [start + b"".join(table), body, *tail]


def frame_bytes(parts: list[Bytes]) -> int:
    """How much an encoded frame carries, through the socket and through the slab."""
    head = HEADER.unpack_from(parts[0])
    table = (BUFFER.unpack_from(parts[0], HEADER.size + n * BUFFER.size) for n in range(head[2]))
    return head[7] + sum(size for _, size in table)


def parse(data: memoryview, inbox: Inbox) -> tuple[Frame, int] | int:
    """A frame from the start of `data` and its length, or the bytes needed for it if it is not all there."""
    if len(data) < HEADER.size:
        return HEADER.size
    head = HEADER.unpack_from(data)
    count, size = head[2], head[7]
    at = HEADER.size + count * BUFFER.size
    if len(data) < at:
        return at
    table = [BUFFER.unpack_from(data, HEADER.size + n * BUFFER.size) for n in range(count)]
    total = at + size + sum(length for offset, length in table if offset < 0)
    if len(data) < total:
        return total
    frame = Frame(head, data[at : at + size])
    at += size

    def loose(length: int) -> bytearray:
        nonlocal at
        at += length
        return bytearray(data[at - length : at])

    inbox.fill(frame, table, loose)
    return frame, total


def receive(sock: socket.socket, inbox: Inbox) -> Frame | None:
    """Block until a whole frame is there; None at the end of the stream."""
    start = _exactly(sock, HEADER.size)
    if start is None:
        return None
    head = HEADER.unpack(start)
    count, size = head[2], head[7]
    rest = _exactly(sock, count * BUFFER.size + size)
    if rest is None:
        return None
    table = [BUFFER.unpack_from(rest, n * BUFFER.size) for n in range(count)]
    frame = Frame(head, memoryview(rest)[count * BUFFER.size :])
    return frame if inbox.fill(frame, table, lambda length: _exactly(sock, length)) else None


def _exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = sock.recv_into(view)
        except ConnectionResetError:  # the other side went away with bytes of ours unread: an end like any other
            return None
        if not count:
            return None
        view = view[count:]
    return data


def send(sock: socket.socket, parts: list[Bytes]) -> None:
    """Block until all parts are sent."""
    if len(parts) == 1:
        sock.sendall(parts[0])
        return
    queue = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
    while queue:
        sent = sock.sendmsg(queue[:512])
        queue = unsent(queue, sent)


def unsent(queue: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of `queue` after its first `sent` bytes."""
    for index, part in enumerate(queue):
        if sent < part.nbytes:
            return [part[sent:], *queue[index + 1 :]]
        sent -= part.nbytes
    return []

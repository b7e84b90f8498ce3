"""The program of a worker process: read a frame of items, run them, acknowledge what is done.

Started by `spawn`, in a fresh interpreter or a fork of one, never in a fork of a process that has threads. It is
single-threaded, ignores Ctrl-C (the parent decides), leaves when the parent closes the socket, and is killed by
the kernel when the parent is gone, even in the middle of a step. The parent is the user's process, which asked for it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import pickle
import signal
import socket
import sys
from array import array
from typing import TYPE_CHECKING

from headrace.run import wire
from headrace.run.failure import from_exception, pack
from headrace.run.shm import Arena, SlabReader, SlabWriter, keep_memory
from headrace.run.task import DROPPED, DROPPED_BITS, STARTED, Function, run_slice

if TYPE_CHECKING:
    from typing import Any

    from headrace.run.task import Slice

_F_SETSIG = 10  # Linux: which signal announces that a descriptor is ready; the fcntl module does not name it


def main(fd: int, lifeline: int, arena_fd: int, pages: int) -> None:
    """Serve until the parent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    line = die_with_parent(lifeline)
    sock = socket.socket(fileno=fd)
    worker = Worker(sock, Arena(arena_fd, pages))
    try:
        worker.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone or wants no more
    finally:
        worker.close()
        sock.close()
        line.close()
    leave()


def leave() -> None:
    """End this process without taking the interpreter apart, which takes several times as long and gives nobody anything.

    What a user's libraries have registered for the end runs, and what was printed is written out. A thread of theirs that
    Python would wait for makes it an ordinary end.
    """
    threads = sys.modules.get("threading")
    if threads is not None and any(
        not each.daemon for each in threads.enumerate() if each is not threads.main_thread()
    ):
        return
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  as multiprocessing does for its own
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or a pipe that nobody reads
            stream.flush()
    os._exit(0)


def die_with_parent(lifeline: int) -> socket.socket:
    """Ask the kernel to kill this process when the parent's end of `lifeline` closes, for whatever reason.

    `PR_SET_PDEATHSIG` fires when the *thread* that started the worker ends, which may be long before the parent
    does. A closed descriptor says exactly what is meant, needs no thread here, and works while a step computes.
    """
    line = socket.socket(fileno=lifeline)
    try:
        if sys.platform != "linux":
            raise OSError("no F_SETSIG")
        fcntl.fcntl(line, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:  # another system, or a sandbox without it
        _watch(line)
    with contextlib.suppress(BlockingIOError):
        line.recv(1, socket.MSG_DONTWAIT)  # nothing is ever sent on it: it ended before the lines above
        os._exit(1)
    return line


def _watch(line: socket.socket) -> None:
    """The same by a thread, where the kernel cannot."""
    import threading

    def wait() -> None:
        with contextlib.suppress(OSError):
            line.recv(1)
            os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _ends(part: Slice) -> bytes | None:
    """Which outputs are of which item, for a parent that cannot read one; None: one output an item, or one item.

    As bytes, which nobody reads unless that happens: 6 ns an item instead of 27.
    """
    return array("I", part.ends).tobytes() if part.ends and len(part.ends) > 1 else None


def _salvaged(frame: wire.Frame, error: BaseException, count: int) -> list[Any]:
    """The items of a frame that cannot be read as a whole: those that cannot be read at all are `Unreadable`."""
    from headrace.run.salvage import apart  # only a failure pays for it

    try:
        return apart(frame.salvage())
    except BaseException:  # noqa: BLE001 (items in a sequence of the user's own that cannot be read: none can)
        return [wire.Unreadable(error)] * count


class Worker:
    """One worker's state: its socket, its shared memory and its instance of the function."""

    def __init__(self, sock: socket.socket, arena: Arena) -> None:
        """Wait for nothing yet; the function arrives in the first frame."""
        self._sock = sock
        self._arena = arena
        self._inbox = wire.Inbox(SlabReader(arena.slab(0)) if arena.pages else None)
        self._slab = SlabWriter(arena.slab(1)) if arena.pages else None
        self._function: Function | None = None
        self._hand_back = True
        self._pieces = 0  # received

    def serve(self) -> None:
        """Answer frames until the end of the stream."""
        while (frame := wire.receive(self._sock, self._inbox)) is not None:
            if frame.kind == wire.INIT:
                if not self._start(frame):
                    return
            elif frame.kind == wire.ITEMS:
                self._run(frame)
            else:
                self._emit()
                return

    def close(self) -> None:
        """Tear the function down."""
        if self._function is not None:
            self._function.close()

    def _start(self, frame: wire.Frame) -> bool:
        where = "worker set-up"
        try:
            settings = frame.decode()
            self._hand_back = settings["hand_back"]
            where = settings["name"]
            if settings["keep_memory"]:
                keep_memory()
            self._function = Function(pickle.loads(settings["factory"]))  # noqa: S301 (from our own parent)
        except BaseException as error:  # noqa: BLE001 (a user's set-up or import; the parent raises it)
            failure = from_exception(error, f"set-up of {where}", None)
            failure.item = ""
            self._post(wire.Head(wire.FAILED_START), pack(failure))
            return False
        self._post(wire.Head(wire.READY), None)
        return True

    def _run(self, frame: wire.Frame) -> None:
        function = self._function
        assert function is not None
        begin, stop, first = frame.a, frame.a + frame.b, frame.first
        words, bit = self._arena.words, 1 << self._pieces % DROPPED_BITS
        self._pieces += 1
        if words[DROPPED] & bit:
            frame.discard()
            self._post(wire.Head(wire.ACK, wire.LAST), ([], None, None, None))
            return
        unread: list[int] = []  # items that cannot be read here
        try:
            items = frame.decode()
        except BaseException as error:  # noqa: BLE001 (a user's __setstate__ or a missing module; told item by item)
            items = _salvaged(frame, error, stop)
            unread = [index for index in range(stop - 1, begin - 1, -1) if type(items[index]) is wire.Unreadable]
        del frame
        while begin < stop:
            edge = unread[-1] if unread else stop
            if begin == edge:
                begin += 1
                self._unreadable(items[unread.pop()], begin == stop)
                continue
            part = run_slice(function, items, (begin, edge), first, words)
            begin = part.end
            last = begin == stop or (self._hand_back and begin < edge) or bool(words[DROPPED] & bit)
            report = function.report() if function.report is not None else None
            self._acknowledge(part, last, report, items)
            if last:
                return

    def _acknowledge(self, part: Slice, last: bool, report: Any, items: Any) -> None:
        """Send the slice; a result that cannot be pickled is a failure of its own item and of no other."""
        done = part.end - part.begin
        failure = pack(part.failure) if part.failure is not None else None
        head = wire.Head(wire.ACK, wire.LAST if last else 0, done, seconds=part.seconds)
        try:
            parts = wire.encode(head, (part.values, _ends(part), failure, report), self._slab)
        except BaseException:  # noqa: BLE001 (a user's __reduce__ may raise anything; told item by item below)
            self._one_by_one(part, last, failure, report, items)
        else:
            wire.send(self._sock, parts)

    def _one_by_one(self, part: Slice, last: bool, failure: Any, report: Any, items: Any) -> None:
        ends = part.ends if part.ends is not None else list(range(1, len(part.values) + 1))
        at = 0
        for offset, end in enumerate(ends):
            values, at = part.values[at:end], end
            final = last and failure is None and offset + 1 == len(ends)
            head = wire.Head(wire.ACK, wire.LAST if final else 0, 1, seconds=part.seconds / len(ends))
            try:
                parts = wire.encode(head, (values, None, None, report), self._slab)
            except BaseException as error:  # noqa: BLE001 (as above)
                told = from_exception(error, "sending the result", items[part.begin + offset])
                told.error.add_note("headrace: the result cannot be pickled, so it cannot leave its worker process")
                if report is not None:
                    report.kept(len(values))
                parts = wire.encode(head, ([], None, pack(told), report), None)
            wire.send(self._sock, parts)
            report = report.emptied() if report is not None else None
        if failure is not None:
            self._post(wire.Head(wire.ACK, wire.LAST if last else 0, 1), ([], None, failure, None))

    def _unreadable(self, item: Any, last: bool) -> None:
        """An item that cannot be read here has failed, and no other."""
        failure = item.failure("receiving the item", "the item cannot be unpickled in the worker process")
        self._arena.words[STARTED] += 1
        self._post(wire.Head(wire.ACK, wire.LAST if last else 0, 1), ([], None, pack(failure), None))

    def _emit(self) -> None:
        """Run the function once, as a source: it sends its own frames of items; then the end."""
        function = self._function
        assert function is not None
        sent, failure = 0, None
        try:
            sent = function.fn.run(self._sock, self._slab)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:  # noqa: BLE001 (a reader's own error; the parent raises it)
            failure = pack(from_exception(error, function.where, None))
        self._post(wire.Head(wire.END), (sent, failure))
        self._sock.recv(1)  # stay until the parent has read everything and closes

    def _post(self, head: wire.Head, value: Any) -> None:
        wire.send(self._sock, wire.encode(head, value, self._slab))

"""Will these rows deadlock? Three models of how messages move, strictest last.

* "buffered": a send never waits (TCP with room). A message arrives once sent, in order, between each two ranks.
* "per-peer": the two ranks of a pair share one queue, as a pair communicator does: its operations complete in order, and a
  send only together with its receive.
* "single": one queue for all messages of a rank, as one communicator for the whole group does.

Two more serve comparison: "per-direction" (a pair has one queue for activations and one for gradients), and "blocking" (a
rank does nothing else
until its send is received, as synchronous sends do).

Computation never waits for a send, and waits for a receive only where it uses the value. The question is then whether a graph
of "waits for" has a cycle; one is found by running it, and what cannot run holds the cycle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Literal

from headrace.parallel.action import SENDS, Action, Kind
from headrace.parallel.lower import feeds, messages, peer
from headrace.parallel.schedule import Schedule

Transport = Literal["buffered", "per-peer", "single", "per-direction", "blocking"]
TRANSPORTS: tuple[Transport, ...] = ("buffered", "per-peer", "single")

Place = tuple[int, int]  # rank, position in its row


@dataclass(frozen=True)
class Message:
    """A send and the receive that it will meet: messages between two ranks meet in order, for they carry no tag."""

    send: Place
    receive: Place


def pair_up(schedule: Schedule) -> tuple[list[Message], list[Place]]:
    """Match the k-th send from a to b with the k-th receive of b from a; also the places left without a partner."""
    sends: dict[tuple[int, int], deque[Place]] = {}
    receives: dict[tuple[int, int], deque[Place]] = {}
    for rank, row in enumerate(schedule.rows):
        for position, action in messages(schedule, row):
            other = peer(schedule, action)
            if action.kind in SENDS:
                sends.setdefault((rank, other), deque()).append((rank, position))
            else:
                receives.setdefault((other, rank), deque()).append((rank, position))
    matched: list[Message] = []
    alone: list[Place] = []
    for channel in sorted(set(sends) | set(receives)):
        out, into = sends.get(channel, deque()), receives.get(channel, deque())
        while out and into:
            matched.append(Message(out.popleft(), into.popleft()))
        alone += [*out, *into]
    return matched, alone


class WaitGraph:
    """Who waits for whom. Nodes are integers: first every place of every row ("reached"), then every message ("moved")."""

    def __init__(self, schedule: Schedule, transport: Transport, matched: list[Message] | None = None) -> None:
        self.schedule = schedule
        self.transport: Transport = transport
        self.matched = pair_up(schedule)[0] if matched is None else matched
        self.base: list[int] = []
        total = 0
        for row in schedule.rows:
            self.base.append(total)
            total += len(row)
        self.num_places = total
        self.needs: list[list[int]] = [[] for _ in range(total + len(self.matched))]
        self._rows()
        self._messages()

    def node(self, place: Place) -> int:
        """The node of a place."""
        return self.base[place[0]] + place[1]

    def _rows(self) -> None:
        """A row is run in order, and a computation waits for the message that brings its input."""
        moved = {m.receive: self.num_places + i for i, m in enumerate(self.matched)}
        for rank, row in enumerate(self.schedule.rows):
            pending: list[tuple[Action, int]] = []
            for position, action in enumerate(row):
                node = self.base[rank] + position
                if position:
                    self.needs[node].append(node - 1)
                if (rank, position) in moved:
                    pending.append((action, moved[rank, position]))
                elif action.is_compute and pending:
                    used = [item for item in pending if any(feeds(item[0], leaf) for leaf in action.leaves())]
                    self.needs[node] += [item[1] for item in used]
                    pending = [item for item in pending if item not in used]

    def _messages(self) -> None:
        """A message moves when its ends are reached and, on a strict transport, when its queues have come to it."""
        queues: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        self.queues_of: dict[int, list[list[int]]] = {}
        for index, message in enumerate(self.matched):
            node = self.num_places + index
            self.needs[node] += [self.node(message.send), self.node(message.receive)]
            if self.transport == "blocking":
                self._block(message, node)
            for place, other in ((message.send, message.receive), (message.receive, message.send)):
                key = self._queue(place, other)
                if key is not None:
                    queues.setdefault(key, []).append((place[1], node))
        for entries in queues.values():
            queue = [node for _, node in sorted(entries)]
            for before, after in zip(queue, queue[1:], strict=False):
                self.needs[after].append(before)
            for node in queue:
                self.queues_of.setdefault(node, []).append(queue)

    def _queue(self, place: Place, other: Place) -> tuple[object, ...] | None:
        """The queue in which an end of a message stands on its own rank."""
        if self.transport == "single":
            return (place[0],)
        if self.transport == "per-peer":
            return (place[0], other[0])
        if self.transport == "per-direction":
            kind = self.schedule.rows[place[0]][place[1]].kind
            return (place[0], other[0], kind in (Kind.SEND_F, Kind.RECV_F))
        return None

    def _block(self, message: Message, node: int) -> None:
        """Nothing after either end of a blocking message is reached before it has moved."""
        for rank, position in (message.send, message.receive):
            if position + 1 < len(self.schedule.rows[rank]):
                self.needs[self.base[rank] + position + 1].append(node)

    def stuck(self) -> set[int]:
        """Run what can run; the nodes that never can."""
        missing = [len(needs) for needs in self.needs]
        users: list[list[int]] = [[] for _ in self.needs]
        for node, needs in enumerate(self.needs):
            for need in needs:
                users[need].append(node)
        ready = [node for node, n in enumerate(missing) if n == 0]
        done = 0
        while ready:
            done += 1
            for user in users[ready.pop()]:
                missing[user] -= 1
                if missing[user] == 0:
                    ready.append(user)
        return {node for node, n in enumerate(missing) if n > 0} if done < len(missing) else set()

    def shortest_cycle(self, stuck: set[int]) -> list[int]:
        """The shortest chain of waits that closes, each node waiting for the next.

        Of all that is stuck only little matters: the place where each rank stands, and the message at the head of each queue.
        What comes behind them waits because they do.
        """
        places = (node for node in stuck if node < self.num_places)
        stands: dict[int, int] = {}
        for node in places:
            rank = self.rank_of(node)
            stands[rank] = min(stands.get(rank, node), node)
        waits: dict[int, list[int]] = {}
        fresh = list(stands.values())
        while fresh:
            node = fresh.pop()
            if node not in waits:
                waits[node] = self._waits(node, stuck, stands)
                fresh += waits[node]
        cycles = (_cycle_from(start, waits) for start in sorted(waits))
        return min((cycle for cycle in cycles if cycle), key=len, default=[])

    def _waits(self, node: int, stuck: set[int], stands: dict[int, int]) -> list[int]:
        """What a stuck node waits for now: a rank for messages, a message for ranks and for the heads of its queues."""
        if node < self.num_places:
            return [need for need in self.needs[node] if need >= self.num_places and need in stuck]
        message = self.matched[node - self.num_places]
        ranks = [stands[place[0]] for place in (message.send, message.receive) if self.node(place) in stuck]
        heads = [next(n for n in queue if n in stuck) for queue in self.queues_of.get(node, [])]
        return list(dict.fromkeys(ranks + [head for head in heads if head != node]))

    def rank_of(self, node: int) -> int:
        """The rank of a place."""
        return bisect_right(self.base, node) - 1

    def describe(self, node: int) -> str:
        """A node for a person: rank, position and action, or the two ends of a message."""
        if node < self.num_places:
            rank = self.rank_of(node)
            return (
                f"rank {rank} at {self.schedule.rows[rank][node - self.base[rank]]} (position {node - self.base[rank]})"
            )
        message = self.matched[node - self.num_places]
        send, receive = (self.schedule.rows[r][p] for r, p in (message.send, message.receive))
        return f"message {send} of rank {message.send[0]} to {receive} of rank {message.receive[0]}"


def _cycle_from(start: int, waits: dict[int, list[int]]) -> list[int]:
    """Breadth first: the shortest way from a node back to itself; empty if there is none."""
    parent: dict[int, int] = {start: start}
    layer = [start]
    while layer:
        following: list[int] = []
        for node in layer:
            for need in waits[node]:
                if need == start:
                    path = [node]
                    while path[-1] != start:
                        path.append(parent[path[-1]])
                    return path[::-1]
                if need not in parent:
                    parent[need] = node
                    following.append(need)
        layer = following
    return []


def by_tensor(schedule: Schedule) -> list[Message]:
    """Match sends and receives by what they carry, as if messages had tags: what the computations alone demand."""
    sends: dict[tuple[bool, int, int | None], Place] = {}
    receives: dict[tuple[bool, int, int | None], Place] = {}
    for rank, row in enumerate(schedule.rows):
        for position, action in messages(schedule, row):
            forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
            if action.kind in SENDS:
                sends[forward, action.stage + (1 if forward else -1), action.microbatch] = (rank, position)
            else:
                receives[forward, action.stage, action.microbatch] = (rank, position)
    return [Message(sends[key], place) for key, place in receives.items() if key in sends]


def runs_in_step(schedule: Schedule, matched: list[Message]) -> bool:
    """Whether the rows run even if every rank does one thing at a time and each send waits for its receive.

    Then there is one order of all actions that agrees with every row and every queue, so they run on any of the
    transports: the quick proof. The reverse does not hold.
    """
    partner = {m.send: m.receive for m in matched} | {m.receive: m.send for m in matched}
    position = [0] * schedule.num_ranks
    runnable = list(range(schedule.num_ranks))
    while runnable:
        rank = runnable.pop()
        row = schedule.rows[rank]
        while position[rank] < len(row):
            other = partner.get((rank, position[rank]))
            if other is not None:
                if position[other[0]] != other[1]:
                    break
                position[other[0]] += 1
                runnable.append(other[0])
            position[rank] += 1
    return all(position[rank] == len(row) for rank, row in enumerate(schedule.rows))


def deadlock(schedule: Schedule, transport: Transport, matched: list[Message] | None = None) -> list[str]:
    """The shortest cycle of waits of a lowered schedule on a transport, as lines for a person; empty if it runs."""
    graph = WaitGraph(schedule, transport, matched)
    stuck = graph.stuck()
    return [graph.describe(node) for node in graph.shortest_cycle(stuck)] if stuck else []

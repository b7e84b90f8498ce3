"""`homogeneity`: rows that mix no components (`"full"`), or only components of one group (`"group"`).

Every domain has a packer of its own, with its own bins, pool and leftovers at a flush. A row leaves when the document
that completes it arrives, whatever the domain, so the order of rows does not depend on how the stream is cut into blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np

from headrace.core.block import COMPONENT, Block, Drop, Ints, Origin, concat_blocks
from headrace.core.op import Accumulator
from headrace.errors import CheckpointError, ConfigError
from headrace.ops.pack.fields import AlignedFields

_UNGROUPED: Final = 1 << 32
"""Domains of components in no group are numbered from here, so that they never meet a group's number."""


class DomainGroups:
    """Components that may share a row: `{group: [component names]}`.

    >>> DomainGroups({"prose": ["web", "books"], "code": ["python"]}).to_member_map()
    {'web': 'prose', 'books': 'prose', 'python': 'code'}
    """

    __slots__ = ("_groups",)

    def __init__(self, groups: Mapping[str, Sequence[str]]) -> None:
        """Refuse empty groups, names that are no strings, and a component in two places."""
        if not groups:
            raise ConfigError("DomainGroups: no group is given; leave homogeneity='group' out instead")
        members: dict[str, str] = {}
        for group, names in groups.items():
            if isinstance(names, str):
                raise ConfigError(f"DomainGroups: group {group!r} is one string, {names!r}; give a list of names")
            if not names:
                raise ConfigError(f"DomainGroups: group {group!r} is empty")
            for name in names:
                if type(name) is not str or type(group) is not str:
                    raise ConfigError(f"DomainGroups: names are strings, found {name!r} in group {group!r}")
                if name in members:
                    raise ConfigError(f"DomainGroups: component {name!r} is in {members[name]!r} and in {group!r}")
                members[name] = group
        self._groups = {group: tuple(names) for group, names in groups.items()}

    def to_member_map(self) -> dict[str, str]:
        """Group of each component."""
        return {name: group for group, names in self._groups.items() for name in names}

    def validate_against(self, names: Iterable[str]) -> None:
        """ConfigError if a member is none of these components."""
        known = set(names)
        unknown = [name for name in self.to_member_map() if name not in known]
        if unknown:
            raise ConfigError(f"DomainGroups: no component is called {unknown[0]!r}; known: {', '.join(sorted(known))}")

    def domains(self, components: Mapping[str, int]) -> dict[int, int]:
        """Domain number of each component id: the place of its group, or one of its own."""
        self.validate_against(components)
        places = {group: place for place, group in enumerate(self._groups)}
        groups = self.to_member_map()
        return {i: places[groups[name]] if name in groups else _UNGROUPED + i for name, i in components.items()}

    def describe(self) -> dict[str, list[str]]:
        """Groups and members, msgpack-able."""
        return {group: list(names) for group, names in self._groups.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DomainGroups) and list(self._groups.items()) == list(other._groups.items())

    def __hash__(self) -> int:
        return len(self.to_member_map())

    def __repr__(self) -> str:
        return f"DomainGroups({self.describe()!r})"


class Packer(Accumulator, Protocol):
    """An accumulator of documents that another packer may hand over, also in part."""

    def begun(self) -> Ints:
        """Tokens of each document of `held()` that have left."""
        ...

    def adopt(self, documents: Block, begun: Ints) -> list[Block]:
        """As `push`, of documents whose first `begun` tokens have left; for an accumulator that holds nothing."""
        ...


class RowPacker(Packer, Protocol):
    """A packer that says which document completed each row."""

    closers: list[int]
    """Of each row that the last `push` returned: the place in the pushed block of the document that completed it."""


class DomainPacker:
    """A packer for each domain of one lane."""

    def __init__(
        self,
        make: Callable[[AlignedFields], RowPacker],
        make_fields: Callable[[], AlignedFields],
        domains: Mapping[int, int] | None,
        lane: int,
    ) -> None:
        """`domains` maps component ids to domains; None makes each component its own."""
        self._make, self._make_fields, self._domains, self._lane = make, make_fields, domains, lane
        self._clear()

    def _clear(self) -> None:
        self._fields = self._make_fields()  # judged over all domains, in the order of the stream
        self._packers: dict[int, tuple[RowPacker, AlignedFields]] = {}

    def push(self, block: Block) -> list[Block]:
        """Rows that are full now, in the order in which they were completed."""
        return self._give(block, lambda packer, rows: packer.push(replace(block.take(rows), drops=())))

    def begun(self) -> Ints:
        """Tokens of each held document that have left, domain by domain."""
        begun = [self._packers[domain][0].begun() for domain in sorted(self._packers)]
        return np.concatenate([np.empty(0, np.int64), *begun])

    def adopt(self, documents: Block, begun: Ints) -> list[Block]:
        """Each domain takes over its own."""
        return self._give(documents, lambda packer, rows: packer.adopt(documents.take(rows), begun[rows]))

    def _give(self, block: Block, give: Callable[[RowPacker, Ints], list[Block]]) -> list[Block]:
        self._fields.align(block)
        blocks: list[Block] = []
        closers: list[Ints] = []
        drops = list(block.drops)
        for domain, rows in self._split(block):
            packer = self._packer(domain)
            for out in give(packer, rows):
                drops += out.drops
                if len(out):
                    blocks.append(replace(out, drops=()))
            if packer.closers:
                closers.append(rows[packer.closers])
        rows_out = [_in_order(blocks, np.concatenate(closers))] if blocks else []
        return _with_drops(rows_out, drops, self._lane)

    def flush(self) -> list[Block]:
        """What every domain holds, domain by domain."""
        out = [block for domain in sorted(self._packers) for block in self._packer(domain).flush()]
        self._clear()
        return out

    end = flush

    def held(self) -> Origin:
        """What every domain holds, domain by domain."""
        held = [self._packers[domain][0].held() for domain in sorted(self._packers)]
        return Origin.concat(held) if held else Origin.empty()

    def state(self) -> dict[str, Any]:
        """Each domain's number, how many of the held documents are its, and its state."""
        domains: list[list[Any]] = []
        for domain in sorted(self._packers):
            packer = self._packer(domain)
            domains.append([domain, len(packer.held()), packer.state()])
        return {"fields": self._fields.state(), "domains": domains}

    def restore(self, state: dict[str, Any], held: Block | None) -> None:
        """Give each domain its documents back."""
        self._clear()
        self._fields.restore(state["fields"])
        at = 0
        for domain, count, inner in state["domains"]:
            part = held.slice(at, at + count) if held is not None and count else None
            self._packer(domain).restore(inner, part)
            at += count

    def _packer(self, domain: int) -> RowPacker:
        if domain not in self._packers:
            fields = self._make_fields()
            self._packers[domain] = (self._make(fields), fields)
        packer, fields = self._packers[domain]
        fields.restore(self._fields.state())
        return packer

    def _split(self, block: Block) -> list[tuple[int, Ints]]:
        """Domains in the block, and the rows of each."""
        components = block.origin.ids[:, COMPONENT]
        if self._domains is not None:
            found, places = np.unique(components, return_inverse=True)
            components = np.asarray([self._domains[i] for i in found.tolist()], np.int64)[places]
        return [(int(d), (components == d).nonzero()[0]) for d in np.unique(components)]


def renumbered(state: Mapping[str, Any], numbers: Mapping[int, int], grouped: bool) -> dict[str, Any]:
    """A `DomainPacker`'s state for components that have other ids now: `numbers` maps old ones to new ones."""

    def number(domain: int) -> int:
        if grouped and domain < _UNGROUPED:
            return domain
        old = domain - _UNGROUPED if grouped else domain
        if old not in numbers:
            raise CheckpointError(
                f"pack_flat: open rows hold documents of component {old}, which the curriculum no longer lists"
            )
        return domain - old + numbers[old]

    return {**state, "domains": [[number(domain), *rest] for domain, *rest in state["domains"]]}


def _in_order(blocks: list[Block], closers: Ints) -> Block:
    rows = concat_blocks(blocks)
    return rows if (closers[1:] >= closers[:-1]).all() else rows.take(np.argsort(closers, kind="stable"))


def _with_drops(out: list[Block], drops: list[Drop], lane: int) -> list[Block]:
    if not drops:
        return out
    out = out or [Block(lane, Origin.empty(), {})]
    return [out[0].dropping(*drops), *out[1:]]

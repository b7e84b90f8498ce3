"""Small messages between the ranks of a pipeline: bytes from one to all, numbers added up, gradients of shared weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from headrace.errors import ConfigError
from headrace.parallel.torch_stage import Tie


class Group:
    """The ranks of one pipeline. `rank` counts within it; `device` is where its messages live (NCCL wants a GPU)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Wrap a process group; None is all processes."""
        if not dist.is_initialized():
            raise ConfigError(
                "no process group; start with torchrun and call torch.distributed.init_process_group() before making a "
                "DistributedPipeline (Pipeline runs in one process)"
            )
        self.handle = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise ConfigError(f"process {dist.get_rank()} is not a member of the pipeline's group; pass its own group")
        on_gpu = dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def global_rank(self, rank: int) -> int:
        """The rank among all processes."""
        return rank if self.handle is None else dist.get_global_rank(self.handle, rank)

    def broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        """`data` of rank `source`, on every rank."""
        mine = b"" if data is None else data
        length = torch.tensor([len(mine)], dtype=torch.int64, device=self.device)
        root = self.global_rank(source)
        dist.broadcast(length, root, group=self.handle)
        if self.rank == source:
            body = torch.frombuffer(bytearray(mine or b"\0"), dtype=torch.uint8).to(self.device)
        else:
            body = torch.empty(max(1, int(length.item())), dtype=torch.uint8, device=self.device)
        dist.broadcast(body, root, group=self.handle)
        return body.cpu().numpy().tobytes()[: int(length.item())]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """What every rank has, on every rank, by rank."""
        return [self.broadcast_bytes(data if self.rank == r else None, r) for r in range(self.size)]

    def gather_equal(self, data: bytes) -> list[bytes]:
        """The same for data of one length on every rank, in one collective."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.handle)
        return [tensor.cpu().numpy().tobytes() for tensor in everyone]

    def broadcast_numbers(self, values: Sequence[Tensor | float], source: int) -> Tensor:
        """Scalars of rank `source`, on every rank, in double precision on the way; the others give as many of any value."""
        numbers = torch.zeros(len(values), dtype=torch.float64, device=self.device)
        for place, value in enumerate(values):
            numbers[place] = value.detach() if isinstance(value, Tensor) else value
        dist.broadcast(numbers, self.global_rank(source), group=self.handle)
        return numbers

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier(group=self.handle)


class SharedWeights:
    """Copies of one parameter in several stages, kept equal: same start, and gradients added up after each step.

    The gradient of a shared weight is the sum over its places. Each copy gets its own part, so without this the copies
    drift apart at the first optimizer step. Copies live on several ranks, or on one: two stages of one rank share an
    object, until `fully_shard` gives each stage its own shards. Freeze or thaw a copy on every rank that has one.
    """

    def __init__(
        self, ties: Sequence[Tie], modules: dict[int, nn.Module], stage_to_rank: Sequence[int], group: Group
    ) -> None:
        """Make a process group for each weight that crosses ranks; every rank of the pipeline takes part.

        `modules` are the local stages as they run, wrapped or not; names are those of the plain stages.
        """
        self.duplicates: set[int] = set()  # ids of parameters that are counted elsewhere in norms
        self._shared: list[_Copies] = []
        for tie in ties:
            ranks = sorted({stage_to_rank[stage] for stage in tie.stages})
            if group.rank not in ranks:
                continue
            local = list(
                {id(p): p for p in (_get(modules[s], name) for s, name in tie.places if s in modules)}.values()
            )
            owner = stage_to_rank[tie.stages[0]]
            handle = None
            if len(ranks) > 1:
                handle = dist.new_group([group.global_rank(r) for r in ranks], use_local_synchronization=True)
            if handle is not None or len(local) > 1:
                self._shared.append(_Copies(local, handle, group.global_rank(owner)))
            self.duplicates.update(id(p) for p in (local if group.rank != owner else local[1:]))

    def align(self) -> None:
        """Give every copy the values of the first stage's."""
        for copies in self._shared:
            first = _local(copies.parameters[0].detach())
            if copies.handle is not None:
                dist.broadcast(first, copies.owner, group=copies.handle)
            for other in copies.parameters[1:]:
                _local(other.detach()).copy_(first)

    def snapshot(self) -> list[list[Tensor | None]]:
        """The gradients that had accumulated before a step, so that they are not added up twice."""
        return [[None if p.grad is None else _local(p.grad).clone() for p in c.parameters] for c in self._shared]

    def add_gradients(self, before: list[list[Tensor | None]]) -> None:
        """Sum this step's gradients over the copies; `before` is the snapshot, which is summed already.

        A frozen weight keeps no gradient: an optimizer would take one of zeros for a reason to decay the weight.
        """
        for copies, snapshot in zip(self._shared, before, strict=True):
            trained = [(p, old) for p, old in zip(copies.parameters, snapshot, strict=True) if p.requires_grad]
            if not trained:  # on every rank: the ranks have compared that
                continue
            for parameter, _ in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            grads = [(_local(cast(Tensor, p.grad)), old) for p, old in trained]
            total = torch.stack([grad if old is None else grad - old for grad, old in grads]).sum(0)
            if copies.handle is not None:
                dist.all_reduce(total, group=copies.handle)
            for grad, old in grads:
                grad.copy_(total if old is None else total + old)


@dataclass(frozen=True)
class _Copies:
    """The copies of one weight on this rank, the group of ranks that have some (None: this one only), and whose counts."""

    parameters: list[nn.Parameter]
    handle: Any
    owner: int


def gradient_norm(gradients: Sequence[Tensor], group: Group, norm_type: float) -> Tensor:
    """The common norm of the gradients of all ranks; every rank calls it with its own, each shared weight's on one rank only."""
    norm = torch.nn.utils.get_total_norm(gradients, norm_type) if gradients else torch.tensor(0.0)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    total = norm.detach().to(group.device, torch.float64).reshape(1)
    if norm_type == float("inf"):
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group.handle)
    else:
        total = total**norm_type
        dist.all_reduce(total, group=group.handle)
        total = total ** (1 / norm_type)
    return total[0]


def clock_offset(group: Group, rounds: int = 12) -> float:
    """Seconds to add to this rank's monotonic clock to get rank 0's; half the fastest round trip is the error."""
    offset, best = 0.0, float("inf")
    number = torch.zeros(1, dtype=torch.float64, device=group.device)
    for rank in range(1, group.size):
        for _ in range(rounds):
            if group.rank == rank:
                sent = time.monotonic()
                dist.send(number, group.global_rank(0), group=group.handle)
                dist.recv(number, group.global_rank(0), group=group.handle)
                trip = time.monotonic() - sent
                if trip < best:
                    best, offset = trip, float(number.item()) - (sent + trip / 2)
            elif group.rank == 0:
                dist.recv(number, group.global_rank(rank), group=group.handle)
                number.fill_(time.monotonic())
                dist.send(number, group.global_rank(rank), group=group.handle)
    return offset


def _get(module: nn.Module, name: str) -> nn.Parameter:
    """A parameter by its name in the plain stage, also when `DistributedDataParallel` is around it."""
    return (module.module if isinstance(module, DistributedDataParallel) else module).get_parameter(name)


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lives here; of a sharded one, its shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""The processes that train together: those `torchrun` started, or this one alone."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Group:
    """How many processes there are, which one this is, and what they tell each other."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @property
    def leads(self) -> bool:
        """One process of the group writes files and speaks."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element by element over all processes."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, value: float) -> float:
        """Over all processes."""
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def gather(self, x: Tensor) -> list[Tensor]:
        """The tensor of each process, in order of rank; all have the same shape."""
        if self.size == 1:
            return [x]
        parts = [torch.empty_like(x, device=self.device) for _ in range(self.size)]
        dist.all_gather(parts, x.to(self.device))
        return [part.cpu() for part in parts]

    def same(self, values: Sequence[float]) -> list[float]:
        """What the first process says."""
        if self.size == 1:
            return list(values)
        said = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(said, 0)
        return said.tolist()

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            self.sum([0.0])

    def _reduce(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, how)
        return total.tolist()


@contextmanager
def joined(device: torch.device | str | None = None) -> Iterator[Group]:
    """The group this process belongs to, entered on the way in and left on the way out.

    Under `torchrun` it talks through NCCL between GPUs and gloo between CPUs; a group that is up already is used as
    it is; without either the process is alone. Inside, its GPU is PyTorch's current one, and so the one whose generator
    is saved.
    """
    device = own_device(device)
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ and not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            together = dist.is_initialized()
            yield Group(dist.get_rank(), dist.get_world_size(), device) if together else Group(device=device)
    finally:
        if started:
            dist.destroy_process_group()


def own_device(asked: torch.device | str | None = None) -> torch.device:
    """Where this process computes: where it is asked to, else on its own GPU where there are any, else on the CPU.

    `"cuda"`, without a number, is its own GPU as well.
    """
    place = torch.device("cuda" if asked is None else asked)
    if place.type != "cuda":
        return place
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if place.index is None else place
    if asked is not None:
        raise ValueError(f"device {str(place)!r} needs a GPU, and there is none; pass 'cpu' (--device cpu)")
    return CPU


def spread(objective: nn.Module, group: Group, *, shard: bool) -> nn.Module:
    """The module made ready for its group: DistributedDataParallel, or its weights shared out by FSDP2.

    Every process starts from the weights of the first. Under FSDP2 each layer of a `ModuleList` is gathered when it
    is used, and the rest at once.
    """
    if group.size == 1:
        return objective
    with torch.no_grad():
        for x in objective.state_dict().values():
            dist.broadcast(x, 0)
    if not shard:
        return DistributedDataParallel(objective, device_ids=[group.device] if group.device.type == "cuda" else None)
    # To be imported, these take as long as the rest of PyTorch.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(group.device.type, (group.size,))
    lists = [module for module in objective.modules() if isinstance(module, nn.ModuleList)]
    for layer in itertools.chain.from_iterable(reversed(lists)):  # what is inside goes first
        fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


def exchanging(module: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Whether the backward pass inside sums gradients over the group: only the last of an accumulation does."""
    if isinstance(module, DistributedDataParallel) and not now:
        return module.no_sync()
    if isinstance(module, Sharded):
        module.set_requires_gradient_sync(now)
    return nullcontext()


@runtime_checkable
class Sharded(Protocol):
    """What `fully_shard` makes of a module."""

    def set_requires_gradient_sync(self, now: bool, /) -> None: ...

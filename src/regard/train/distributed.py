"""The process group of a run: the processes that `torchrun` started, or this one alone."""

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
    """A process group: rank and size, and the collective operations that training needs."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and reports progress."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over all processes."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, value: float) -> float:
        """Return the largest value over all processes."""
        return self._reduce([value], dist.ReduceOp.MAX)[0]

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensor of each process, in order of rank; all have the same shape."""
        if self.size == 1:
            return [x]
        parts = [torch.empty_like(x, device=self.device) for _ in range(self.size)]
        dist.all_gather(parts, x.to(self.device))
        return [part.cpu() for part in parts]

    def same(self, values: Sequence[float]) -> list[float]:
        """Return the values of the first process."""
        if self.size == 1:
            return list(values)
        said = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(said, 0)
        return said.tolist()

    def wait(self) -> None:
        """Block until every process has called this."""
        if self.size > 1:
            self.sum([0.0])

    def _reduce(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, how)
        return total.tolist()


@contextmanager
def process_group(device: torch.device | str | None = None) -> Iterator[Group]:
    """Join the process group for the duration of the block.

    Under `torchrun` the backend is NCCL between GPUs and gloo between CPUs; a group that is already initialized is used
    as it is; otherwise the process is alone. Inside, the process's GPU is PyTorch's current device, so that its random
    generator is the one that is saved.
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
    """Return the device of this process: `asked` if given, else its own GPU if there are any, else the CPU.

    `"cuda"` without an index means the process's own GPU.
    """
    place = torch.device("cuda" if asked is None else asked)
    if place.type != "cuda":
        return place
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if place.index is None else place
    if asked is not None:
        raise ValueError(f"device {str(place)!r} needs a GPU, and this machine has none; pass 'cpu' (--device cpu)")
    return CPU


def distribute(objective: nn.Module, group: Group, *, shard: bool) -> nn.Module:
    """Wrap the module for its process group: in DistributedDataParallel, or with weights sharded by FSDP2.

    Every process starts from the weights of the first. Under FSDP2 each layer of a `ModuleList` is gathered when it
    runs, and all other weights together.
    """
    if group.size == 1:
        return objective
    with torch.no_grad():
        for x in objective.state_dict().values():
            dist.broadcast(x, 0)
    if not shard:
        return DistributedDataParallel(objective, device_ids=[group.device] if group.device.type == "cuda" else None)
    # Importing these takes as long as the rest of PyTorch.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(group.device.type, (group.size,))
    lists = [module for module in objective.modules() if isinstance(module, nn.ModuleList)]
    for layer in itertools.chain.from_iterable(reversed(lists)):  # inner modules first
        fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


def gradient_sync(module: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Set whether the backward pass inside sums gradients over the group: only the last of an accumulation does."""
    if isinstance(module, DistributedDataParallel) and not now:
        return module.no_sync()
    if isinstance(module, Sharded):
        module.set_requires_gradient_sync(now)
    return nullcontext()


@runtime_checkable
class Sharded(Protocol):
    """A module after `fully_shard`."""

    def set_requires_gradient_sync(self, now: bool, /) -> None: ...

"""Where batches come from: anything that can be iterated an epoch at a time and says where it stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Epochs(Protocol):
    """Epochs of batches that can be left in the middle and taken up again.

    Iterating yields what is left of the present epoch; when that is exhausted, the next iteration yields the next
    epoch. The order of an epoch depends on the seed and its number alone.

    `state()` is the place behind the last batch yielded, in Python numbers, strings, lists and dicts, and `restore`
    goes there. Over several processes each has its own share of the batches, of which all have eaten equally many:
    the state of the first restores every one.
    """

    def __iter__(self) -> Iterator[Any]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any], /) -> None: ...


class Shuffled:
    """Batches held in memory, in a new order each epoch.

    >>> batches = Shuffled(["a", "b", "c"], seed=1)
    >>> first = next(iter(batches))
    >>> rest = Shuffled(["a", "b", "c"], seed=1)
    >>> rest.restore(batches.state())
    >>> sorted([first, *rest])
    ['a', 'b', 'c']

    Process `rank` of `world` takes every world-th batch of the same order.
    """

    def __init__(self, batches: Sequence[Any], *, seed: int = 0, rank: int = 0, world: int = 1) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank must be at least 0 and below world={world}, got {rank}")
        self.batches, self.seed, self.rank, self.world = batches, seed, rank, world
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.batches), generator=generator).tolist()[self.rank :: self.world]
        while self.position < len(order):
            self.position += 1
            yield self.batches[order[self.position - 1]]
        self.epoch, self.position = self.epoch + 1, 0

    def __len__(self) -> int:
        return len(range(self.rank, len(self.batches), self.world))

    def state(self) -> dict[str, Any]:
        """The epoch and how many of its batches are behind, here and on each other process; what the order goes by."""
        return {"epoch": self.epoch, "position": self.position, "world": self.world, **self._settings()}

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Go to a place that `state` gave, with the same batches and seed, if need be on other processes.

        States of earlier versions do not say what seed and batches they are of; they are taken at their word.
        """
        for name, value in self._settings().items():
            if (saved := state.get(name, value)) != value:
                raise ValueError(f"the state was saved with {name}={saved!r}, got {name}={value!r}; use the same")
        behind = state["position"] * state["world"]
        if behind % self.world:
            raise ValueError(f"{behind} batches are behind, which {self.world} processes cannot have shared equally")
        self.epoch, self.position = state["epoch"], behind // self.world

    def _settings(self) -> dict[str, int]:
        """What the order of an epoch depends on."""
        return {"seed": self.seed, "batches": len(self.batches)}


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`: in dicts, lists, tuples, dataclasses, or with a `to` of its own."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(value, device) for value in batch)
    if hasattr(batch, "to"):
        return batch.to(device)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: moved(getattr(batch, f.name), device) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **values)
    return batch

"""Sources of batches: anything that yields an epoch at a time and can save and restore its position."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..data_fingerprint import data_fingerprint


@runtime_checkable
class Epochs(Protocol):
    """Epochs of batches that can be interrupted and resumed.

    Iterating yields the rest of the current epoch; when that is exhausted, the next iteration yields the next epoch.
    The order of an epoch depends only on the seed and the number of the epoch.

    `state()` returns the position after the last batch yielded, in Python numbers, strings, lists and dicts, and
    `restore` goes there. With several processes each has its own share of the batches, and all have consumed the same
    number: the state of the first process restores every one.

    A method `fingerprint()`, if there is one, returns a text that identifies the data, or None: `fit` saves it, and
    refuses to resume with data of another fingerprint.
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
        if not (hasattr(batches, "__getitem__") and hasattr(batches, "__len__")):
            raise TypeError(
                f"batches must be a list of batches, got {type(batches).__name__}; write Shuffled(list(...))"
            )
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

    def fingerprint(self) -> str | None:
        """Return a fingerprint of the batches if they are a list, else None."""
        return data_fingerprint(self.batches)

    def state(self) -> dict[str, Any]:
        """Return the epoch, the batches consumed by each process, and the settings that determine the order."""
        return {"epoch": self.epoch, "position": self.position, "world": self.world, **self._settings()}

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Go to a position from `state`, with the same batches and seed; the number of processes may differ.

        States of earlier versions hold no seed and number of batches; these are not checked then.
        """
        for name, value in self._settings().items():
            if (saved := state.get(name, value)) != value:
                raise ValueError(f"the state was saved with {name}={saved!r}, got {name}={value!r}; use the same")
        behind = state["position"] * state["world"]
        if behind % self.world:
            raise ValueError(
                f"the state is after {behind} batches, which {self.world} processes cannot share equally; resume with "
                f"a number of processes that divides {behind}"
            )
        self.epoch, self.position = state["epoch"], behind // self.world

    def _settings(self) -> dict[str, int]:
        """Return the settings that determine the order of an epoch."""
        return {"seed": self.seed, "batches": len(self.batches)}


def move_to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor of a batch to `device`: in dicts, lists, tuples, dataclasses, or objects with a method `to`."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move_to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move_to_device(value, device) for value in batch)
    if hasattr(batch, "to"):
        return batch.to(device)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: move_to_device(getattr(batch, f.name), device) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **values)
    return batch

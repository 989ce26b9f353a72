"""A PyTorch `DataLoader` as epochs of batches that `fit` can resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..data_fingerprint import data_fingerprint
from . import rng


class LoaderEpochs:
    """Epochs of a `DataLoader`, in an order that depends only on the seed and the number of the epoch.

    The generators of the loader and of its sampler are seeded at the beginning of each epoch, and a sampler with
    `set_epoch` gets its number. `restore` loads the batches before the position once more and skips them. A sampler
    of another kind must give the same order in each process that resumes.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int = 0) -> None:
        self.loader, self.seed = loader, seed
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        self.loader.generator = generator
        samplers: tuple[Any, ...] = (self.loader.sampler, getattr(self.loader.batch_sampler, "sampler", None))
        for sampler in samplers:
            if hasattr(sampler, "generator"):
                sampler.generator = generator
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
        batches = iter(self.loader)
        with rng.preserved_generators():  # what the skipped batches draw was drawn before the checkpoint
            for _ in range(self.position):
                next(batches, None)
        for batch in batches:
            self.position += 1
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def __len__(self) -> int:
        return len(self.loader)

    def fingerprint(self) -> str | None:
        """Return a fingerprint of the data set if it is a list, else None."""
        return data_fingerprint(self.loader.dataset)  # type: ignore[arg-type]

    def state(self) -> dict[str, Any]:
        """Return the epoch, the batches consumed, and the seed."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed}

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Go to a position from `state`."""
        if state.get("seed") != self.seed:
            raise ValueError(f"the state was saved with seed={state.get('seed')!r}, got seed={self.seed}; use the same")
        self.epoch, self.position = state["epoch"], state["position"]

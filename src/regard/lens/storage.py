"""Where a capture keeps its tensors: on their device, on another one, or in files of a folder."""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch
from torch import Tensor

from ..ops.sizes import parse_size


class Kept(Protocol):
    """A tensor that can be had again."""

    @property
    def nbytes(self) -> int:
        """The memory it takes while nobody looks."""
        ...

    def get(self) -> Tensor: ...


class Store:
    """Puts tensors away, within a budget of memory.

    `to` is a device, a folder, or None for where they are. Then what is kept shares memory with the model's own tensor,
    unless that is part of a larger one, was written in place or was made in inference mode.
    """

    def __init__(self, to: torch.device | str | Path | None = None, budget: str | None = None) -> None:
        self.folder, self.device = None, None
        if isinstance(to, Path):
            to.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="capture-", dir=to))
        elif to is not None:
            self.device = _device(to)
        self.budget, self.limit = budget, None if budget is None else parse_size(budget)
        self.held = 0
        self._numbers = count()

    @property
    def in_place(self) -> bool:
        """Do tensors stay where they are?"""
        return self.device is None and self.folder is None

    def put(self, x: Tensor, what: str) -> Kept:
        """Keep a tensor; raises `MemoryError` before the budget is passed."""
        if self.folder is not None:
            path = self.folder / f"{next(self._numbers):06d}.safetensors"
            safetensors.torch.save_file({"x": x.detach().contiguous().cpu()}, path)
            return Filed(path)
        self.charge(x.nbytes, what, x.shape)
        return Held(_own(x, self.device))

    def drop(self, kept: Kept) -> None:
        """Give back what a tensor took."""
        self.held -= kept.nbytes
        if isinstance(kept, Filed):
            kept.path.unlink()

    def charge(self, nbytes: int, what: str, shape: torch.Size | None = None) -> None:
        """Count memory that something is about to take."""
        if self.limit is not None and self.held + nbytes > self.limit:
            what = what if shape is None else f"{what} of shape {tuple(shape)}"
            raise MemoryError(
                f"{what} takes {nbytes / 1e6:.3g} MB, and with the {self.held / 1e6:.3g} MB kept so far that is more "
                f"than budget={self.budget!r}; capture fewer layers= or heads=, write to=Path(...) to keep tensors in "
                "files, or keep=['entropy', 'received'] to keep measures only"
            )
        self.held += nbytes


class Held:
    """A tensor in memory, guarded: if its numbers were changed in place since, asking for it raises."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, _version(tensor)

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def get(self) -> Tensor:
        if _version(self._tensor) != self._version:
            raise RuntimeError(
                f"a captured tensor of shape {tuple(self._tensor.shape)} was changed in place by the model after it "
                "attended; write capture(model, to='cpu') or to=Path(...), which copy what they keep"
            )
        return self._tensor


class Filed:
    """A tensor in a file of its own, mapped into memory while somebody looks."""

    nbytes = 0

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self) -> Tensor:
        return safetensors.torch.load_file(self.path)["x"]


def _own(x: Tensor, device: torch.device | None) -> Tensor:
    """The tensor without its history, safe to hold on to."""
    x = x.detach()
    if device is None and _version(x) == 0 and x.untyped_storage().nbytes() <= x.nbytes:
        return x
    with torch.inference_mode(False):
        return x.to(device or x.device, copy=True)


def _version(x: Tensor) -> int | None:
    """How often a tensor was written in place; None for those of inference mode, which do not count."""
    return None if x.is_inference() else x._version


def _device(to: torch.device | str) -> torch.device:
    try:
        return torch.device(to)
    except (RuntimeError, TypeError):
        raise ValueError(f"to must be a device, or the Path of a folder, got {to!r}; write to=Path({to!r})") from None

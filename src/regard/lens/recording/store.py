"""Where a capture keeps its tensors: on their device, on another one, or in files of a folder."""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor

from ...ops.memory_limit import parse_size
from ...ops.torch_state import in_functorch


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
        self.in_place = to is None  # do tensors stay where they are?
        self.budget, self.limit = budget, None if budget is None else parse_size(budget)
        self.held = 0
        self._numbers = count()

    def put(self, x: Tensor, what: str, version: int | None = None) -> Kept:
        """Keep a tensor; raises `MemoryError` before the budget is passed.

        `version` says how often it had been written to when it was seen, if that is some time ago.
        """
        if self.folder is not None:
            path = self.folder / f"{next(self._numbers):06d}.safetensors"
            safetensors.torch.save_file({"x": x.detach().contiguous().cpu()}, path)
            return Filed(path)
        self.charge(x.nbytes, what, x)
        if version is not None and version_of(x) != version:
            return Held(x, version)  # there is nothing left to keep: asking for it raises
        if self.in_place and is_own(x):
            return Held(x.detach() if x.requires_grad else x, 0)
        with torch.inference_mode(False):
            return Held(x.detach().to(self.device or x.device, copy=True))

    def drop(self, kept: Kept) -> None:
        """Give back what a tensor took."""
        self.held -= kept.nbytes
        if isinstance(kept, Filed):
            kept.path.unlink()

    def charge(self, nbytes: int, what: str, x: Tensor | None = None) -> None:
        """Count memory that something, or a tensor, is about to take."""
        if self.limit is not None and self.held + nbytes > self.limit:
            what = what if x is None else f"{what} of shape {tuple(x.shape)}"
            raise MemoryError(
                f"{what} takes {nbytes / 1e6:.3g} MB, and with the {self.held / 1e6:.3g} MB kept so far that is more "
                f"than budget={self.budget!r}; capture fewer layers= or heads=, write to=Path(...) to keep tensors in "
                "files, or keep=['entropy', 'received'] to keep measures only"
            )
        self.held += nbytes


class Held:
    """A tensor in memory, guarded: if its numbers were changed in place since, asking for it raises."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor, version: int | None = None) -> None:
        self._tensor, self._version = tensor, version_of(tensor) if version is None else version

    @property
    def nbytes(self) -> int:
        return self._tensor.nbytes

    def get(self) -> Tensor:
        if version_of(self._tensor) != self._version:
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


def check_holds_numbers(*args: Any, **kwargs: Any) -> None:
    """Raise where what an attention is called with cannot be kept: it stands for more, or for less, than it holds."""
    if in_functorch():
        raise RuntimeError(
            "capture keeps numbers, and within torch.vmap, torch.func.grad and their kin tensors stand for others; "
            "call the model outside of it, on a batch, and backward() for gradients"
        )
    if any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values())):
        raise TypeError(
            "capture takes batches of one length, got a nested tensor; pad it, x.to_padded_tensor(0.0), and hide the "
            "padding with a mask"
        )


def is_own(x: Tensor) -> bool:
    """Has nobody written to the tensor, and is it the whole of its memory?"""
    return not x.is_inference() and x._version == 0 and x.untyped_storage().nbytes() <= x.nbytes


def version_of(x: Tensor) -> int | None:
    """How often a tensor was written in place; None for those of inference mode, which do not count."""
    return None if x.is_inference() else x._version


def _device(to: torch.device | str) -> torch.device:
    try:
        device = torch.device(to)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"to must be a device, or the Path of a folder, got {to!r}; write to='cpu' or to='cuda', or to=Path({to!r})"
        ) from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"to={str(to)!r} is a device this machine does not have; write to='cpu'") from None
    return device

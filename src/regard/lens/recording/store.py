"""The store of a capture's tensors, on their device, on another device or in files; and snapshots of terms."""

from __future__ import annotations

import tempfile
from itertools import count
from operator import is_
from pathlib import Path
from typing import Any, Protocol, TypeVar

import safetensors.torch
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from ... import torch_internals
from ...ops.memory_limit import parse_size
from ...ops.terms.term import Term

TermT = TypeVar("TermT", bound=Term)


class KeptTensor(Protocol):
    """A tensor that a store keeps."""

    @property
    def nbytes(self) -> int:
        """The memory that it takes; 0 for a tensor in a file."""
        ...

    def get(self) -> Tensor: ...


class Store:
    """Keeps tensors within a memory budget.

    `to` is a device, a folder, or None to leave tensors on their device. With None a kept tensor shares memory with the
    model's own tensor, unless that is a view of a larger one, was written in place or was made in inference mode; then
    it is copied.
    """

    def __init__(self, to: torch.device | str | Path | None = None, budget: str | None = None) -> None:
        self.folder, self.device = None, None
        if isinstance(to, Path):
            to.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="capture-", dir=to))
        elif to is not None:
            self.device = _parse_device(to)
        self.in_place = to is None  # tensors stay on their device
        self.budget, self.limit = budget, None if budget is None else parse_size(budget)
        self.held = 0  # bytes kept in memory
        self._numbers = count()

    def put(self, x: Tensor, what: str, version: int | None = None) -> KeptTensor:
        """Keep a tensor; raises `MemoryError` if that would exceed the budget.

        `version` is the tensor's version counter when the model called attention, if `put` runs later.
        """
        if self.folder is not None:
            path = self.folder / f"{next(self._numbers):06d}.safetensors"
            safetensors.torch.save_file({"x": x.detach().contiguous().cpu()}, path)
            return TensorInFile(path)
        self.charge(x.nbytes, what, x)
        if version is not None and version_of(x) != version:
            return TensorInMemory(x, version)  # the values of the call are overwritten: `get` raises
        if self.in_place and owns_unmodified_memory(x):
            return TensorInMemory(x.detach() if x.requires_grad else x, 0)
        return TensorInMemory(self.copy(x))

    def copy(self, x: Tensor) -> Tensor:
        """Return a copy of a tensor in memory, without its gradients."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return x.detach().to(self.device or x.device, copy=True)
        return x.detach().to(self.device or x.device, copy=True) if x.requires_grad or self.device else x.clone()

    def drop(self, kept: KeptTensor) -> None:
        """Release the memory, or delete the file, of a kept tensor."""
        self.held -= kept.nbytes
        if isinstance(kept, TensorInFile):
            kept.path.unlink()

    def charge(self, nbytes: int, what: str, x: Tensor | None = None) -> None:
        """Count memory that will be allocated for `what`; raises `MemoryError` if it would exceed the budget."""
        if self.limit is not None and self.held + nbytes > self.limit:
            what = what if x is None else f"{what} of shape {tuple(x.shape)}"
            raise MemoryError(
                f"{what} takes {nbytes / 1e6:.3g} MB, and with the {self.held / 1e6:.3g} MB kept so far that is more "
                f"than budget={self.budget!r}; capture fewer layers= or heads=, write to=Path(...) to keep tensors in "
                "files, or keep=['entropy', 'received'] to keep measures only"
            )
        self.held += nbytes


class TensorInMemory:
    """A tensor in memory. `get` raises if the tensor was changed in place after it was kept."""

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


class TensorInFile:
    """A tensor in a file of its own, mapped into memory while it is used."""

    nbytes = 0

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self) -> Tensor:
        return safetensors.torch.load_file(self.path)["x"]


class TermSnapshots:
    """Copies of terms, so that a tape keeps the masks and biases of the call even if their tensors change later.

    A tensor is copied once and shared by all layers until it is written to in place. The copies count towards the
    budget of the store, if one is given.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._terms: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._tensors = WeakTensorKeyDictionary()

    def copy(self, term: TermT) -> TermT:
        """Return the term over copies of its tensors, without gradients."""
        snapshot = term.map_tensors(self._copy_tensor)
        if snapshot is term:  # a term without tensors
            return term
        known: TermT | None = self._terms.get(term)
        if known is not None and all(map(is_, known.tensors(), snapshot.tensors())):
            return known
        self._terms[term] = snapshot
        return snapshot

    def _copy_tensor(self, x: Tensor) -> Tensor:
        version, known = version_of(x), self._tensors.get(x)
        if known is not None:
            known_version, copy = known
            if torch.equal(copy, x) if version is None else known_version == version:
                return copy
        with torch.inference_mode(False):
            copy = x.detach().clone()
        if self._store is not None:
            self._store.charge(copy.nbytes, "a tensor of a mask, bias, score or normalizer", copy)
        self._tensors[x] = version, copy
        return copy


def check_not_nested(*args: Any, **kwargs: Any) -> None:
    """Raise if a tensor among the arguments is nested."""
    for x in (*args, *kwargs.values()):  # every attention asks, so no generator is made
        if isinstance(x, Tensor) and x.is_nested:
            raise TypeError(
                "capture takes batches of one length, got a nested tensor; pad it with x.to_padded_tensor(0.0), and "
                "hide the padding with a mask"
            )


def owns_unmodified_memory(x: Tensor) -> bool:
    """Whether a tensor is the whole of its memory and was never written to in place."""
    return not x.is_inference() and x._version == 0 and x.untyped_storage().nbytes() <= x.nbytes


def version_of(x: Tensor) -> int | None:
    """Return the number of in-place writes to a tensor; None for an inference tensor, which does not count them.

    A wrapper of a torch.func transform does not count them either; the tensor in it does.
    """
    if torch_internals.functorch_transform() is not None:
        x = torch_internals.innermost_tensor(x)
    return None if x.is_inference() else x._version


def _parse_device(to: torch.device | str) -> torch.device:
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

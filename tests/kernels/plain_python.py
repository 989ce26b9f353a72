"""Device functions of kernels as plain Python: the same code over numbers and PyTorch tensors.

Triton's interpreter does not run Gluon, and neither runs a function outside of a kernel. Here the words of the dialect
(`gl.where`, `tl.reshape`, ...) are those of PyTorch, memory is a tensor, and a pointer is an index into it.
"""

from __future__ import annotations

from types import FunctionType, ModuleType, SimpleNamespace

import torch
from torch import Tensor


class Tile(torch.Tensor):
    """A tensor that answers to the names tiles have in Triton and Gluon, and is a value as they are, without layout."""

    type = SimpleNamespace(layout=None)

    def expand_dims(self, dim):
        return self.unsqueeze(dim)

    def __iadd__(self, other):
        return self + other

    def __isub__(self, other):
        return self - other


def tile(x) -> Tile:
    return torch.as_tensor(x).as_subclass(Tile)


class Memory:
    """Numbers in memory that kernels store to and add to; a pointer is an index."""

    def __init__(self, size: int, fill: float = 0.0) -> None:
        self.values = torch.full((size,), fill)

    def store(self, pointer, value, mask=None):
        at, value, mask = self._flat(pointer, value, mask)
        self.values[at[mask]] = value[mask]

    def atomic_add(self, pointer, value, mask=None, sem=None):
        at, value, mask = self._flat(pointer, value, mask)
        self.values.index_add_(0, at[mask], value[mask])

    @staticmethod
    def _flat(pointer, value, mask):
        mask = torch.tensor(True) if mask is None else mask
        parts = torch.broadcast_tensors(pointer, value, mask)
        return [x.as_subclass(Tensor).flatten() for x in parts]


def dialect(memory: Memory | None = None) -> SimpleNamespace:
    """Words of `tl` and `gl` that our device functions use."""
    return SimpleNamespace(
        # numbers, or tensors of them
        maximum=lambda x, y: torch.maximum(tile(x), tile(y)),
        minimum=lambda x, y: torch.minimum(tile(x), tile(y)),
        where=lambda condition, x, y: torch.where(tile(condition), tile(x), tile(y)),
        cdiv=lambda x, y: -(-x // y),
        # tiles
        arange=lambda start, stop, layout=None: tile(torch.arange(start, stop)),
        zeros=lambda shape, dtype, layout=None: tile(torch.zeros(shape)),
        zeros_like=torch.zeros_like,
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, dims: x.permute(dims),
        split=lambda x: x.unbind(-1),
        sum=lambda x, dim: x.sum(dim),
        convert_layout=lambda x, layout: x,
        store=None if memory is None else memory.store,
        atomic_add=None if memory is None else memory.atomic_add,
        # types and layouts
        constexpr=None,
        int32=torch.int32,
        int64=torch.int64,
        uint32=torch.int64,
        float32=torch.float32,
        SliceLayout=lambda *given: None,
        BlockedLayout=lambda *given: None,
    )


def plain_python(module: ModuleType, memory: Memory | None = None, **other: object) -> SimpleNamespace:
    """The device functions of a module as functions of Python that call each other; `other` replaces names."""
    names = dict(vars(module)) | {word: dialect(memory) for word in ("tl", "gl")}
    functions = {name: kernel.fn for name, kernel in vars(module).items() if _is_device_function(kernel)}
    for name, function in functions.items():
        names[name] = FunctionType(function.__code__, names, name, function.__defaults__)
    names |= other
    return SimpleNamespace(**{name: names[name] for name in functions})


def _is_device_function(x: object) -> bool:
    return isinstance(getattr(x, "fn", None), FunctionType)

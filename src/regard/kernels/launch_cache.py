"""Cache of compiled kernels by launch arguments, which skips Triton's own lookup.

For every argument of every launch Triton checks whether a pointer is 16-byte aligned and whether a number is 1 or a
multiple of 16, to find the kernel compiled for such arguments. With thirty arguments that takes longer than many a
kernel runs. `launch` remembers the compiled kernel under a key that holds all that Triton checks, and more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

MAX_CACHED_LAUNCHES = 4096
PLAIN_TYPES = frozenset((int, float, type(None)))  # arguments of these types are part of the key as they are
CAN_CACHE = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)  # not tried on earlier versions

_cache: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch `kernel[grid](*arguments, **constants)` on the device of the first tensor.

    `constants` are all constexpr arguments of the kernel, and launch options such as num_warps.
    """
    device = next(x.device for x in arguments if isinstance(x, Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, **constants)
        return
    if not (CAN_CACHE and isinstance(kernel, JITFunction)):
        kernel[grid](*arguments, **constants)
        return
    parts = [x if type(x) in PLAIN_TYPES else _key_part(x) for x in arguments]
    key = (id(kernel), torch.cuda.current_device(), *constants.values(), *parts)
    entry = _cache.get(key)
    if entry is not None:
        compiled, constexprs = entry
        compiled[(*grid, 1, 1)[:3]](*arguments, *constexprs)
        return
    if len(_cache) == MAX_CACHED_LAUNCHES:
        _cache.clear()
    compiled = kernel[grid](*arguments, **constants)
    _cache[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _key_part(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    # A tensor descriptor is compiled for its dtype and the shape of its tiles.
    return (x.base.dtype, *x.block_shape) if hasattr(x, "block_shape") else x

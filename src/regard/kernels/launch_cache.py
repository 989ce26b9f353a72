"""Launches that come again go straight to the kernel.

Of every argument of every launch Triton asks whether a pointer lies on 16 bytes, and whether a number is 1 or a
multiple of 16, to find the kernel that was compiled for such arguments. With thirty of them that takes longer than many
a kernel runs. What it found is remembered here, by all that it asked for and more.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

MOST = 4096  # launches to remember
PLAIN = frozenset((int, float, type(None)))  # are what they are, as most arguments
TOLD = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)  # earlier ones have not been tried

_known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
    """`kernel[grid](*given, **named)`, on the device of the first tensor.

    `named` are its constants, all of them, and options such as num_warps.
    """
    device = next(x.device for x in given if isinstance(x, Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *given, **named)
        return
    if not (TOLD and isinstance(kernel, JITFunction)):
        kernel[grid](*given, **named)
        return
    seen = [x if type(x) in PLAIN else _seen(x) for x in given]
    key = (id(kernel), torch.cuda.current_device(), *named.values(), *seen)
    known = _known.get(key)
    if known is not None:
        compiled, constants = known
        compiled[(*grid, 1, 1)[:3]](*given, *constants)
        return
    if len(_known) == MOST:
        _known.clear()
    compiled = kernel[grid](*given, **named)
    _known[key] = compiled, tuple(named[name] for name in kernel.arg_names[len(given) :])


def _seen(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    # Of a matrix that is read by tiles: what kind of tiles.
    return (x.base.dtype, *x.block_shape) if hasattr(x, "block_shape") else x

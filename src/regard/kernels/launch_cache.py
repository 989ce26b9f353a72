"""Cache of compiled kernels by launch arguments, which skips Triton's own lookup.

For every argument of every launch Triton checks whether a pointer is 16-byte aligned and whether a number is 1 or a
multiple of 16, to find the kernel compiled for such arguments. With thirty arguments that takes longer than many a
kernel runs. `launch` remembers the compiled kernel under a key that holds all that Triton checks, and more.

To compile a kernel takes seconds. Within `without_waiting` another thread compiles it, and `launch` raises
`StillCompiling` until that is done, so that the caller can compute the same numbers without the kernel.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

MAX_CACHED_LAUNCHES = 4096
PLAIN_TYPES = frozenset((int, float, type(None)))  # arguments of these types are part of the key as they are
CAN_CACHE = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)  # not tried on earlier versions

PATIENCE = 0.1  # seconds to wait for another thread: longer than it takes to load a kernel from Triton's cache on disk
# While the other thread runs Python, the caller waits this long for the interpreter after each operator it launches.
# With Python's default of 5 ms a hundred operators take half a second.
SWITCH_SECONDS = 1e-4
ALWAYS_WAITS = os.environ.get("REGARD_WAIT_FOR_KERNELS", "0") not in ("", "0")

_cache: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_compiling: dict[tuple[Any, ...], Future[None]] = {}


class StillCompiling(Exception):
    """Another thread compiles the kernel of a launch."""


class _Thread(threading.local):
    waits = True  # False within `without_waiting`
    launches = True  # False within `compiling_only`


_thread = _Thread()


@contextmanager
def without_waiting() -> Iterator[None]:
    """Let `launch` raise `StillCompiling` within the block rather than wait until a kernel is compiled.

    With REGARD_WAIT_FOR_KERNELS=1 in the environment it waits nevertheless: for benchmarks, and for results that are
    equal to the last bit from the first call on.
    """
    before, _thread.waits = _thread.waits, ALWAYS_WAITS
    try:
        yield
    finally:
        _thread.waits = before


@contextmanager
def compiling_only() -> Iterator[None]:
    """Compile kernels within the block and launch none."""
    before, _thread.launches = _thread.launches, False
    try:
        yield
    finally:
        _thread.launches = before


def waits_for_kernels() -> bool:
    """True outside of `without_waiting`."""
    return _thread.waits


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch `kernel[grid](*arguments, **constants)` on the device of the first argument, a tensor.

    `constants` are all constexpr arguments of the kernel, and launch options such as num_warps.
    """
    device = arguments[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, **constants)
        return
    if not (CAN_CACHE and isinstance(kernel, JITFunction)):
        if _thread.launches:
            kernel[grid](*arguments, **constants)
        return
    parts = [x if type(x) in PLAIN_TYPES else _key_part(x) for x in arguments]
    key = (id(kernel), torch.cuda.current_device(), *constants.values(), *parts)
    entry = _cache.get(key)
    if entry is not None:
        compiled, constexprs = entry
        if _thread.launches:
            compiled[(*grid, 1, 1)[:3]](*arguments, *constexprs)
        return
    if not (_thread.waits or torch.cuda.is_current_stream_capturing()):
        _compile_beside(key, kernel, grid, arguments, constants)
    if not _thread.launches:
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


def _compile_beside(
    key: tuple[Any, ...], kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Return if Triton has the kernel of a launch; else raise, and have it compiled in another thread."""
    future = _compiling.get(key)
    if future is None:
        for other in [other for other, one in _compiling.items() if one.done() and one.exception() is None]:
            del _compiling[other]
        is_busy = any(not other.done() for other in _compiling.values())
        stand_ins = tuple(map(_stand_in, arguments))
        device = torch.cuda.current_device()
        future = _compiling[key] = _worker().submit(_compile, kernel, grid, device, stand_ins, constants)
        if not is_busy:
            wait([future], PATIENCE)
    if not future.done():
        raise StillCompiling
    del _compiling[key]
    future.result()  # it raises what the compilation raised


@cache
def _worker() -> ThreadPoolExecutor:
    """One thread: of several lengths that wait for one kernel, the first compiles it and the others find it."""
    return ThreadPoolExecutor(1, thread_name_prefix="regard-compile")


def _compile(
    kernel: Any, grid: tuple[int, ...], device: int, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with torch.cuda.device(device):
            kernel.warmup(*arguments, grid=grid, **constants)
    finally:
        sys.setswitchinterval(before)


def _stand_in(x: Any) -> Any:
    """Return a small tensor for which Triton compiles the same kernel, so that no large one is kept meanwhile."""
    if isinstance(x, Tensor):
        return x.new_empty(17)[1 if x.data_ptr() % 16 else 0 :]
    return replace(x, base=_stand_in(x.base)) if hasattr(x, "block_shape") else x

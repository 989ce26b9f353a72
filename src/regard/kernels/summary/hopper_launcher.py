"""The measures of `reduce` for the commonest calls on a Hopper GPU: the same pass, laid out for that machine.

Cost: as that of `reduce`, in less time. Half precision, 64 or 128 wide; rows that sum to 1; any mask that hides what
lies ahead from a diagonal on, and keys past a length; maps in bins of a power of two, of 8 queries and 8 keys at least,
but for the last ones; positions below 2^30. Run with Triton 3.6; with 3.7 it compiles.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..launch_cache import launch
from ..tiles import FAR, Pattern
from .generic import Reduced
from .hopper_column_sums import is_whole
from .hopper_kernel import summarize
from .hopper_pdl import zeros
from .hopper_schedule import Deal, dealt_even, dealt_long
from .hopper_tma import aligned, flat

ROWS = 128  # of a program; the kernel writes this and the next number out
COLS = 64  # of a tile of keys
HELD = 8  # neighbouring rows that two threads hold
PAIRS = 8  # neighbouring keys that four threads hold
TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


class Cut(NamedTuple):
    """Tiles of keys under way, most registers a thread, and how many programs a processor takes at once.

    Then how many blocks of rows there are for a processor, at most, where programs share the longest ones; and how sums
    are stored.
    """

    stages: int
    registers: int
    at_once: int
    few: float
    spaced: bool


CUTS = {64: Cut(4, 168, 3, 4.5, False), 128: Cut(4, 248, 2, 1.0, True)}  # the fastest measured, by width of heads


def fits(q: Tensor, sizes: tuple[int | None, int | None] | None) -> bool:
    """Does the kernel take these queries, and a map in bins of so many queries and keys?"""
    return (
        q.dtype in TYPES
        and q.shape[-1] in CUTS
        and (sizes is None or (_is_bin(sizes[0], HELD) and _is_bin(sizes[1], PAIRS)))
    )


def _is_bin(size: int | None, least: int) -> bool:
    """A power of two that is not too small?"""
    return size is not None and size >= least and size & (size - 1) == 0


def summary(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    want: frozenset[str],
    scale: float,
    offset: int,
    pattern: Pattern,
    shape: tuple[int, int] = (1, 1),
    sizes: tuple[int, int] = (ROWS, COLS),
    share: float = 1.0,
) -> Reduced:
    """Any of "entropy", "received", "max", "distance", and of bins "map": `b h i d, b g j d, b h i -> ...`.

    `shape` is that of the map, `sizes` how many queries and keys a bin of it holds; sums are taken times `share`.
    """
    b, h, n_i, d = q.shape
    g, n_j = k.shape[1:3]
    (rows, cols), (height, width) = shape, sizes
    dims = {"entropy": (n_i,), "received": (n_j,), "max": (n_i,), "distance": (n_i,), "map": (rows, cols)}
    shapes = {name: (b, h, *dims[name]) for name in want}
    if not b * n_i * n_j:
        return Reduced(**{name: torch.zeros(shapes[name], device=q.device, dtype=torch.float32) for name in want})
    q = aligned(q)
    k, k_rows, k_cols = flat(k)
    lse = lse.contiguous()
    out = _outputs(shapes, q.device, is_whole(*sizes))
    places = -(-n_i // ROWS)
    blocks, processors = places * b * h, _processors(q.device)
    cut = CUTS[d]
    at_once = cut.at_once * processors
    if pattern.low < 0:
        deal = dealt_even(blocks, at_once)
    elif blocks < cut.few * processors:
        deal = dealt_long(blocks, at_once, places)
    else:
        deal = Deal(blocks, 1, 0, 1, 1)
    programs = deal.programs(blocks)
    launch(
        summarize, (programs,),
        q, _tiles_of(k, [COLS, d]), lse, pattern.lengths,
        out.entropy, out.received, out.max, out.distance, out.map,
        *q.stride()[:3], *k_rows, k_cols, scale, offset, pattern.low, h, n_i, n_j, places, b * h, processors,
        *deal, rows, cols, share,
        d=d,
        KV_GROUP=h // g,
        STAGES=cut.stages,
        SPACED_SUMS=cut.spaced,
        ROW_BIN=height,
        COL_BIN=width,
        BACKWARD=pattern.low >= 0,
        HIDING=pattern.low > -FAR or pattern.lengths is not None or n_j % COLS != 0,
        ALL_AT_ONCE=deal.first == blocks <= at_once,
        num_warps=4,
        maxnreg=cut.registers,
        launch_pdl=want != {"map"} or not is_whole(*sizes),  # zeros come right before
    )  # fmt: skip
    return out


def _outputs(shapes: dict[str, tuple[int, ...]], device: torch.device, map_is_written: bool) -> Reduced:
    """Zeros to add to, in one piece but for the map, with room for a tile past the end of each.

    They are no views of it, for what is found may be written to and learned from.
    """
    found = {}
    for is_map in (True, False):
        places, end = _places(tuple((name, shape) for name, shape in shapes.items() if (name == "map") is is_map))
        if is_map and map_is_written:
            room = torch.empty(end, device=device, dtype=torch.float32)
        elif places:
            room = zeros(end, device)
        for name, *place in places:
            found[name] = room.as_strided(*place).data
    return Reduced(**found)


@lru_cache(maxsize=64)
def _places(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[list[tuple[Any, ...]], int]:
    """The shape, strides and start of each, one after the other, and where the last one ends."""
    places, start = [], 0
    for name, shape in shapes:
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        places.append((name, shape, strides, start))
        start += math.prod(shape) // COLS * COLS + 2 * COLS
    return places, start


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tiles_of(k: Tensor, block: list[int]) -> Any:
    return TensorDescriptor.from_tensor(k, block, _swizzled(tuple(block), TYPES[k.dtype]))


@cache
def _swizzled(block: tuple[int, int], dtype: Any) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), dtype)

"""The measures of `reduce` for the commonest calls on a Hopper GPU: the same pass, laid out for that machine.

Cost: as that of `reduce`, in less time. Half precision, 64 or 128 wide; rows that sum to 1; any mask that hides what
lies ahead from a diagonal on, and keys past a length; maps in bins of a power of two, of 4 queries and 8 keys at least,
but for the last ones; positions below 2^30. Run with Triton 3.6; with 3.7 it compiles.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .flat import aligned, flat
from .hopper import summarize
from .lanes import summed_over_lanes
from .launch import launch
from .reduce import Reduced
from .tiles import Pattern

ROWS = 128  # of a program; the kernel writes this and the next number out
COLS = 64  # of a tile of keys
HELD = 4  # neighbouring rows that a thread holds
PAIRS = 8  # neighbouring keys that four threads hold
TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


class Cut(NamedTuple):
    """Tiles of keys under way, most registers a thread, and how many programs a processor takes at once with these."""

    stages: int
    registers: int
    at_once: int


CUTS = {64: Cut(4, 128, 4), 128: Cut(2, 168, 3)}  # the fastest measured, by width
FEW = {64: Cut(4, 128, 4), 128: Cut(4, 248, 2)}  # the same where up to four programs come to a processor


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
    # Rows are written, where there is a key; keys and bins are added to, up to a tile past the end.
    rows_alone = ("entropy", "max", "distance") if n_j else ()
    out = Reduced(**{name: _output((b, h, *dims[name]), q.device, name in rows_alone) for name in want})
    if not (b and n_i and n_j):
        return out
    q = aligned(q)
    k, k_rows, k_cols = flat(k)
    assembly, operands = _map_sums(height, width)
    places = -(-n_i // ROWS)
    programs, processors = places * b * h, _processors(q.device)
    cut = (FEW if programs <= 4 * processors else CUTS)[d]
    launch(
        summarize, (programs,),
        q, _tiles_of(k, d), lse.contiguous(), pattern.lengths,
        out.entropy, out.received, out.max, out.distance, out.map,
        *q.stride()[:3], *k_rows, k_cols, scale, offset, pattern.low, h, n_i, n_j, places, processors,
        rows, cols, share,
        d=d,
        KV_GROUP=h // g,
        STAGES=cut.stages,
        ROW_BIN=height,
        COL_BIN=width,
        MAP_ASM=assembly,
        MAP_IO=operands,
        BACKWARD=pattern.low >= 0,
        ALL_AT_ONCE=programs <= cut.at_once * processors,
        num_warps=4,
        maxnreg=cut.registers,
    )  # fmt: skip
    return out


def _output(sizes: tuple[int, ...], device: torch.device, written: bool) -> Tensor:
    if written:
        return torch.empty(sizes, device=device, dtype=torch.float32)
    return torch.zeros(torch.Size(sizes).numel() + COLS, device=device, dtype=torch.float32).resize_(sizes)


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _map_sums(height: int, width: int) -> tuple[str, str]:
    """Over the keys that four lanes hold, and over those lanes whose rows are of one bin."""
    bits = (2, 1, *(bit for bit in (4, 8, 16) if height > bit // 4 * HELD))
    return summed_over_lanes(bits, tuple(range(max(1, COLS // width))))


def _tiles_of(k: Tensor, d: int) -> Any:
    layout = gl.NVMMASharedLayout.get_default_for([COLS, d], TYPES[k.dtype])
    return TensorDescriptor.from_tensor(k, [COLS, d], layout)

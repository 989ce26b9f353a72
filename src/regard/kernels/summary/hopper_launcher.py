"""Launcher of the summary kernel for Hopper GPUs: the measures of `generic`, faster, for the most common calls.

Cost: as for `generic`, in less time. Limits: half precision; heads of at most 256 features, a multiple of 16; rows that
sum to 1; masks that hide keys ahead of a diagonal, or past a length; maps whose bins, but for the last ones, hold a
power of two of queries and of keys, at least 8 of each; positions below 2^30. Run with Triton 3.6; with 3.7 it
compiles.
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
from ..tiles import UNBOUNDED, Pattern, all_lengths, padded_width
from .generic import SummaryTensors
from .hopper_column_sums import cells_fit_in_warp
from .hopper_kernel import hopper_summary_kernel
from .hopper_pdl import zeros_for_next_kernel
from .hopper_schedule import WorkSplit, split_causal_blocks, split_even_blocks

BLOCK_ROWS = 128  # rows of a program; the kernel has this number and the next one as literals
TILE_KEYS = 64
MIN_BIN_ROWS = 8  # neighbouring rows that two threads hold
MIN_PLAIN_ENTRIES = 2**26  # queries times keys
MIN_BIN_KEYS = 8  # neighbouring keys that four threads hold
GLUON_TYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


class HopperConfig(NamedTuple):
    """How the kernel is launched for one width of heads."""

    stages: int  # key tiles in flight
    registers: int  # the most a thread may use
    programs_per_processor: int  # how many run at the same time
    max_shared_blocks: float  # causal: up to this many blocks per processor, programs share the longest blocks
    padded_sums: bool  # whether sums in shared memory are padded, not swizzled


# The fastest measured for each width of a tile; narrower heads are filled with zeros.
CONFIGS = {
    64: HopperConfig(4, 168, 3, 4.5, False),
    128: HopperConfig(4, 248, 2, 1.0, True),
    256: HopperConfig(2, 248, 2, 1.0, True),
}


def is_supported(q: Tensor, bin_sizes: tuple[int | None, int | None] | None) -> bool:
    """Return whether the kernel takes these queries, and a map with this many queries and keys per bin."""
    return (
        q.dtype in GLUON_TYPES
        and 0 < q.shape[-1] <= max(CONFIGS)
        and q.shape[-1] % 16 == 0
        and (
            bin_sizes is None or (_is_bin_size(bin_sizes[0], MIN_BIN_ROWS) and _is_bin_size(bin_sizes[1], MIN_BIN_KEYS))
        )
    )


def _is_bin_size(size: int | None, least: int) -> bool:
    """Return whether a size is a power of two and at least `least`."""
    return size is not None and size >= least and size & (size - 1) == 0


def summarize_hopper(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    want: frozenset[str],
    scale: float,
    offset: int,
    pattern: Pattern,
    shape: tuple[int, int] = (1, 1),
    bin_sizes: tuple[int, int] = (BLOCK_ROWS, TILE_KEYS),
    share: float = 1.0,
) -> SummaryTensors:
    """Return any of "entropy", "received", "max", "distance", and of bins "map".

    Inputs are `b h i d, b g j d, b h i`. `shape` is the shape of the map, `bin_sizes` the number of queries and of keys
    in each bin; sums of bins are multiplied by `share`.
    """
    b, h, n_i, d = q.shape
    g, n_j = k.shape[1:3]
    (rows, cols), (high, wide) = shape, bin_sizes
    dims = {"entropy": (n_i,), "received": (n_j,), "max": (n_i,), "distance": (n_i,), "map": (rows, cols)}
    shapes = {name: (b, h, *dims[name]) for name in want}
    if not b * n_i * n_j:
        zeros = {name: torch.zeros(shapes[name], device=q.device, dtype=torch.float32) for name in want}
        return SummaryTensors(**zeros)
    q = aligned_for_tma(q)
    width = max(min(CONFIGS), padded_width(d))
    keys, key_rows, key_cols = keys_as_matrix(k, alone=width > d)
    lse = lse.contiguous()
    out = _make_outputs(shapes, q.device, cells_fit_in_warp(*bin_sizes))
    places = -(-n_i // BLOCK_ROWS)
    blocks, processors = places * b * h, _processor_count(q.device)
    config = CONFIGS[width]
    at_once = config.programs_per_processor * processors
    if pattern.low < 0:
        split = split_even_blocks(blocks, at_once)
    elif blocks < config.max_shared_blocks * processors:
        split = split_causal_blocks(blocks, at_once, places)
    else:
        split = WorkSplit(blocks, 1, 0, 1, 1)
    programs = split.programs(blocks)
    is_plain = pattern.low <= -UNBOUNDED and pattern.lengths is None and n_j % TILE_KEYS == 0
    # A kernel of its own for what is all seen is worth its compilation if it runs for long.
    masked = not is_plain or n_i * n_j < MIN_PLAIN_ENTRIES
    lengths = all_lengths(b, n_j, q.device) if masked and pattern.lengths is None else pattern.lengths
    launch(
        hopper_summary_kernel, (programs,),
        q, _key_descriptor(keys, [TILE_KEYS, width]), lse, lengths,
        out.entropy, out.received, out.max, out.distance, out.map,
        *q.stride()[:3], *key_rows, key_cols, scale, offset, pattern.low, h, h // g, n_i, n_j, d, places, b * h,
        processors, *split, int(split.first == blocks <= at_once), rows, cols, share,
        D=width,
        SLICES=-(-d // 64) if width > 128 else 0,
        STAGES=config.stages,
        PADDED_SUMS=config.padded_sums,
        ROW_BIN=high,
        COL_BIN=wide,
        CAUSAL=pattern.low >= 0,
        MASKED=masked,
        num_warps=4,
        maxnreg=config.registers,
        launch_pdl=want != {"map"} or not cells_fit_in_warp(*bin_sizes),  # the memset is launched right before
    )  # fmt: skip
    return out


def _make_outputs(shapes: dict[str, tuple[int, ...]], device: torch.device, map_is_written: bool) -> SummaryTensors:
    """Return zeros to add to, each padded by a tile, in one allocation for all but the map.

    `.data` detaches them from the allocation: users may write to the results in place and differentiate them, which
    autograd refuses for views.
    """
    outputs = {}
    for is_map in (True, False):
        parts, end = _place_outputs(tuple((name, shape) for name, shape in shapes.items() if (name == "map") is is_map))
        if is_map and map_is_written:
            buffer = torch.empty(end, device=device, dtype=torch.float32)
        elif parts:
            buffer = zeros_for_next_kernel(end, device)
        for name, *shape_strides_start in parts:
            outputs[name] = buffer.as_strided(*shape_strides_start).data
    return SummaryTensors(**outputs)


@lru_cache(maxsize=64)
def _place_outputs(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[list[tuple[Any, ...]], int]:
    """Return name, shape, strides and start of each output in one buffer, and the size of the buffer."""
    parts, start = [], 0
    for name, shape in shapes:
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        parts.append((name, shape, strides, start))
        start += math.prod(shape) // TILE_KEYS * TILE_KEYS + 2 * TILE_KEYS
    return parts, start


@cache
def _processor_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def aligned_for_tma(x: Tensor) -> Tensor:
    """Return x, copied unless every row starts at a multiple of 16 bytes and features are contiguous."""
    if x.stride(-1) == 1 and not any(n % 16 for n in (*x.stride()[:-1], x.data_ptr())):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def keys_as_matrix(k: Tensor, *, alone: bool = False) -> tuple[Tensor, tuple[int, int], int]:
    """View keys `b g j d` as one matrix, which a TMA descriptor can address; if `alone`, without columns beside a head.

    Return the matrix, the number of its rows from one batch row and from one head to the next, and the number of its
    columns from one head to the next. Heads may lie side by side or one after the other, with anything between them;
    keys stored otherwise are copied.
    """
    k = aligned_for_tma(k)
    steps = _matrix_steps(k)
    if steps is None or (alone and steps[1]):
        k = k.contiguous()
        steps = _matrix_steps(k)
        assert steps is not None
    (batch, head), side = steps
    b, g, n, d = k.shape
    matrix = k.as_strided(((b - 1) * batch + (g - 1) * head + n, (g - 1) * side + d), (k.stride(2), 1))
    return matrix, (batch, head), side


def _matrix_steps(k: Tensor) -> tuple[tuple[int, int], int] | None:
    """Return the matrix rows per batch row and head, and the columns per head; None if k is not such a matrix."""
    b, g, _, d = k.shape
    k_b, k_g, k_j, _ = k.stride()
    k_b, k_g = k_b if b > 1 else 0, k_g if g > 1 else 0
    if k_j < d or k_b % k_j:
        return None
    if k_g % k_j == 0:
        return (k_b // k_j, k_g // k_j), 0
    return ((k_b // k_j, 0), k_g) if (g - 1) * k_g + d <= k_j else None


def _key_descriptor(keys: Tensor, tile: list[int]) -> Any:
    return TensorDescriptor.from_tensor(keys, tile, _shared_layout(tuple(tile), GLUON_TYPES[keys.dtype]))


@cache
def _shared_layout(tile: tuple[int, int], dtype: Any) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(tile), dtype)

"""Add the sums over the rows of a tile to the received mass of its keys and to the bins of a map (Hopper GPUs).

Each thread has summed its own rows. It stores the sums in shared memory as `4 warps, 8 threads, 64 keys`, and one tile
later loads all the sums its warp has of fewer keys, so that lanes need not exchange values one at a time. Many
programs add to the received mass of a key. In a map with small bins a warp holds whole cells, and stores them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Two layouts of the sums in shared memory that avoid bank conflicts: swizzled by thread, or padded. Padding takes fewer
# instructions and more registers.
SWIZZLED: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[2, 1, 0]))
PADDED_BASES = [
    [0, 0, 1], [0, 0, 2], [0, 0, 4],  # 8 keys
    [0, 1, 0], [0, 2, 0], [0, 4, 0],  # the 8 threads; padding follows
    [0, 0, 8], [0, 0, 16], [0, 0, 32],  # the 8 groups of keys
    [1, 0, 0], [2, 0, 0],  # the warps
]  # fmt: skip
PADDED: gl.constexpr = gl.constexpr(gl.PaddedSharedLayout([[64, 8]], PADDED_BASES, [], [4, 8, 64]))
# Halves of 8 x 8 cells, `4 warps, 4 rows of cells, 8 cells, 2 halves`, in a layout where a thread has both halves.
HALVES: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1]],
        lane_bases=[[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0], [0, 2, 0, 0]],
        warp_bases=[[1, 0, 0, 0], [2, 0, 0, 0]],
        block_bases=[],
        shape=[4, 4, 8, 2],
    )
)
MAP_ROWS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))


class ColumnSums(NamedTuple):
    """Sums over rows in shared memory, and the first key they belong to."""

    stored: Any
    start: Any


class MapCells(NamedTuple):
    """A pointer to the map (or None), its shape, and the factor its sums are multiplied by."""

    all: Any
    rows: Any
    cols: Any
    share: Any


@gluon.constexpr_function
def cells_fit_in_warp(height: int, width: int) -> bool:
    """Return whether a bin of `height` rows and `width` keys lies within the part of a tile that one warp holds."""
    return height <= 32 and width <= 64


@gluon.jit
def add_column_sums(sums, place, received, cells, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """Add the sums to the received mass of their keys, and to the bins of the 128 rows of block `place`."""
    # A warp has 8 sums of each key. A thread loads all 8, or 4 of them if bins have fewer than 32 rows.
    sums_per_load: gl.constexpr = 8 if cells.all is None or HEIGHT >= 32 else 4
    sums_per_bin: gl.constexpr = HEIGHT // 4 if HEIGHT < 32 else 8
    of: gl.constexpr = sums_per_bin if sums_per_bin < sums_per_load else sums_per_load
    layout: gl.constexpr = gl.BlockedLayout(
        [1, sums_per_load, 16 // sums_per_load], [1, 8 // sums_per_load, 4 * sums_per_load], [4, 1, 1], [2, 1, 0]
    )
    taken = gl.sum(sums.stored.load(layout).reshape([4, 8 // of, of, 64]), 2)
    if received is not None:
        total = gl.sum(taken.reshape([4, 8 // sums_per_load, sums_per_load // of, 64]), 2)
        key = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout)))
        key = key.expand_dims(0).expand_dims(1) + gl.zeros_like(total).to(gl.int32)
        gl.atomic_add(received + (sums.start + key), total, sem="relaxed")
    if cells.all is not None:
        bins: gl.constexpr = 8 // sums_per_bin
        cols: gl.constexpr = 64 // WIDTH if WIDTH < 64 else 1
        if HEIGHT == 8 and WIDTH == 8:  # threads hold halves of two cells, and exchange one half
            halves = gl.sum(taken.reshape([4, 4, 16, 4]), 3).reshape([4, 4, 8, 2])
            total = gl.sum(gl.convert_layout(halves, HALVES), 3) * cells.share
        else:
            total = gl.sum(taken.reshape([4, 8 // of, cols, 64 // cols]), 3)
            total = gl.sum(total.reshape([4, bins, sums_per_bin // of, cols]), 2) * cells.share
        by_row: gl.constexpr = gl.SliceLayout(2, total.type.layout)
        warp = gl.arange(0, 4, layout=gl.SliceLayout(1, by_row)).expand_dims(1)
        bin = gl.arange(0, bins, layout=gl.SliceLayout(0, by_row)).expand_dims(0)
        row = ((place * 128 + warp * 32 + bin * (4 * sums_per_bin)) // HEIGHT).expand_dims(2)
        col = gl.arange(0, cols, layout=gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout)))
        col = ((sums.start.to(gl.uint32) // WIDTH).to(gl.int32) + col).expand_dims(0).expand_dims(1)
        if cells_fit_in_warp(HEIGHT, WIDTH):
            inside = (row < cells.rows) & (col < cells.cols)
            gl.store(cells.all + (row * cells.cols + col), total, mask=inside)
        else:
            at = cells.all + (gl.minimum(row, cells.rows - 1) * cells.cols + col)
            gl.atomic_add(at, total, sem="relaxed")


@gluon.jit
def clear_cells(place, first, cells, HEIGHT: gl.constexpr):
    """Store 0 in the map rows of block `place` from column `first` on: none of its 128 rows sees those keys."""
    row = place * (128 // HEIGHT) + gl.arange(0, 128 // HEIGHT, layout=gl.SliceLayout(1, MAP_ROWS))
    row = row.expand_dims(1)
    for start in range(first, cells.cols, 64):
        col = (start + gl.arange(0, 64, layout=gl.SliceLayout(0, MAP_ROWS))).expand_dims(0)
        zeros = gl.zeros([128 // HEIGHT, 64], gl.float32, layout=MAP_ROWS)
        gl.store(cells.all + (row * cells.cols + col), zeros, mask=(row < cells.rows) & (col < cells.cols))
